"""One call of attention as every library's kernels take it: its operands, its results, and both directions.

Shapes: q, out [T, N, H]; k, v [K, G, H], K = T for packed sequences; lse [N, T] float32; all rows may be strided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from flexengine.ops.attention.style import CAUSAL, AttentionStyle


class Lengths(NamedTuple):
    """The packed sequences of a causal call: tokens of each, and their running sum [sequences + 1] int32 on the GPU."""

    seq_lens: tuple[int, ...]
    cu_seqlens: Tensor


class Rows(NamedTuple):
    """Queries, and keys and values of all tokens that they see; values may be narrower than keys."""

    q: Tensor
    k: Tensor
    v: Tensor


class Results(NamedTuple):
    """Where forward writes out [T, N, V] and lse [N, T]."""

    out: Tensor
    lse: Tensor


class Kernels(ABC):
    """Forward and backward of one library. `lengths` None: all queries see all keys.

    rng: int64 [2] on the device, which the operators want and do not read without dropout.
    """

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, style: AttentionStyle = CAUSAL
    ) -> tuple[Tensor, Tensor]:
        """(out, lse)."""

    @abstractmethod
    def backward(
        self, grad_out: Tensor, rows: Rows, results: Results, lengths: Lengths | None, rng: Tensor,
        style: AttentionStyle = CAUSAL,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(grad_q, grad_k, grad_v) from the results of all keys that the queries see, here and in other calls."""
