"""What the kernels of attention share: tiles of packed sequences, which pairs a query sees, bounded scores.

A tile of queries has ROWS rows: ROWS / PACK queries of PACK query heads that read the same keys. So keys are loaded
once for all of them, and a tile spans few queries, which wastes little where a window or the diagonal cuts through it.

Positions are counted in the keys of a sequence: a query's own is `before` + its index, where `before` keys of earlier
chunks precede a chunk that continues a sequence. Scores are kept as `values`, which times `unit` are scores in units
of log(2), so that their exponentials are those of the hardware, base 2.
"""

import math

import triton
import triton.language as tl

from flexengine.kernels.rounding import round_to

LN_2 = tl.constexpr(math.log(2.0))
HIDDEN = tl.constexpr(-(2.0**100))
"""The value of a hidden key. Finite, so that a row whose first keys are all hidden has no difference of infinities;
what it sums then is multiplied by 0 when its own key arrives. A power of two, so that its product with a unit is exact:
a fused multiply-add that subtracts the rounded one from it would else leave a number beyond all exponents."""


@triton.jit
def find_tile(cu_ptr, sequences, slot, TILE: tl.constexpr):
    """(first token, tokens of its sequence, number of the tile within it). Sequence s has the slots from
    cu[s] // TILE + s on, which are as many as its tiles or one more: that one lies behind its end."""
    low, high = sequences * 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        after = tl.load(cu_ptr + middle) // TILE + middle > slot
        high = tl.where(after, middle, high)
        low = tl.where(after, low, middle)
    start = tl.load(cu_ptr + low)
    return start, tl.load(cu_ptr + low + 1) - start, slot - (start // TILE + low)


@triton.jit
def key_steps(first, last, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """(begin, low, high, steps) for queries from position first to last: step i takes the keys from begin + i * BLOCK
    on, and in those from low to high - 1 all keys are there and no query misses one."""
    begin, end = first * 0, keys
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0)
    if CAUSAL:
        end = tl.minimum(last + 1, keys)
    steps = tl.cdiv(end - begin, BLOCK)
    low = steps * 0
    if WINDOW:
        low = tl.minimum(tl.cdiv(tl.maximum(last - window + 1 - begin, 0), BLOCK), steps)
    whole = keys - begin
    if CAUSAL:
        whole = first + 1 - begin
    return begin, low, tl.minimum(tl.maximum(whole // BLOCK, low), steps), steps


@triton.jit
def query_steps(
    first, tokens, before, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """(begin, low, high, steps) for the BLOCK keys from `first` on: step i takes the queries from begin + i * QUERIES
    on, as in `key_steps`."""
    begin, end = first * 0, tokens
    if CAUSAL:
        begin = tl.maximum(first - before, 0)
    if WINDOW:
        end = tl.minimum(first + BLOCK - 1 + window - before, tokens)
    steps = tl.cdiv(tl.maximum(end - begin, 0), QUERIES)
    low, whole = steps * 0, end - begin
    if CAUSAL:
        low = tl.minimum(tl.cdiv(tl.maximum(first + BLOCK - 1 - before - begin, 0), QUERIES), steps)
    if WINDOW:
        whole = tl.minimum(whole, first + window - before - begin)
    return begin, low, tl.maximum(tl.maximum(whole, 0) // QUERIES, low), steps


@triton.jit
def step_of(index, low, high, MASKED: tl.constexpr):
    """The step of an iteration: of a loop over those that hide something, or over the others."""
    if MASKED:
        return tl.where(index < low, index, index + (high - low))
    return low + index


@triton.jit
def visible(positions, keys, num_keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether queries at `positions` see `keys`; both broadcast."""
    seen = keys < num_keys
    if WINDOW:
        seen = (positions - keys).to(tl.uint32) < window.to(tl.uint32)  # one comparison: a later key is far above it
    elif CAUSAL:
        seen = keys <= positions
    return seen


@triton.jit
def load_columns(
    ptr, offsets, here, START: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """Columns START to START + BLOCK of the rows at `offsets`, 0 past a row's WIDTH and, where MASKED, in rows that are
    not here."""
    columns = START + tl.arange(0, BLOCK)
    pointers = ptr + (offsets[:, None] + columns[None, :])
    if START + BLOCK > WIDTH:
        return tl.load(pointers, mask=here[:, None] & (columns < WIDTH)[None, :], other=0.0)
    if MASKED:
        return tl.load(pointers, mask=here[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def store_columns(
    ptr, offsets, here, x, START: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    """Columns START to START + BLOCK of the rows at `offsets` that are here; ADD: added to what is there."""
    columns = START + tl.arange(0, BLOCK)
    pointers = ptr + (offsets[:, None] + columns[None, :])
    mask = here[:, None] & (columns < WIDTH)[None, :]
    if ADD:
        x += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, round_to(x, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_stats(ptr, offsets, here, other: tl.constexpr, MASKED: tl.constexpr):
    """One float32 per row, `other` in rows that are not here."""
    if MASKED:
        return tl.load(ptr + offsets, mask=here, other=other)
    return tl.load(ptr + offsets)


@triton.jit
def product(a, b, total, WIDE: tl.constexpr):
    """total + a b. WIDE: in fp32, for Triton's interpreter, which takes the bits of bf16 operands for whole numbers."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total)


@triton.jit
def row_products(a_first, a_second, b_first, b_second, SECOND: tl.constexpr, WIDE: tl.constexpr):
    """Products of all rows of a with all rows of b, each in one or two parts of columns."""
    zeros = tl.zeros((a_first.shape[0], b_first.shape[0]), tl.float32)
    products = product(a_first, tl.trans(b_first), zeros, WIDE)
    if SECOND > 0:
        products = product(a_second, tl.trans(b_second), products, WIDE)
    return products


@triton.jit
def values_of(products, factor, CAPPED: tl.constexpr):
    """What times a unit is a score: the products themselves, or with a soft cap the tanh of half of
    log(2) * factor * products."""
    if CAPPED:
        return 1.0 - 2.0 / (1.0 + tl.exp2(products * factor))
    return products
