"""Keys and values of the earlier chunks of a long sequence, as attention reads them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexengine.ops.base import Work

SUM_BYTES = 4  # of a sum over blocks of keys, in float32
BLOCK_CHUNKS = 4
MOST_BLOCK_TOKENS = 1 << 14
"""Larger blocks make no kernels faster, and take more memory for the gradients of their keys."""


def block_tokens_of(chunk_tokens: int) -> int:
    """Give the earlier keys that a call of a kernel takes: of whole chunks, up to MOST_BLOCK_TOKENS where a chunk has
    fewer. A call's results are added to those of the others, which costs as much for few keys as for many."""
    return chunk_tokens * max(1, min(BLOCK_CHUNKS, MOST_BLOCK_TOKENS // chunk_tokens))


@dataclass
class KeyValueWindow:
    """Keys and values of the earlier chunks of one long sequence, for the layer in work.

    keys, values: [S, G, H] in the compute dtype, valid below `start`; grad_keys, grad_values: [S, G, H] in float32
    (float64 for float64 compute), used in backward only. `start` is the position of this chunk's first token. Kernels
    take the earlier keys `block_tokens` at a time.
    """

    keys: Tensor
    values: Tensor
    start: int
    grad_keys: Tensor | None = None
    grad_values: Tensor | None = None
    block_tokens: int = MOST_BLOCK_TOKENS

    def blocks(self) -> list[slice]:
        """Rows of the earlier keys, block by block."""
        step = self.block_tokens
        return [slice(first, min(first + step, self.start)) for first in range(0, self.start, step)]

    def seen(self, tokens: int) -> tuple[Tensor, Tensor, int]:
        """Keys and values up to the end of a chunk of `tokens` tokens, and how many of them are earlier ones."""
        end = self.start + tokens
        return self.keys[:end], self.values[:end], self.start

    def own_grads(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Gradients of the keys and values of a chunk of `tokens` tokens."""
        assert self.grad_keys is not None
        assert self.grad_values is not None
        own = slice(self.start, self.start + tokens)
        return self.grad_keys[own], self.grad_values[own]


def work_of_blocks(tokens: int, seq_len: int, columns: int, key_columns: int, compute_bytes: int) -> Work:
    """What calls for blocks of earlier keys add to the sums of a slice: `columns` of its rows for each block, and in
    backward `key_columns` of the block's.

    seq_len: of a slice its tokens and twice the earlier keys, as rounds are priced; whole sequences have none.
    """
    earlier = max(0, seq_len - tokens) // 2
    blocks = -(-earlier // block_tokens_of(tokens))
    if not blocks:
        return Work()
    added, turned = compute_bytes + 2 * SUM_BYTES, 2 * (compute_bytes + SUM_BYTES)
    moved = tokens * columns * (blocks * added + turned) + earlier * key_columns * added
    return Work(memory_bytes=float(moved), kernels=blocks * (4 if key_columns else 2) + 2)
