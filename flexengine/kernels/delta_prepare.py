"""Gated delta rule, what tiles of 64 tokens need before any state is known: sums of decays, U and W.

Source: Yang et al. 2024, "Gated Delta Networks", and the formulas of `flexengine.ops.delta.tiles`. Every program works
on one tile of one value head, so all are independent. Rows of queries and keys stay as they came, and products are
scaled by their rows' 1 / sqrt(|x|^2 + eps): what came in bf16 is multiplied exactly.

Shapes: slots M of tiles (`spans`), H value heads of the N of the model, K and V head widths, buffers in the dtype
`between`, fp32 or bf16: u [M, H, 64, V], w [M, H, 64, K], states [M, H, K, V]; and always in fp32 sums of decays and
scales of keys [M, H, 64]. Where buffers are in bf16, products are of bf16 and their sums in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import next_power_of_2
from flexengine.kernels.rounding import INTERPRETED, round_to

TILE = 64
PRECISIONS = {torch.bfloat16: "tf32", torch.float32: "tf32x3"}
"""Of products, by the type of queries, keys and values. Three products in TF32 keep 22 bits, and fp32 without tensor
cores would hold whole operands in registers."""
_WIDE = {"total", "scale", "query_scale", "parts"}
"""Buffers in fp32 whatever the others are in."""
_NORM_EPS = tl.constexpr(1e-6)
_SOLVED = 8
"""Rows of the blocks on the diagonal that are inverted by substitution; products merge them."""
_SOLVE_PRECISIONS = {torch.float32: "tf32x3", torch.bfloat16: "tf32"}
"""Of products that merge them, by what is stored of the inverse."""
BLOCK_K, BLOCK_V = 64, 64
LEAST_OF_EIGHT_WARPS = 32
"""Columns of a product of 64 rows by eight warps, at the least: with 16 Triton 3.6 computes wrong sums of fp32 on an
H200, or reads outside."""
LEAST_NARROW = 64
"""The same of products of bf16, by any number of warps: with 32 programs read outside there."""
_LAUNCH = {"num_warps": 4, "num_stages": 1}


class Tiles(NamedTuple):
    """Tiles of value heads [first, first + heads) of some consecutive sequences.

    qkv [T, 2 * G * K + N * V] in bf16 or fp32, rows may be strided; log decay and strength [T, N] fp32; cu [B + 1]
    int32, where the sequences begin and end; spans [2, M] int32, the first row of every tile and its sequence's end.
    sizes: G, N, K, V. between: dtype of what kernels leave for one another.
    """

    qkv: Tensor
    decay: Tensor
    strength: Tensor
    cu: Tensor
    spans: Tensor
    sizes: tuple[int, int, int, int]
    first: int
    heads: int
    between: torch.dtype = torch.float32

    @property
    def slots(self) -> int:
        """Tiles, and a few that are none."""
        return self.spans.shape[1]

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.sizes[1] // self.sizes[0]

    @property
    def narrow(self) -> bool:
        """Whether bf16 is stored and multiplied."""
        return self.between == torch.bfloat16

    def block_of(self, width: int, most: int | None = None, least: int = 16) -> int:
        """As the function; of bf16 never too few columns."""
        return block_of(width, most, LEAST_NARROW if self.narrow else least)

    def inputs(self) -> tuple:
        """What every kernel begins with."""
        key_heads, num_heads, *_ = self.sizes
        return self.qkv, self.spans, self.slots, self.heads, self.first, self.qkv.stride(0), key_heads, num_heads

    def constants(self) -> dict:
        """What every kernel is compiled for."""
        *_, k, v = self.sizes
        precision = "bf16" if self.narrow else PRECISIONS[self.qkv.dtype]
        return {"K": k, "V": v, "RATIO": self.ratio, "TILE": TILE, "PRECISION": precision}

    def check(self, rows: dict[str, Tensor] | None = None, **buffers: tuple[Tensor | None, Sequence[int]]) -> None:
        """Raise ValueError unless shapes, dtypes and strides fit. rows: [T, N] fp32; buffers: what follows [M, H]."""
        g, n, k, v = self.sizes
        tokens = len(self.qkv)
        check_tensor("qkv", self.qkv, (tokens, 2 * g * k + n * v), FLOATS, strided_rows=True)
        for name, tensor in {"decay": self.decay, "strength": self.strength, **(rows or {})}.items():
            check_tensor(name, tensor, (tokens, n), (torch.float32,))
        check_tensor("cu", self.cu, self.cu.shape, (torch.int32,))
        check_tensor("spans", self.spans, (2, self.slots), (torch.int32,))
        if self.first % self.ratio or self.heads % self.ratio or self.first + self.heads > n:
            raise ValueError(f"heads {self.first} to {self.first + self.heads} of {n} are not those of whole key heads")
        for name, (tensor, shape) in buffers.items():
            if tensor is not None:
                dtype = torch.float32 if name in _WIDE else self.between
                check_tensor(name, tensor, (self.slots, self.heads, *shape), (dtype,))

    def check_keys(self, **buffers: Tensor) -> None:
        """The same for buffers [M, key heads, 64, K]."""
        shape = (self.slots, self.heads // self.ratio, TILE, self.sizes[2])
        for name, tensor in buffers.items():
            check_tensor(name, tensor, shape, (self.between,))


def block_of(width: int, most: int | None = None, least: int = 16) -> int:
    """Columns of a block: a power of two that tensor cores take, as wide as a head or `most`."""
    block = max(least, next_power_of_2(width))
    return block if most is None else min(block, most)


def delta_prepare(
    tiles: Tiles, total: Tensor, scale: Tensor, query_scale: Tensor, u: Tensor, w: Tensor, inverse: Tensor | None
) -> None:
    """Sums of decays up to each token `total`, what keys and queries are multiplied by `scale` and `query_scale`, u and
    w, and (I + A)^-1 if wanted.

    The inverse is made in fp32, by substitution within small blocks and block by block from there: no intermediate
    value is larger than those of its blocks. Order: one launch on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    *_, k, v = tiles.sizes
    tiles.check(total=(total, (TILE,)), scale=(scale, (TILE,)), query_scale=(query_scale, (TILE,)))
    tiles.check(u=(u, (TILE, v)), w=(w, (TILE, k)), inverse=(inverse, (TILE, TILE)))
    _prepare_kernel[(tiles.slots, tiles.heads)](
        *tiles.inputs(), tiles.decay, tiles.strength, total, scale, query_scale, u, w,
        w if inverse is None else inverse, k**-0.5, **tiles.constants(), KEEP_INVERSE=inverse is not None,
        SOLVED=_SOLVED, LEVELS=(TILE // _SOLVED).bit_length() - 1, SOLVE_PRECISION=_SOLVE_PRECISIONS[tiles.between],
        BLOCK_K=tiles.block_of(k, BLOCK_K), BLOCK_V=tiles.block_of(v, BLOCK_V), **_LAUNCH,
    )  # fmt: skip


# -- parts of several kernels ------------------------------------------------------------------------------------------


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b summed in fp32; PRECISION bf16: both are rounded to it first. Triton's interpreter cannot multiply bf16."""
    if PRECISION == "bf16":
        a, b = _rounded(a), _rounded(b)
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif PRECISION == "bf16":
        return tl.dot(a, b)
    elif a.dtype == b.dtype:
        return tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)


@triton.jit
def _rounded(x):
    """x in bf16."""
    if x.dtype == tl.bfloat16:
        return x
    else:
        return round_to(x, tl.bfloat16)


@triton.jit
def load_block(ptr, rows, columns, stride, inside, width):
    """[rows, columns], zeros outside."""
    at = rows[:, None] * stride + columns[None, :]
    return tl.load(ptr + at, mask=inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_block(ptr, rows, columns, stride, inside, width, value):
    """Rounded to the type that ptr has."""
    at = rows[:, None] * stride + columns[None, :]
    tl.store(ptr + at, round_to(value, ptr.dtype.element_ty), mask=inside[:, None] & (columns < width)[None, :])


@triton.jit
def load_gate(ptr, rows, inside, head, num_heads):
    """[TILE] of [T, N]."""
    return tl.load(ptr + rows * num_heads + head, mask=inside, other=0.0)


@triton.jit
def scale_of(squares, factor):
    """factor / sqrt(|x|^2 + eps)."""
    return tl.div_rn(factor, tl.sqrt_rn(squares + _NORM_EPS))


@triton.jit
def squares_of(x):
    """Sums over columns."""
    x = x.to(tl.float32)
    return tl.sum(x * x, axis=1)


@triton.jit
def _unit_lower_inverse(
    a, index, SOLVED: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """(I + a)^-1 for strictly lower triangular a: block-diagonal after the loop, then pairs of blocks become one."""
    block, place = index // SOLVED, index % SOLVED
    same = block[:, None] == block[None, :]
    diagonal = tl.where(same, a, 0.0)
    inverse = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    for j in range(SOLVED - 1):
        column = tl.sum(tl.where((place == j)[None, :], diagonal, 0.0), axis=1)
        row = tl.sum(tl.where((place == j)[:, None], inverse, 0.0), axis=0)
        inverse -= tl.where(same, column[:, None] * row[None, :], 0.0)
    for _ in tl.static_range(LEVELS):
        apart = block[:, None] != block[None, :]
        block = block // 2
        below = tl.where(apart & (block[:, None] == block[None, :]), a, 0.0)
        inverse -= product(inverse, product(below, inverse, PRECISION), PRECISION)
    return inverse


@triton.jit(do_not_specialize=["slots"])
def _prepare_kernel(
    qkv_ptr, spans_ptr, slots, heads, first, stride, key_heads, num_heads, decay_ptr, strength_ptr, total_ptr,
    scale_ptr, query_scale_ptr, u_ptr, w_ptr, inverse_ptr, factor, K: tl.constexpr, V: tl.constexpr,
    RATIO: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr, KEEP_INVERSE: tl.constexpr, SOLVED: tl.constexpr,
    LEVELS: tl.constexpr, SOLVE_PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    slot, local = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(spans_ptr + slot), tl.load(spans_ptr + slots + slot)
    if begin >= end:
        return
    index, head = tl.arange(0, TILE), first + local
    rows, inside, whole = (begin + index).to(tl.int64), begin + index < end, index < TILE
    strength = load_gate(strength_ptr, rows, inside, head, num_heads)
    total = tl.cumsum(load_gate(decay_ptr, rows, inside, head, num_heads), axis=0)
    queries_ptr = qkv_ptr + (head // RATIO) * K
    keys_ptr = queries_ptr + key_heads * K
    values_ptr = qkv_ptr + 2 * key_heads * K + head * V
    squares, of_queries = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    pairs = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, BLOCK_K):
        lines = start + tl.arange(0, BLOCK_K)
        of_queries += squares_of(load_block(queries_ptr, rows, lines, stride, inside, K))
        k = load_block(keys_ptr, rows, lines, stride, inside, K)
        squares += squares_of(k)
        pairs += product(k, tl.trans(k), PRECISION)
    scale = scale_of(squares, 1.0)
    pairs *= (strength * scale)[:, None] * scale[None, :]
    apart = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    a = tl.where(index[:, None] > index[None, :], pairs * apart, 0.0)
    inverse = _unit_lower_inverse(a, index, SOLVED, LEVELS, SOLVE_PRECISION)
    own = slot.to(tl.int64) * heads + local
    tl.store(total_ptr + own * TILE + index, total)
    tl.store(scale_ptr + own * TILE + index, scale)
    tl.store(query_scale_ptr + own * TILE + index, scale_of(of_queries, factor))
    if KEEP_INVERSE:
        store_block(inverse_ptr + own * (TILE * TILE), index, index, TILE, whole, TILE, inverse)
    scaled = inverse * (strength * tl.exp(total) * scale)[None, :]
    for start in range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        k = load_block(keys_ptr, rows, columns, stride, inside, K)
        store_block(w_ptr + own * (TILE * K), index, columns, K, whole, K, product(scaled, k, PRECISION))
    scaled = inverse * strength[None, :]
    for start in range(0, V, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        v = load_block(values_ptr, rows, columns, stride, inside, V)
        store_block(u_ptr + own * (TILE * V), index, columns, V, whole, V, product(scaled, v, PRECISION))
