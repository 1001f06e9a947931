"""What is asked of the planner, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple


class PlanReason(StrEnum):
    """Why no plan exists."""

    INSUFFICIENT_DEVICE_MEMORY = "INSUFFICIENT_DEVICE_MEMORY"
    INSUFFICIENT_HOST_MEMORY = "INSUFFICIENT_HOST_MEMORY"
    INSUFFICIENT_DRIVE = "INSUFFICIENT_DRIVE"
    INVALID_REQUEST = "INVALID_REQUEST"


class PlanError(ValueError):
    """No plan fits what was asked. `required_bytes` and `budget_bytes` describe the memory that falls short."""

    def __init__(self, reason: PlanReason, message: str, required_bytes: int = 0, budget_bytes: int = 0) -> None:
        super().__init__(f"PlanError({reason.value}): {message}")
        self.reason, self.required_bytes, self.budget_bytes = reason, required_bytes, budget_bytes


KeepDtype = Literal["compute", "fp8", "fp8-inputs", "fp8-all"]
DeltaDtype = Literal["float32", "bfloat16"]
MatmulDtype = Literal[
    "compute",
    "fp8",
    "fp8-rowwise-gw-hp",
    "fp8-blockwise",
    "fp8-blockwise-gw-hp",
    "fp8-blockwise-gw-squares",
    "mxfp8",
    "nvfp4-gw-hp",
]


@dataclass(frozen=True)
class Numerics:
    """Types that decide results; a plan is made for them and never changes them.

    compute: dtype of weights and activations in compute; master: `split` (bf16 + 16-bit remainder = exact fp32), `full`
    (the weight itself is the master), `stochastic` (bf16 with stochastic rounding) or `beside` (float16 and its fp32,
    with gradients computed times a loss scale); grad and state: storage dtypes; matmul: what the linear layers of
    blocks multiply, `compute` or FP8 with a scheme of scales; optimizer: the name of what updates, which decides the
    rules of all parameters; base: what frozen linear layers of blocks are stored in, `compute` or a format of fewer
    bytes; keep: what backward reads gate and up of gated FFNs in (`fp8`), what lies between layers (`fp8-inputs`), or
    both (`fp8-all`), else `compute`; delta: what gated delta rules store between their kernels.
    """

    compute: str = "bfloat16"
    master: Literal["split", "full", "stochastic", "beside"] = "split"
    grad: str = "bfloat16"
    state: str = "float32"
    matmul: MatmulDtype = "compute"
    optimizer: str = "adamw"
    base: Literal["compute", "fp8", "nf4", "int8", "mxfp4"] = "compute"
    keep: KeepDtype = "compute"
    delta: DeltaDtype = "float32"

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are computed times a loss scale, so that no update counts before all are known finite."""
        return self.compute == "float16"

    @property
    def cpu_update(self) -> str:
        """Name what decides the rate of an update by the CPU: the dtype of the states, and whether masters are rounded.

        `HardwareProfile.cpu_adamw_parameters_per_s` has rates by these names.
        """
        return f"{self.state} stochastic" if self.master == "stochastic" else self.state


TransportName = Literal["relay", "split", "stages", "context"]


class TransportRules(NamedTuple):
    """What plans of a transport may do. together: ranks walk the layers together, so that each finds all of some
    gradients in a round. owns_blocks: each runs blocks of its own, for as many rounds as there are ranks. cuts_rounds:
    each runs some chunks of every round, and gradients of blocks end on the first."""

    together: bool
    owns_blocks: bool
    cuts_rounds: bool = False


TRANSPORTS: dict[TransportName, TransportRules] = {
    "relay": TransportRules(together=False, owns_blocks=False),
    "split": TransportRules(together=True, owns_blocks=False),
    "stages": TransportRules(together=True, owns_blocks=True),
    "context": TransportRules(together=True, owns_blocks=False, cuts_rounds=True),
}
SHARES_DRIVE = ("relay", "split")
"""Transports whose ranks may keep planes on the drive of their node."""


@dataclass(frozen=True)
class Request:
    """What was asked of the planner: the work and the budgets, in bytes for the whole process.

    clipping: gradients are clipped by their global norm, so that no update begins before the last gradient is known.
    ranks: GPUs of one node that run the rounds of a step in turn, on one host copy of weights, gradients and states;
    max_gpu_bytes is each one's, max_host_bytes the node's. round_multiple: batches are packed into a multiple of so
    many rounds; None = ranks of all nodes. It sets the order of sums, as chunk and round sizes do, and the number of
    ranks does not. nodes: that each have so many ranks, a host copy of their own, and an equal part of a step's tokens.
    exchange: what nodes send each other of gradients, None as they are stored; fewer bytes change the sums.
    transport: how ranks of a node share weights and gradients (see `Plan`), or as the planner finds fastest. graphs:
    whether blocks' commands are replayed as CUDA graphs; auto is where the planner finds that faster, and its plan's
    request then says always. reproducible: where sizes are not given, they follow from model and batch alone
    (`planner/reproducible.py`). whole_sequences: no chunk cuts a sequence, as the model's layers take them whole.
    whole_steps: every step is one `train_step`, so that gradients of one round need not be stored. gpu_updates: without
    clipping the GPU, too, may update inside the last round ("in_round"), also from gradients that are not stored, so
    that every step is one round ("unstored"), which with clipping runs twice (`norm_first`); auto is where the planner
    finds one of them faster, or finds nothing else, and its plan's request then says which. segment_blocks: of so many
    blocks, one after the other, only the first one's input is kept, and backward makes the others' again
    (`schedule/segments.py`); 1 keeps every block's, None is as the planner finds what fits, and its plan's request then
    says which. segments: only so many of the first blocks' segments are such; None = all. segment_order: whether
    backward of a segment walks its blocks one by one, all chunks each, or its chunks one by one, all blocks each.
    hidden_home: where a round's tensor between layers and its gradient wait; auto is on the GPU, or on the
    host where nothing else fits or that is faster, and its plan's request then says host. max_drive_bytes: what
    planes may take on a drive where the host has no room; 0 is no drive.
    """

    max_seq_len: int
    max_global_batch_tokens: int
    max_gpu_bytes: int
    max_host_bytes: int
    chunk_tokens: int | None = None
    round_tokens: int | None = None
    recompute: Literal["auto", "none", "full"] = "auto"
    numerics: Numerics = field(default_factory=Numerics)
    clipping: bool = True
    ranks: int = 1
    round_multiple: int | None = None
    nodes: int = 1
    transport: Literal["auto", "relay", "split", "stages", "context"] = "auto"
    exchange: Literal["bfloat16", "fp8"] | None = None
    graphs: Literal["auto", "never", "always"] = "auto"
    reproducible: bool = False
    whole_sequences: bool = False
    whole_steps: bool = False
    gpu_updates: Literal["auto", "in_round", "unstored"] = "auto"
    segment_blocks: int | None = None
    segments: int | None = None
    segment_order: Literal["layers", "chunks"] = "layers"
    hidden_home: Literal["auto", "host"] = "auto"
    max_drive_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_global_batch_tokens", "max_gpu_bytes", "max_host_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_seq_len > self.max_global_batch_tokens:
            raise ValueError(
                f"max_seq_len={self.max_seq_len} tokens is longer than max_global_batch_tokens="
                f"{self.max_global_batch_tokens}; no such sequence would fit in a step"
            )
        for name in ("chunk_tokens", "round_tokens", "round_multiple", "segment_blocks", "segments"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("ranks", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, choices in (("recompute", ("auto", "none", "full")), ("graphs", ("auto", "never", "always"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}; choose {', '.join(choices[:-1])} or {choices[-1]}")
        if self.max_drive_bytes < 0:
            raise ValueError(f"max_drive_bytes must not be negative, got {self.max_drive_bytes}")
        conflicts = (
            (
                self.updates_in_round and not self.may_update_in_round,
                "the GPU updates inside a round on one rank, and clipped gradients only where they are not stored",
            ),
            (
                (self.segment_blocks or 1) > 1 and not self.may_make_inputs_again,
                "inputs are made again on one rank, and where recomputation is allowed",
            ),
            (
                self.segments_by_chunk and (self.segment_blocks or 1) == 1,
                "backward walks chunks one by one in segments: segment_blocks is not above 1",
            ),
            (self.hidden_on_host and self.shares_node, "hidden states wait on the host on one rank"),
            (self.max_drive_bytes > 0 and not self.may_use_drive, "ranks of a node that relay or split share a drive"),
            (
                self.hidden_on_host and self.segments_by_chunk,
                "hidden states that wait on the host are of long sequences, which no chunk takes whole",
            ),
            (
                self.gpu_updates == "unstored" and not self.whole_steps,
                "gradients are stored where a step may be several calls: whole_steps is false",
            ),
        )
        for holds, why in conflicts:
            if holds:
                raise ValueError(why)

    @property
    def updates_in_round(self) -> bool:
        """Whether the GPU updates inside the last round."""
        return self.gpu_updates != "auto"

    @property
    def norm_first(self) -> bool:
        """Whether a step's one round runs twice: for the norm of gradients that are clipped and not stored, and then to
        update from them."""
        return self.clipping and self.gpu_updates == "unstored"

    @property
    def waits_for_norm(self) -> bool:
        """Whether no update that counts begins before the last backward has ended."""
        return self.clipping and not self.norm_first

    @property
    def may_update_in_round(self) -> bool:
        """Whether updates may begin inside the last round, before all gradients are known, or from a known norm."""
        return not self.waits_for_norm and not self.shares_node

    @property
    def segments_by_chunk(self) -> bool:
        """Whether backward of a segment takes its chunks one by one."""
        return self.segment_order == "chunks"

    @property
    def may_make_inputs_again(self) -> bool:
        """Whether backward may make inputs of blocks again."""
        return not self.shares_node and self.recompute != "none" and self.segment_blocks != 1

    @property
    def hidden_on_host(self) -> bool:
        """Whether the tensor between layers and its gradient wait on the host."""
        return self.hidden_home == "host"

    def slices(self, chunk_tokens: int) -> int:
        """Chunks of so many tokens that the longest sequence takes."""
        return -(-self.max_seq_len // chunk_tokens)

    def replays(self, chunk_tokens: int) -> bool:
        """Whether blocks' commands on chunks of so many tokens are replayed: slices of a sequence are not."""
        return self.graphs == "always" and self.max_seq_len <= chunk_tokens

    @property
    def exchanged(self) -> str:
        """What nodes send each other of gradients: a dtype, or `fp8`, codes whose errors are kept for the next step."""
        return self.exchange or self.numerics.grad

    @property
    def of_rank(self) -> Request:
        """What one of all ranks is asked: with its tokens of a step, and its share of the node's host memory."""
        tokens = max(self.max_seq_len, -(-self.max_global_batch_tokens // (self.ranks * self.nodes)))
        return replace(self, max_global_batch_tokens=tokens, max_host_bytes=max(1, self.max_host_bytes // self.ranks))

    @property
    def on_one_gpu(self) -> Request:
        """The same steps on one GPU of a node, with all of its host memory."""
        return replace(self, ranks=1, nodes=1, transport="auto")

    @property
    def may_use_drive(self) -> bool:
        """Whether planes may lie on a drive of the node."""
        return self.nodes == 1 and (self.ranks == 1 or self.transport in ("auto", *SHARES_DRIVE))

    @property
    def shares_node(self) -> bool:
        """True when several ranks train, so that weights, gradients and optimizer states lie in memory of the node."""
        return self.ranks * self.nodes > 1

    def check_pinned_sizes(self) -> None:
        """Raise PlanError when chunk_tokens and round_tokens do not go together, or no sequence fits a round."""
        chunk, tokens = self.chunk_tokens, self.round_tokens
        if tokens is None:
            return
        if chunk is not None and tokens % chunk:
            raise PlanError(
                PlanReason.INVALID_REQUEST,
                f"round_tokens={tokens} is not a multiple of chunk_tokens={chunk}\n"
                f"  works with: --round-tokens {-(-tokens // chunk) * chunk}, or --chunk-tokens {tokens}",
            )
        if tokens < self.max_seq_len:
            raise PlanError(
                PlanReason.INVALID_REQUEST,
                f"round_tokens={tokens} is less than max_seq_len={self.max_seq_len}, and a sequence passes the layers"
                f" in one round\n  works with: --round-tokens {self.max_seq_len}, or --max-seq-len {tokens}",
            )
