"""A model as data: parameter groups that stream as one piece, and layers of ops over named tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from flexengine.ops.base import Op


@dataclass(frozen=True)
class WeightSource:
    """One tensor of the Hugging Face file; a parameter is its sources stacked along dimension 0."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the ops see it. kind `vector` (norms, biases) is never decayed and keeps float32 states."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[WeightSource, ...]
    kind: Literal["matrix", "vector"] = "matrix"
    init: Literal["normal", "ones", "zeros"] = "normal"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GroupSpec:
    """Parameters that cross the link together. Groups of one `slot_class` share weight and gradient slots."""

    name: str
    slot_class: str
    params: tuple[ParamSpec, ...]

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(p.numel for p in self.params)


@dataclass(frozen=True)
class LayerSpec:
    """A unit of weight streaming: a straight line of ops from `input` to `output` over named tensors.

    `params` maps the names the ops use to (group index, parameter name). Blocks of one class share the same `ops`
    tuple, so that whatever is derived from the ops is derived once.
    """

    name: str
    kind: Literal["embedding", "block", "head"]
    ops: tuple[Op, ...]
    params: tuple[tuple[str, int, str], ...]
    input: str | None
    output: str | None

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of the parameter groups that this layer reads, in order of first use."""
        return tuple(dict.fromkeys(group for _, group, _ in self.params))


@dataclass(frozen=True)
class ModelSpec:
    """Everything the planner, the schedule and the runtime need to know about a network."""

    name: str
    family: str
    hf_config: dict = field(hash=False, compare=False)
    hidden_size: int = 0
    vocab_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    inv_freq: tuple[float, ...] = ()
    groups: tuple[GroupSpec, ...] = ()
    layers: tuple[LayerSpec, ...] = ()

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied tensor counted once."""
        return sum(g.numel for g in self.groups)

    @property
    def blocks(self) -> tuple[LayerSpec, ...]:
        """The transformer blocks in forward order."""
        return tuple(layer for layer in self.layers if layer.kind == "block")

    def model_flops(self, seq_lens: tuple[int, ...] | list[int]) -> float:
        """FLOPs of forward and backward without recompute for sequences of the given lengths.

        6 per matrix parameter and token (a tied embedding counts once, as head; an untied one is a gather and counts
        nothing) plus causal attention, 6 * layers * heads * head_dim * s^2 per sequence of s tokens.
        Source: Chowdhery et al. 2022, "PaLM", appendix B, with causal attention counted at half.
        """
        matrices = sum(p.numel for g in self.groups for p in g.params if p.kind == "matrix")
        if not self.tie_word_embeddings:
            matrices -= self.vocab_size * self.hidden_size
        attention = 6.0 * len(self.blocks) * self.num_attention_heads * self.head_dim
        return 6.0 * matrices * sum(seq_lens) + attention * sum(s * s for s in seq_lens)
