"""Mamba-2's scan: states from tile to tile, and their gradients back.

Source: Dao & Gu 2024, "Transformers are SSMs", and the formulas of `flexengine.ops.delta.tiles` without correction. A
program takes some columns of the values of one head of one sequence and goes through all its tiles, the state's columns
in registers: states are written once, and what needs no order is left to the other kernels.

Shapes: slots M of tiles (`spans`), H heads of the N of the model, K columns of B and of C in each of G groups, V of a
head; states [M, H, K, V] in fp32. `decay` is the log decay, `strength` is dt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, float32, int32

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.delta_prepare import PRECISIONS, TILE, block_of, load_block, load_gate, product, store_block
from flexengine.kernels.delta_states import forward_launch

_COLUMNS = 32


class ScanTiles(NamedTuple):
    """Tiles of heads [first, first + heads) of some consecutive sequences.

    xbc [T, N * V + 2 * G * K] in bf16 or fp32, rows may be strided; log decay and strength [T, N], skip [N] fp32; cu
    [B + 1] int32, where the sequences begin and end; spans [2, M] int32, the first row of every tile and its sequence's
    end. sizes: G, N, K, V. part: heads of one group whose gradients of B and C one program adds up.
    """

    xbc: Tensor
    decay: Tensor
    strength: Tensor
    skip: Tensor
    cu: Tensor
    spans: Tensor
    sizes: tuple[int, int, int, int]
    first: int
    heads: int
    part: int

    @property
    def slots(self) -> int:
        """Tiles, and a few that are none."""
        return self.spans.shape[1]

    def inputs(self) -> tuple:
        """What every kernel begins with."""
        groups, num_heads, *_ = self.sizes
        gates = (self.decay, self.strength, self.spans)
        return self.xbc, *gates, self.slots, self.heads, self.first, self.xbc.stride(0), groups, num_heads

    def constants(self) -> dict:
        """What every kernel is compiled for."""
        groups, num_heads, k, v = self.sizes
        return {"K": k, "V": v, "RATIO": num_heads // groups, "TILE": TILE, "PRECISION": PRECISIONS[self.xbc.dtype]}

    def check(self, rows: dict[str, Tensor] | None = None, **buffers: tuple[Tensor | None, Sequence[int]]) -> None:
        """Raise ValueError unless shapes, dtypes and strides fit. rows: [T, N] fp32; buffers: what follows [M, H]."""
        g, n, k, v = self.sizes
        check_tensor("xbc", self.xbc, (len(self.xbc), n * v + 2 * g * k), FLOATS, strided_rows=True)
        for name, tensor in {"decay": self.decay, "strength": self.strength, **(rows or {})}.items():
            check_tensor(name, tensor, (len(self.xbc), n), (float32,))
        check_tensor("skip", self.skip, (n,), (float32,))
        check_tensor("cu", self.cu, self.cu.shape, (int32,))
        check_tensor("spans", self.spans, (2, self.slots), (int32,))
        if self.first % self.part or self.heads % self.part or n // g % self.part or self.first + self.heads > n:
            raise ValueError(f"heads {self.first} to {self.first + self.heads} of {n} are no parts of {self.part} each")
        for name, (tensor, shape) in buffers.items():
            if tensor is not None:
                check_tensor(name, tensor, (self.slots, self.heads, *shape), (float32,))

    def check_outputs(self, name: str, tensor: Tensor) -> None:
        """The same for [T, N * V]."""
        check_tensor(name, tensor, (len(self.xbc), self.sizes[1] * self.sizes[3]), FLOATS, strided_rows=True)

    def check_ends(self, **ends: Tensor | None) -> None:
        """The same for states [N, K, V] of the whole model at a sequence's ends."""
        for name, tensor in ends.items():
            if tensor is not None:
                check_tensor(name, tensor, self.sizes[1:], (float32,))
                if len(self.cu) != 2:
                    raise ValueError(f"{name} is the state of one sequence, got {len(self.cu) - 1}")


def scan_states(tiles: ScanTiles, states: Tensor | None, before: Tensor | None, left: Tensor | None) -> None:
    """states [M, H, K, V] before every tile, unless states is None.

    before, left [N, K, V] fp32: the state before the first token (None: zeros) and, if wanted, after the last.
    Order: one launch on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    *_, k, v = tiles.sizes
    tiles.check(states=(states, (k, v)))
    tiles.check_ends(before=before, left=left)
    columns = block_of(v, _COLUMNS)
    _states_kernel[(cdiv(v, columns), tiles.heads, len(tiles.cu) - 1)](
        *tiles.inputs(), tiles.cu, tiles.decay if states is None else states,
        tiles.decay if before is None else before, tiles.decay if left is None else left, **tiles.constants(),
        STORE=states is not None, HAS_BEFORE=before is not None, HAS_LEFT=left is not None, BLOCK_K=block_of(k),
        BLOCK_V=columns, **forward_launch(tiles.xbc.dtype, k),
    )  # fmt: skip


def scan_states_backward(
    tiles: ScanTiles, grad_o: Tensor, grad_states: Tensor, before: Tensor | None, left: Tensor | None
) -> None:
    """grad_states [M, H, K, V], gradients of the states after every tile.

    before, left [N, K, V] fp32: the gradient of the state before the first token, to write if wanted, and that of the
    state after the last (None: zeros). Order: one launch on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    *_, k, v = tiles.sizes
    tiles.check(grad_states=(grad_states, (k, v)))
    tiles.check_outputs("grad_o", grad_o)
    tiles.check_ends(before=before, left=left)
    columns = block_of(v, _COLUMNS)
    _states_backward_kernel[(cdiv(v, columns), tiles.heads, len(tiles.cu) - 1)](
        *tiles.inputs(), tiles.cu, grad_o, grad_states, tiles.decay if before is None else before,
        tiles.decay if left is None else left, grad_o.stride(0), **tiles.constants(), HAS_BEFORE=before is not None,
        HAS_LEFT=left is not None, BLOCK_K=block_of(k), BLOCK_V=columns, **forward_launch(tiles.xbc.dtype, k),
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots"])
def _states_kernel(
    xbc_ptr, decay_ptr, strength_ptr, spans_ptr, slots, heads, first, stride, groups, num_heads, cu_ptr, states_ptr,
    before_ptr, left_ptr, K: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, STORE: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_LEFT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    local, sequence = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    slot = begin // TILE - tl.load(cu_ptr) // TILE + sequence
    head, index, lines = first + local, tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    there, keys_ptr = lines < K, xbc_ptr + num_heads * V + (head // RATIO) * K
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_BEFORE:
        state += load_block(before_ptr + head.to(tl.int64) * (K * V), lines, columns, V, there, V)
    for i in range(0, (end - begin + TILE - 1) // TILE):
        if STORE:
            own = (slot + i).to(tl.int64) * heads + local
            store_block(states_ptr + own * (K * V), lines, columns, V, there, V, state)
        row = begin + i * TILE + index
        rows, inside = row.to(tl.int64), row < end
        decay = load_gate(decay_ptr, rows, inside, head, num_heads)
        last = tl.sum(decay, axis=0)
        rest = load_gate(strength_ptr, rows, inside, head, num_heads) * tl.exp(last - tl.cumsum(decay, axis=0))
        k = load_block(keys_ptr, rows, lines, stride, inside, K).to(tl.float32)
        v = load_block(xbc_ptr + head * V, rows, columns, stride, inside, V).to(tl.float32)
        state = state * tl.exp(last) + product(tl.trans(k), v * rest[:, None], PRECISION)
    if HAS_LEFT:
        store_block(left_ptr + head.to(tl.int64) * (K * V), lines, columns, V, there, V, state)


@triton.jit(do_not_specialize=["slots"])
def _states_backward_kernel(
    xbc_ptr, decay_ptr, strength_ptr, spans_ptr, slots, heads, first, stride, groups, num_heads, cu_ptr, grad_o_ptr,
    grad_states_ptr, before_ptr, left_ptr, grad_o_stride, K: tl.constexpr, V: tl.constexpr, RATIO: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, HAS_BEFORE: tl.constexpr, HAS_LEFT: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    local, sequence = tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    slot, tiles = begin // TILE - tl.load(cu_ptr) // TILE + sequence, (end - begin + TILE - 1) // TILE
    head, index, lines = first + local, tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    there, queries_ptr = lines < K, xbc_ptr + num_heads * V + (groups + head // RATIO) * K
    grad = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_LEFT:
        grad += load_block(left_ptr + head.to(tl.int64) * (K * V), lines, columns, V, there, V)
    for done in range(0, tiles):
        i = tiles - 1 - done
        own, row = (slot + i).to(tl.int64) * heads + local, begin + i * TILE + index
        rows, inside = row.to(tl.int64), row < end
        store_block(grad_states_ptr + own * (K * V), lines, columns, V, there, V, grad)
        decay = load_gate(decay_ptr, rows, inside, head, num_heads)
        grad_o = load_block(grad_o_ptr + head * V, rows, columns, grad_o_stride, inside, V).to(tl.float32)
        q = load_block(queries_ptr, rows, lines, stride, inside, K).to(tl.float32)
        seen = product(tl.trans(q), grad_o * tl.exp(tl.cumsum(decay, axis=0))[:, None], PRECISION)
        grad = grad * tl.exp(tl.sum(decay, axis=0)) + seen
    if HAS_BEFORE:
        store_block(before_ptr + head.to(tl.int64) * (K * V), lines, columns, V, there, V, grad)
