"""A model as data: parameter groups that cross the link together, and layers of ops over named tensors.

A group is not a layer: a tied head reads the embedding's group, so that the shared tensor is stored, updated and
exported once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from flexengine.ops.base import DType, Op, TensorSpec
from flexengine.ops.experts.balance import Balancing
from flexengine.ops.formats.weight_format import Storage
from flexengine.ops.given_rows import GivenRows, PlaceRows, placing
from flexengine.options.lora import LoRA
from flexengine.options.task import TaskHead


@dataclass(frozen=True)
class WeightSource:
    """One tensor of the Hugging Face file; a parameter is its sources stacked along dimension 0.

    decode: the decoder of checkpoint/quantised.py that makes the tensor from others of the checkpoint; None if the
    checkpoint holds it as it is. rows_in_file: rows that the checkpoint has, where new tokens have added some; None for
    all. filled: what a buffer holds where there is no checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    decode: str | None = None
    rows_in_file: int | None = None
    filled: float = 0.0

    @property
    def shape_in_file(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        return self.shape if self.rows_in_file is None else (self.rows_in_file, *self.shape[1:])


_SIGNS = {"fp8": "_scale_inv", "mxfp4": "_blocks"}
"""Decoder -> the end of the name of a tensor that is beside each one that it reads."""


def decoder_of(name: str, names: Container[str], told: str | None) -> str | None:
    """Name what decodes a tensor out of a checkpoint of tensors of these names; None if it is held as it is.

    told: the decoder by what the config says, which does not say of every tensor whether it was left out.
    """
    if f"{name}.quant_state.bitsandbytes__nf4" in names:
        return "nf4" if f"{name}.nested_absmax" in names else "nf4_float32"
    if told is None or name not in names:
        return told
    return told if f"{name}{_SIGNS.get(told, '.')}" in names else None


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the ops see it. A `vector` (norms, biases) is never decayed and keeps float32 states."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[WeightSource, ...]
    kind: Literal["matrix", "vector"] = "matrix"
    init: Literal["normal", "ones", "zeros", "kaiming"] = "normal"
    storage: Storage = "compute"
    """What a frozen matrix is stored in. Layers read it decoded to the compute dtype, or multiply what is stored."""
    multiplied_as_stored: bool = False
    """Whether layers multiply its codes as they are stored, as one matrix of all sources. All or none of the stored
    parameters of a group are."""
    added: bool = False
    """Whether it is trained beside the model's own, as adapters are: checkpoints lack it, and it starts as `init` says.
    """
    new: bool = False
    """Whether it is the model's own, but not in the checkpoint, as a head for another task: it starts as `init` says.
    """
    fused: WeightSource | None = None
    """One tensor that some checkpoints hold instead of the sources, with the elements in the same order."""
    matrices: tuple[tuple[int, ...], ...] = ()
    """Shapes of the matrices (or stacks of them) that it consists of: those of the sources, also where `fused` replaces
    them."""

    def __post_init__(self) -> None:
        if not self.matrices:
            object.__setattr__(self, "matrices", tuple(source.shape for source in self.sources))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def absent(self) -> bool:
        """Whether the checkpoint lacks it."""
        return self.added or self.new


ADAPTER_CLASS = "adapter"
BLOCK_CLASSES = ("block", ADAPTER_CLASS)
"""Classes of the groups that blocks have: their own, and what lies beside these (`GroupSpec.adapter`). A block needs
both at once, and they differ in size."""


@dataclass(frozen=True)
class GroupSpec:
    """Parameters that cross the link together. Groups of one `slot_class` share weight and gradient slots.

    frozen: the group is not trained and has weights alone: no gradient, no optimizer states, no update. divisions: the
    parameters named `cut` may be cut into this many equal parts of their first dimension. num_parts: `divisions` when
    they are cut, else 1. Parts cross the link one by one, after all other parameters of the group (in backward before
    them). adapter: the group is trained beside a frozen one of its layer (or the other way round). All of them live
    on the GPU, or all on the host, from where they stream.
    """

    name: str
    slot_class: str
    params: tuple[ParamSpec, ...]
    frozen: bool = False
    divisions: int = 1
    cut: tuple[str, ...] = ()
    num_parts: int = 1
    adapter: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(p.numel for p in self.params)


def divided(ops: Iterable[Op], params: Iterable[ParamSpec]) -> tuple[int, tuple[str, ...]]:
    """Into how many parts some parameters may be cut, and the names of those: what ops that run part by part train."""
    cut = {name: op.divisions for op in ops if op.divisions > 1 for name in op.params}
    names = tuple(param.name for param in params if param.name in cut)
    return max((cut[name] for name in names), default=1), names


class Table(NamedTuple):
    """Rotary frequencies, in radians per position, which ops find as the constant `name`.

    scaling multiplies cos and sin. `long_values`, if given, replace `values` in runs whose max_seq_len is above
    `long_from`. longest: the longest sequence that the frequencies are for; None if they are for all. extended: how
    they are scaled for more positions, in words; "" if they are not. reach: positions for which that is; 0 if unknown.
    """

    name: str
    values: tuple[float, ...]
    scaling: float = 1.0
    long_values: tuple[float, ...] = ()
    long_from: int = 0
    longest: int | None = None
    extended: str = ""
    reach: int = 0

    def values_for(self, max_seq_len: int) -> tuple[float, ...]:
        """Choose the frequencies of a run by its longest sequence."""
        return self.long_values if self.long_values and max_seq_len > self.long_from else self.values


@dataclass(frozen=True)
class LayerSpec:
    """A unit of weight streaming: a straight line of ops from `input` to `output` over named tensors.

    `params` maps the names that the ops use to (group index, parameter name), and `buffers` to tensors of the
    checkpoint that nothing trains: a few numbers, which stay on the device and are exported unchanged. Blocks of one
    kind share the same `ops` tuple, so that whatever is derived from the ops is derived once. input_width: elements per
    token of `input`, which no op of the layer writes and so none declares; input_dtype: uint8 where they are codes.
    """

    name: str
    kind: Literal["embedding", "block", "head"]
    ops: tuple[Op, ...]
    params: tuple[tuple[str, int, str], ...]
    input: str | None
    output: str | None
    input_width: int = 0
    buffers: tuple[tuple[str, WeightSource], ...] = ()
    input_dtype: DType = "compute"

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Indices of the parameter groups that this layer reads, in order of first use."""
        return tuple(dict.fromkeys(group for _, group, _ in self.params))

    @cached_property
    def backward_groups(self) -> tuple[int, ...]:
        """Those that its backward reads: all, but of an embedding what a tower is run again with."""
        if self.input is not None:
            return self.groups
        read = {name for op in self.ops if isinstance(op, PlaceRows) for name in op.backward_params}
        return tuple(dict.fromkeys(group for local, group, _ in self.params if local in read))

    @property
    def input_spec(self) -> TensorSpec | None:
        """The tensor that it reads of the layer before; None for the embedding."""
        return None if self.input is None else TensorSpec(self.input, (self.input_width,), self.input_dtype)

    @property
    def has_backward(self) -> bool:
        """Whether anything is trained in this layer or below it."""
        return any(op.has_input_half or op.has_weight_half for op in self.ops)

    @property
    def keeps(self) -> bool:
        """Whether the layer may keep its input and outputs of its ops from forward to backward."""
        return self.kind == "block" and self.has_backward


@dataclass(frozen=True)
class ModelSpec:
    """Everything the planner, the schedule and the runtime need to know about a network."""

    name: str
    family: str
    hf_config: dict = field(hash=False, compare=False)
    hidden_size: int = 0
    vocab_size: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 0
    longest_sequence: int | None = None
    """Longest sequence that learned positions or frequencies are for; None if they are for all."""
    beyond_longest: str = ""
    """What longer sequences would need; empty where that is positions or frequencies."""
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    head_source: str = "lm_head.weight"
    """Name of the head's tensor, which a checkpoint may hold even when the head is tied."""
    task: TaskHead | None = None
    """What its head labels; None for one that predicts tokens."""
    tables: tuple[Table, ...] = ()
    notice: str = ""
    """What a person should know about how the checkpoint is read; empty if nothing."""
    prefix: str = "model."
    """Start of the names of sources, but for the head's; checkpoints may have another (`models/checkpoints.py`)."""
    balancing: Balancing | None = None
    """The loss that balances experts, if the config asks for it."""
    lora: LoRA | None = None
    """The adapters that are trained beside a frozen model, if any."""
    given: GivenRows | None = field(default=None, hash=False, compare=False)
    """What gives rows to tokens that are no text, such as images, if anything does."""
    groups: tuple[GroupSpec, ...] = ()
    layers: tuple[LayerSpec, ...] = ()

    @property
    def hidden(self) -> TensorSpec:
        """The tensor between layers: rows, or the codes that stand for them (`ops/coded_rows.py`)."""
        head = self.layers[-1]
        coded = head.input_dtype != "compute"
        return TensorSpec("hidden", (head.input_width,), head.input_dtype) if coded else self.hidden_rows

    @property
    def hidden_rows(self) -> TensorSpec:
        """Its rows, as which its gradient is stored in any case."""
        return TensorSpec("hidden", (self.hidden_size,))

    @property
    def num_labels(self) -> int | None:
        """Outputs of a head for labels; None where the head predicts tokens."""
        return None if self.task is None else self.task.num_labels

    @property
    def num_axes(self) -> int:
        """Axes that positions have: three where images lie in a plane, else one."""
        return 1 if self.given is None else self.given.num_axes

    @property
    def rows_shape(self) -> tuple[int, int, int]:
        """Shape of all rows that a batch may be given, of several depths; of no elements where it has none."""
        return (0, 0, 0) if self.given is None else (self.given.depth, self.given.max_tokens, self.hidden_size)

    @property
    def trains_tower(self) -> bool:
        """Whether something is trained of what gives rows."""
        return self.given is not None and placing(self.layers[0].ops).has_weight_half

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied tensor counts once."""
        return sum(g.numel for g in self.groups)

    @property
    def num_trained_parameters(self) -> int:
        """Number of parameters that are not frozen."""
        return sum(g.numel for g in self.groups if not g.frozen)

    @property
    def embedding_source(self) -> str:
        """Name of the embedding's tensor, which a tied head shares."""
        return self.groups[0].params[0].sources[0].name

    def with_ops(self, changed: Callable[[Op], Op]) -> ModelSpec:
        """The model with other ops; layers that shared theirs go on sharing, as what is derived from ops is cached."""
        ops = {op: changed(op) for layer in self.layers for op in layer.ops}
        known = {layer.ops: tuple(ops[op] for op in layer.ops) for layer in self.layers}
        return replace(self, layers=tuple(replace(layer, ops=known[layer.ops]) for layer in self.layers))

    def named_as(self, names: Iterable[str]) -> ModelSpec:
        """Describe the sources as a checkpoint of these tensors holds them.

        The checkpoint may hold the sources of a parameter as one fused tensor, and any matrix quantised or not.
        """
        # Published checkpoints of one model differ in both, so the names themselves have to tell.
        names = set(names)

        def named(source: WeightSource) -> WeightSource:
            return replace(source, decode=decoder_of(source.name, names, source.decode))

        def renamed(param: ParamSpec) -> ParamSpec:
            fused = None if param.fused is None else named(param.fused)
            if fused is not None and fused.name in names:
                return replace(param, sources=(fused,))
            return replace(param, sources=tuple(named(source) for source in param.sources))

        return self.with_params(renamed)

    def with_fused_tensors(self) -> ModelSpec:
        """The model of a checkpoint that holds all parameters that may be one fused tensor as such."""
        return self.with_params(lambda param: replace(param, sources=(param.fused,)) if param.fused else param)

    def with_params(self, changed: Callable[[ParamSpec], ParamSpec]) -> ModelSpec:
        """The model with its parameters described otherwise."""
        groups = (replace(group, params=tuple(map(changed, group.params))) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def param_of(self, layer: LayerSpec, name: str) -> ParamSpec:
        """The parameter that the ops of a layer know by this name."""
        group, own = next((group, own) for local, group, own in layer.params if local == name)
        return next(param for param in self.groups[group].params if param.name == own)

    def with_layers(self, kept: Iterable[int]) -> ModelSpec:
        """Keep the layers at these places, and the groups that they use."""
        layers = [self.layers[i] for i in kept]
        used = {group for layer in layers for group in layer.groups}
        number = {group: i for i, group in enumerate(sorted(used))}
        renumbered = (
            replace(layer, params=tuple((local, number[group], name) for local, group, name in layer.params))
            for layer in layers
        )
        groups = tuple(self.groups[group] for group in sorted(used))
        return replace(self, layers=tuple(renumbered), groups=groups)

    @property
    def whole_sequences(self) -> bool:
        """Whether chunks must hold sequences whole."""
        return any(op.whole_sequences for layer in self.layers for op in layer.ops)

    @property
    def buffers(self) -> dict[str, WeightSource]:
        """Tensors that layers read beside parameters, by their names in the checkpoint."""
        return {source.name: source for layer in self.layers for _, source in layer.buffers}

    @property
    def blocks(self) -> tuple[LayerSpec, ...]:
        """The transformer blocks in forward order."""
        return tuple(layer for layer in self.layers if layer.kind == "block")

    def model_flops(self, seq_lens: tuple[int, ...] | list[int]) -> float:
        """Count FLOPs of forward and backward, without recomputation, for sequences of the given lengths.

        A model of which all is trained takes three times the FLOPs of its forward. In forward a matrix parameter counts
        2 per token (an embedding is a lookup and counts nothing; as head it counts). Attention counts
        4 * heads * head_dim for every visible pair of query and key, half of all pairs if nothing else hides keys.
        Source: Chowdhery et al. 2022, "PaLM", appendix B, with causal attention counted at half. A frozen matrix has no
        gradient of its own and counts twice; layers below everything that is trained count once.
        """
        # Blocks share their ops and batches repeat lengths, so each distinct pair is counted once and multiplied.
        layers = Counter(layer.ops for layer in self.layers).items()
        lengths = Counter(seq_lens).items()
        return sum(
            count * times * op.model_flops(length) for ops, times in layers for op in ops for length, count in lengths
        )
