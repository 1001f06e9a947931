"""A model as data: parameter groups that stream as one piece, and layers of ops over named tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from flexengine.ops.balance import Balancing
from flexengine.ops.base import Op


@dataclass(frozen=True)
class WeightSource:
    """One tensor of the Hugging Face file; a parameter is its sources stacked along dimension 0.

    decode: the decoder of checkpoint/quantised.py that finds it in the checkpoint's tensors; None: it is one of them.
    """

    name: str
    shape: tuple[int, ...]
    decode: str | None = None


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the ops see it. kind `vector` (norms, biases) is never decayed and keeps float32 states."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[WeightSource, ...]
    kind: Literal["matrix", "vector"] = "matrix"
    init: Literal["normal", "ones", "zeros"] = "normal"
    fused: WeightSource | None = None
    """One tensor that some checkpoints hold in place of the sources, its elements in the same order."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GroupSpec:
    """Parameters that cross the link together. Groups of one `slot_class` share weight and gradient slots.

    frozen: they are not trained, so that they have weights alone: no gradient, no optimizer states, no update.
    divisions: the parameters named `cut` may be cut into so many equal parts of their first dimension. num_parts: if
    they are, as many, which cross the link one by one, after all others of the group (backward: before them); else 1.
    """

    name: str
    slot_class: str
    params: tuple[ParamSpec, ...]
    frozen: bool = False
    divisions: int = 1
    cut: tuple[str, ...] = ()
    num_parts: int = 1

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(p.numel for p in self.params)


class Table(NamedTuple):
    """Rotary frequencies, in radians per position, which ops find as the constant `name`.

    scaling multiplies cos and sin. Where `long_values` are given, they take the place of `values` in runs whose
    max_seq_len is above `long_from`.
    """

    name: str
    values: tuple[float, ...]
    scaling: float = 1.0
    long_values: tuple[float, ...] = ()
    long_from: int = 0

    def values_for(self, max_seq_len: int) -> tuple[float, ...]:
        """The frequencies of a run."""
        return self.long_values if self.long_values and max_seq_len > self.long_from else self.values


@dataclass(frozen=True)
class LayerSpec:
    """A unit of weight streaming: a straight line of ops from `input` to `output` over named tensors.

    `params` maps the names the ops use to (group index, parameter name), `buffers` to tensors of the checkpoint that
    nothing trains: a few numbers, which stay on the device and are exported as they are. Blocks
    of one class share the same `ops` tuple, so that whatever is derived from the ops is derived once.
    """

    name: str
    kind: Literal["embedding", "block", "head"]
    ops: tuple[Op, ...]
    params: tuple[tuple[str, int, str], ...]
    input: str | None
    output: str | None
    buffers: tuple[tuple[str, WeightSource], ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of the parameter groups that this layer reads, in order of first use."""
        return tuple(dict.fromkeys(group for _, group, _ in self.params))

    @property
    def has_backward(self) -> bool:
        """Whether anything is trained in this layer or below it."""
        return any(op.has_input_half or op.has_weight_half for op in self.ops)

    @property
    def keeps(self) -> bool:
        """Whether its input and outputs of its ops may be kept from forward to backward."""
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
    """What no sequence may exceed: there are no more learned positions. None: no such limit."""
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    head_source: str = "lm_head.weight"
    """Name of the head's tensor, which a checkpoint may also hold where it is tied."""
    tables: tuple[Table, ...] = ()
    notice: str = ""
    """What a person should know of how the checkpoint is taken; empty: nothing."""
    optional_prefix: str = ""
    """With what all names of sources begin that some checkpoints leave out."""
    balancing: Balancing | None = None
    """The loss that balances experts, where the config asks for it."""
    groups: tuple[GroupSpec, ...] = ()
    layers: tuple[LayerSpec, ...] = ()

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied tensor counted once."""
        return sum(g.numel for g in self.groups)

    @property
    def num_trained_parameters(self) -> int:
        """Those that are not frozen."""
        return sum(g.numel for g in self.groups if not g.frozen)

    @property
    def embedding_source(self) -> str:
        """Name of the embedding's tensor, which a tied head shares."""
        return self.groups[0].params[0].sources[0].name

    def named_as(self, names: Iterable[str]) -> ModelSpec:
        """The model with its sources named as in a checkpoint of these tensors, which may lack the optional prefix and
        may hold the sources of a parameter fused."""
        names, prefix = set(names), self.optional_prefix
        if any(name.startswith(prefix) for name in names):
            prefix = ""

        def named(source: WeightSource) -> WeightSource:
            return replace(source, name=source.name.removeprefix(prefix))

        def renamed(param: ParamSpec) -> ParamSpec:
            fused = None if param.fused is None else named(param.fused)
            if fused is not None and fused.name in names:
                return replace(param, sources=(fused,))
            return replace(param, sources=tuple(named(source) for source in param.sources)) if prefix else param

        groups = (replace(g, params=tuple(renamed(p) for p in g.params)) for g in self.groups)
        return replace(self, groups=tuple(groups))

    @property
    def buffers(self) -> dict[str, WeightSource]:
        """What layers read beside parameters, by the checkpoint's names."""
        return {source.name: source for layer in self.layers for _, source in layer.buffers}

    @property
    def blocks(self) -> tuple[LayerSpec, ...]:
        """The transformer blocks in forward order."""
        return tuple(layer for layer in self.layers if layer.kind == "block")

    def model_flops(self, seq_lens: tuple[int, ...] | list[int]) -> float:
        """FLOPs of forward and backward without recompute for sequences of the given lengths.

        Three times those of forward where all is trained, in which a matrix parameter counts 2 per token (an embedding
        is a gather and counts nothing, as head it counts), and attention 4 * heads * head_dim for every query and key
        that it sees, half of all pairs where nothing else hides keys. Source: Chowdhery et al. 2022, "PaLM", appendix
        B, with causal attention counted at half. A frozen matrix has no gradient of its own, and counts twice; what
        lies below all that is trained counts once.
        """
        layers = Counter(layer.ops for layer in self.layers).items()
        lengths = Counter(seq_lens).items()
        return sum(
            count * times * _passes(op) * op.forward_work(length, length, 2).flops
            for ops, times in layers
            for op in ops
            for length, count in lengths
        )


def _passes(op: Op) -> float:
    """How often a step does what an op's forward takes: each half of backward takes as much, and the input half twice
    as much where products are of activations alone."""
    inputs = (1.0 if op.params else 2.0) if op.has_input_half else 0.0
    return 1.0 + inputs + (1.0 if op.has_weight_half else 0.0)
