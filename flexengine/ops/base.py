"""What every op declares, and what it is given when it runs.

Shape legend: T tokens of a chunk, D model width, F FFN width, V vocabulary, N query heads, G key/value heads, H head
width.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from flexengine.ops.attention.choice import AttentionChoice, KernelName

if TYPE_CHECKING:
    from torch import Tensor

    from flexengine.ops.custom_loss import CustomLoss
    from flexengine.ops.experts.balance import ExpertBalance
    from flexengine.ops.placed_rows import PlacedRows, SeenBlocks

DType = Literal["compute", "float32", "int32", "uint8"]
FLOAT64_BYTES = 8


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer. `shape` is per token; `rows` replaces the token count for buffers of a fixed height.

    With `clip_rows` the height is min(rows, tokens); a height of tokens is filled up to a multiple of `multiple`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType = "compute"
    rows: int | None = None
    clip_rows: bool = False
    multiple: int = 1

    def height(self, tokens: int) -> int:
        """Rows of the tensor for a chunk of `tokens` tokens."""
        if self.rows is None:
            return -(-tokens // self.multiple) * self.multiple
        return min(self.rows, tokens) if self.clip_rows else self.rows

    def elements(self, tokens: int) -> int:
        """Number of elements for a chunk of `tokens` tokens."""
        return self.height(tokens) * math.prod(self.shape)

    def num_bytes(self, tokens: int, compute_bytes: int) -> int:
        """Bytes for `tokens` tokens when an element of the compute dtype takes `compute_bytes` bytes.

        Statistics declared float32 take 8 bytes when the compute dtype is float64.
        """
        element_bytes = {"compute": compute_bytes, "float32": max(4, compute_bytes), "int32": 4, "uint8": 1}[self.dtype]
        return self.elements(tokens) * element_bytes


class Work(NamedTuple):
    """What a command costs, free of any machine: FLOPs by kind, bytes of device memory touched, kernels launched."""

    matmul_flops: float = 0.0
    attention_forward_flops: float = 0.0
    attention_backward_flops: float = 0.0
    memory_bytes: float = 0.0
    kernels: int = 0
    fp8_flops: float = 0.0
    """FLOPs of products with FP8 operands, which are not among matmul_flops."""
    padding_flops: float = 0.0
    """Those among the attention's FLOPs that multiply zeros: they take time, and `flops` leaves them out."""
    grouped_flops: float = 0.0
    """FLOPs of products of many matrices, each with its own rows, which are not among matmul_flops."""
    head_flops: float = 0.0
    """FLOPs of the LM head's products, which are not among matmul_flops."""
    timed_flops: float = 0.0
    """FLOPs of calls that were timed as a whole: what these take is among memory_bytes, at the rate of memory."""
    fp8_weight_flops: float = 0.0
    """FLOPs of FP8 products by weights whose gradients are no FP8 products; not among fp8_flops."""

    def plus(self, other: Work) -> Work:
        """The sum of two pieces of work."""
        return Work._make(map(add, self, other))

    def times(self, factor: float) -> Work:
        """So many times this work."""
        return Work._make(factor * value for value in self)._replace(kernels=round(factor * self.kernels))

    def shared(self, calls: int) -> Work:
        """An equal share of so many calls."""
        return Work._make(value / calls for value in self)._replace(kernels=self.kernels // calls)

    @property
    def flops(self) -> float:
        """All floating-point operations that count as hardware FLOPs."""
        attention = self.attention_forward_flops + self.attention_backward_flops - self.padding_flops
        products = self.matmul_flops + self.grouped_flops + self.head_flops + self.fp8_flops + self.fp8_weight_flops
        return products + attention + self.timed_flops


class Carried(NamedTuple):
    """What the chunks of one long sequence hand on inside a layer: a row of `shape` for every token of the sequence, or
    with per_chunk a row for every chunk, which holds what that chunk leaves to the next one.

    Beside every row lies its gradient, wide, which is zero when backward comes to the sequence's last chunk.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType = "compute"
    per_chunk: bool = False

    def spec(self, sequence_tokens: int, chunk_tokens: int) -> TensorSpec:
        """All rows of a sequence that is cut into chunks."""
        rows = -(-sequence_tokens // chunk_tokens) if self.per_chunk else sequence_tokens
        return TensorSpec(self.name, self.shape, self.dtype, rows=rows)


@dataclass
class Window:
    """What the chunks of one long sequence left for the layer in work: `carried` and, in backward, `grads`, both by the
    names that the layer's ops declare.

    start: the position of this chunk's first token; chunk: its number within the sequence; chunk_tokens: of a full one.
    """

    start: int
    chunk: int = 0
    chunk_tokens: int = 1 << 14
    carried: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)

    def before(self, name: str, grad: bool = False) -> Tensor | None:
        """What the chunk before left (its gradient, to write); None for the first chunk."""
        return (self.grads if grad else self.carried)[name][self.chunk - 1] if self.chunk else None

    def left(self, name: str, grad: bool = False) -> Tensor:
        """Where this chunk leaves its own; the gradient of that, to read."""
        return (self.grads if grad else self.carried)[name][self.chunk]


class DropoutDraws(NamedTuple):
    """What decides the draws of one chunk: the run's seed, the step, and the number of the chunk's first row in it."""

    seed: int
    step: int
    first_row: int


@dataclass
class ChunkContext:
    """The batch side of one chunk: everything that is not an activation.

    input_ids, labels [T] int64 (labels are already shifted, -100 = no loss); positions [T] int32; cu_seqlens
    [num_seqs+1] int32; seq_lens as Python ints. `constants` holds per-model tensors such as inv_freq; `losses` [T]
    float32 is written by the head. attention_choices: kernels that are preferred on CUDA for shapes that were measured;
    attention: for other shapes. balance: what routers report to, where experts are balanced. weights [T], in the dtype
    of losses: factors on the losses; None = 1. custom_loss: in place of the cross-entropy. grad_factor: on gradients
    alone. dropout: what it draws. given: rows of a tower. axes [axes, T]: positions. blocks: who sees later tokens.
    """

    tokens: int
    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    seq_lens: tuple[int, ...]
    losses: Tensor
    constants: dict[str, Tensor]
    window: Window | None = None
    attention: KernelName = "flash"
    attention_choices: tuple[AttentionChoice, ...] = ()
    balance: ExpertBalance | None = None
    dropout: DropoutDraws | None = None
    weights: Tensor | None = None
    custom_loss: CustomLoss | None = None
    grad_factor: float = 1.0
    given: PlacedRows | None = None
    axes: Tensor | None = None
    blocks: SeenBlocks | None = None


@dataclass
class OpEnv:
    """Arguments of one op call, by the names the op declared.

    t: activations; p: parameters; g: gradients of activations; gp: gradient accumulators of parameters (float32, or
    float64 for float64 compute). Gradients named in `accumulate` already hold a value to add to; `first` says that gp
    holds nothing yet. again: a forward within backward, which recomputes. part: of an op that runs part by part, which
    of them this call is for; p and gp hold that part's share of the parameters. layer: the layer's number in the model.
    adapters: whether forward adds what adapters make; backward always does.
    """

    t: dict[str, Tensor]
    p: dict[str, Tensor]
    g: dict[str, Tensor]
    gp: dict[str, Tensor]
    chunk: ChunkContext
    accumulate: frozenset[str] = field(default_factory=frozenset)
    first: bool = True
    again: bool = False
    part: int = 0
    layer: int = 0
    adapters: bool = True


class Op(ABC):
    """A unit of compute inside a layer with an explicit forward and backward.

    Pure functions on tensors: forward writes the declared outputs, `backward_input` writes the gradients of
    `grad_inputs`, `backward_weight` adds to the gradients of `params`. Nothing is allocated that outlives the call
    and nothing synchronises.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    """Tensors of the checkpoint that stay as they are, in env.p beside the parameters, in float32."""
    needs_input: tuple[str, ...] = ()
    """Tensors that backward_input reads."""
    needs_weight: tuple[str, ...] = ()
    """Tensors that backward_weight reads."""
    grad_inputs: tuple[str, ...] = ()
    """Inputs that receive a gradient."""
    grad_alias: tuple[tuple[str, str], ...] = ()
    """(input, output) pairs where the gradient of the input IS the gradient of the output, unchanged (residuals)."""
    in_place: tuple[str, str] | None = None
    """(input, output): forward writes the output over the input, backward the gradient over the gradient."""
    grad_reads: tuple[str, ...] = ()
    """Tensors that are no outputs of this op, whose gradients its backward reads."""
    beside: tuple[TensorSpec, ...] = ()
    """Small tensors of other ops that are kept wherever the outputs are."""
    grad_over: tuple[str, ...] = ()
    """Inputs whose gradient may be written over their saved value, which dies with this call."""
    remakable: tuple[str, ...] = ()
    """Outputs that the input half can write over their gradients, for weight halves that then wait for it."""
    carried: tuple[Carried, ...] = ()
    """What goes from one chunk of a long sequence to the next. Forward leaves it; `fill_window` leaves the same and no
    outputs, chunk after chunk before the sequence's backward, which then visits the chunks in reverse."""
    trained: bool = True
    """Whether its parameters are: without, there is no weight half."""
    for_backward: bool = False
    """Whether backward alone reads its outputs: forward runs it only where they are kept."""
    keepable: bool = True
    """Whether its outputs may be kept; not those that take less to compute again from what is kept."""
    divisions: int = 1
    """Into how many equal parts its parameters' first dimension may be cut, which then cross the link one by one."""
    num_parts: int = 1
    """Calls that one run of the op takes: as many as there are parts, of one that runs in parts. Forward goes from the
    first part to the last, backward the other way; results have the same bits as of one call."""
    replays: bool = True
    """Whether its calls launch the same kernels with the same operands for all batches with the same lengths of
    sequences, so that a CUDA graph may stand for them."""
    whole_sequences: bool = False
    """Whether a chunk that it is called on must hold its sequences whole."""
    few_operands: bool = False
    """Whether the host issues a call in the time of its launches, as these have few operands each."""
    part_inputs: tuple[str, ...] = ()
    """What such a call reads beside inputs and, in backward_input, needs_input."""

    @property
    def kept_outputs(self) -> tuple[TensorSpec, ...]:
        """What is kept where a plan keeps the op's outputs."""
        return (*self.outputs, *self.beside)

    @property
    def has_input_half(self) -> bool:
        """Whether backward makes gradients of inputs."""
        return bool(self.grad_inputs)

    @property
    def has_weight_half(self) -> bool:
        """Whether backward makes gradients of parameters."""
        return self.trained and bool(self.params)

    def untrained(self) -> Self:
        """The same op with parameters that are not trained: of its backward there is the input half alone."""
        return self.changed(trained=False, needs_weight=())

    def changed(self, **attributes: Any) -> Self:
        """The same op with other values of attributes that it has."""
        assert all(hasattr(self, name) for name in attributes), f"{self.name} has not all of {', '.join(attributes)}"
        op = copy.copy(self)
        vars(op).update(attributes)
        return op

    def in_parts(self) -> Self:
        """The same op part by part, where it may be."""
        if self.divisions == 1:
            return self
        needed = (*self.needs_input, *self.part_inputs) if self.grad_inputs else ()
        inputs = (*self.inputs, *self.part_inputs)
        return self.changed(num_parts=self.divisions, inputs=inputs, needs_input=needed)

    def forward_only(self) -> Self:
        """The same op without any backward."""
        return self.untrained().changed(needs_input=(), grad_inputs=(), grad_alias=(), grad_over=())

    def with_next(self, following: Op) -> Op | None:
        """One op that does what this and then the following one do in fewer passes over memory, or None: forward, and
        the input halves where it has one."""
        return None

    def alone(self) -> Self:
        """The same op where it runs by itself, which one before it could take over."""
        return self

    @abstractmethod
    def forward(self, env: OpEnv) -> None:
        """Write env.t[output] for every output."""

    def backward_input(self, env: OpEnv) -> None:
        """Write (or, for names in env.accumulate, add to) env.g[input] for every input in grad_inputs."""
        raise AssertionError(f"{self.name} has no input gradient")

    def backward_weight(self, env: OpEnv) -> None:
        """Write (env.first) or add to env.gp[param] for every param."""
        raise AssertionError(f"{self.name} has no parameters")

    def fill_window(self, env: OpEnv) -> None:
        """Leave what forward leaves in env.chunk.window, from the inputs."""
        raise AssertionError(f"{self.name} carries nothing")

    @abstractmethod
    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of forward for `tokens` tokens in sequences of `seq_len`."""

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of the input half."""
        return Work()

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of the weight half."""
        return Work()

    def fill_window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """Cost of `fill_window`."""
        return Work()

    def model_flops(self, seq_len: int) -> float:
        """FLOPs of forward and backward of one sequence, without recomputation."""
        # Each half of backward takes as much as forward. An op without parameters, such as attention, multiplies
        # activations with each other, so its input half has two gradients to compute.
        inputs = (1.0 if self.params else 2.0) if self.has_input_half else 0.0
        passes = 1.0 + inputs + (1.0 if self.has_weight_half else 0.0)
        return passes * self.forward_work(seq_len, seq_len, 2).flops

    def accumulation_work(self, compute_bytes: int) -> Work:
        """What the weight half costs on top where accumulators hold an earlier chunk's sum already."""
        return Work()

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        """Buffers the call needs besides its operands; they live for the call only. half: forward, input or weight.

        What both halves of backward declare under one name is one buffer: the weight half finds what the input half
        left.
        """
        return ()

    def part_sums(self, half: str) -> tuple[TensorSpec, ...]:
        """Buffers of an op in parts that live from its first part's call to its last one's."""
        return ()

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        """Bytes that a call takes from the device allocator on CUDA, beside its operands and buffers, at the most."""
        return 0

    def window_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        """What comes on top where a chunk continues a sequence."""
        return 0

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        """Bytes that a call takes from the allocator on the CPU at the most: the plain path's in float64, at half
        the width. 16 bits are widened, which takes as much again."""
        return in_plain_width(self.workspace_bytes(tokens, FLOAT64_BYTES), compute_bytes)

    def plain_window_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        """What comes on top on the CPU where a chunk continues a sequence."""
        return in_plain_width(self.window_workspace_bytes(tokens, FLOAT64_BYTES), compute_bytes)


def in_plain_width(float64_bytes: int, compute_bytes: int) -> int:
    """Bytes of the plain path in another type, of what it takes in float64."""
    return float64_bytes // 2 if compute_bytes == 4 else float64_bytes


def plain_bytes(elements: int, compute_bytes: int) -> int:
    """Workspace of an op of which kernels take all types but float64: that of so many elements, for float64 alone."""
    return elements * compute_bytes if compute_bytes == FLOAT64_BYTES else 0


def wide(x: Tensor) -> Tensor:
    """x in float32, or in float64 as it is: what formulas compute in."""
    return x if x.element_size() == FLOAT64_BYTES else x.float()


def use_kernel(tensor: Tensor) -> bool:
    """True when the Triton kernel should run: always on CUDA, on the CPU only when its interpreter is asked for."""
    return tensor.is_cuda or os.environ.get("FLEXENGINE_INTERPRET_KERNELS") == "1"
