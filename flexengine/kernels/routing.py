"""Chooses experts for tokens, finds their rows sorted by expert, and computes the gradient of the router's logits.

T tokens, E experts, K of them for each token, R = T * K rows. Rows are placed by a stable counting sort: blocks of
entries count their experts, each expert's counts are added up over the blocks, and an entry's row is where its expert
begins, plus the entries of that expert before it. Nothing depends on the order in which programs run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.rounding import round_to

_TILE = 8192
"""Numbers of a program's tile of entries by experts, or of tokens by experts."""
_MOST_ENTRIES = 256
_BLOCKS, _COLUMNS = 128, 16
"""A program adds up counts of so many experts, so many blocks at a time."""


def block_entries(num_experts: int) -> int:
    """Entries that one program places."""
    return max(16, min(_MOST_ENTRIES, _TILE // next_power_of_2(num_experts)))


def num_blocks(entries: int, num_experts: int) -> int:
    """Blocks that so many entries are placed in: rows of `counts`, less the one for the sums."""
    return cdiv(entries, block_entries(num_experts))


def choose(
    scores: Tensor, probabilities: Tensor, expert: Tensor, chosen: Tensor, scale: float, normalised: bool,
    least_sum: float,
) -> None:  # fmt: skip
    """expert[t] = the K experts of the largest scores[t], the lowest first where some are equal; chosen[t] = scale *
    their probabilities, over (their sum + least_sum) where normalised. NaN counts as the largest score.

    Shapes: scores and probabilities [T, E] fp32, expert [T, K] int32, chosen [T, K] fp32.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    (tokens, experts), count = scores.shape, expert.shape[1]
    check_tensor("scores", scores, (tokens, experts), (torch.float32,))
    check_tensor("probabilities", probabilities, (tokens, experts), (torch.float32,))
    check_tensor("expert", expert, (tokens, count), (torch.int32,))
    check_tensor("chosen", chosen, (tokens, count), (torch.float32,))
    if count > experts:
        raise ValueError(f"expert has {count} columns, but there are {experts} experts to choose from")
    if expert.numel() == 0:
        return
    width = next_power_of_2(experts)
    rows = max(1, _TILE // 8 // width)
    _choose_kernel[(cdiv(tokens, rows),)](
        scores, probabilities, expert, chosen, tokens, experts, scale, least_sum, NORMALISED=normalised, COUNT=count,
        COUNTS=next_power_of_2(count), ROWS=rows, EXPERTS=width, num_warps=4,
    )  # fmt: skip


def place_rows(
    expert: Tensor, weight: Tensor, counts: Tensor, place: Tensor, bounds: Tensor, row_weight: Tensor
) -> None:
    """place[t, k] = the row of expert[t, k] among all, sorted by expert and then by t and k; rows bounds[e] to
    bounds[e + 1] are those of expert e; row_weight[place[t, k]] = weight[t, k].

    Shapes: expert and place [T, K] int32, weight [T, K] fp32, counts [1 + num_blocks(T * K, E), E] int32, which is
    overwritten, bounds [E + 1] int32, row_weight [T * K] fp32.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    (tokens, count), experts = expert.shape, len(bounds) - 1
    entries, blocks = tokens * count, num_blocks(tokens * count, experts)
    check_tensor("expert", expert, (tokens, count), (torch.int32,))
    check_tensor("weight", weight, (tokens, count), (torch.float32,))
    check_tensor("counts", counts, (1 + blocks, experts), (torch.int32,))
    check_tensor("place", place, (tokens, count), (torch.int32,))
    check_tensor("bounds", bounds, (experts + 1,), (torch.int32,))
    check_tensor("row_weight", row_weight, (entries,), (torch.float32,))
    tile = {"ENTRIES": block_entries(experts), "EXPERTS": next_power_of_2(experts), "num_warps": 8}
    if not blocks:
        bounds.zero_()
        return
    _count_kernel[(blocks,)](expert, counts, entries, experts, **tile)
    _add_up_kernel[(cdiv(experts, _COLUMNS),)](counts, blocks, experts, BLOCKS=_BLOCKS, COLUMNS=_COLUMNS, num_warps=4)
    _place_kernel[(blocks,)](expert, weight, counts, place, bounds, row_weight, entries, experts, **tile)


def logits_gradient(
    probabilities: Tensor, expert: Tensor, place: Tensor, grad_weight: Tensor, added: Tensor | None,
    grad_logits: Tensor, scale: float, softmax: bool, normalised: bool, least_sum: float,
) -> None:  # fmt: skip
    """Gradient of the logits that `probabilities` are the softmax (else the sigmoid) of, from the gradient of the
    weights that `choose` computed; `added` comes on top of the gradient of every token's probabilities.

    Shapes: probabilities [T, E] fp32, expert and place [T, K] int32, grad_weight [T * K] fp32, added [E] fp32,
    grad_logits [T, E] in bf16 or fp32. Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    (tokens, experts), count = probabilities.shape, expert.shape[1]
    check_tensor("probabilities", probabilities, (tokens, experts), (torch.float32,))
    check_tensor("expert", expert, (tokens, count), (torch.int32,))
    check_tensor("place", place, (tokens, count), (torch.int32,))
    check_tensor("grad_weight", grad_weight, (tokens * count,), (torch.float32,))
    check_tensor("grad_logits", grad_logits, (tokens, experts), FLOATS)
    if added is not None:
        check_tensor("added", added, (experts,), (torch.float32,))
    if expert.numel() == 0:
        return
    width = next_power_of_2(experts)
    rows = max(1, _TILE // 8 // width)
    _logits_gradient_kernel[(cdiv(tokens, rows),)](
        probabilities, expert, place, grad_weight, probabilities if added is None else added, grad_logits, tokens,
        experts, scale, least_sum, ADDED=added is not None, SOFTMAX=softmax, NORMALISED=normalised, COUNT=count,
        ROWS=rows, EXPERTS=width, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    scores_ptr, probabilities_ptr, expert_ptr, chosen_ptr, tokens, experts, scale, least_sum,
    NORMALISED: tl.constexpr, COUNT: tl.constexpr, COUNTS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index, slots = tl.arange(0, EXPERTS), tl.arange(0, COUNTS)
    here = rows < tokens
    mask = here[:, None] & (index < experts)[None, :]
    scores = tl.load(scores_ptr + rows[:, None] * experts + index[None, :], mask=mask, other=float("-inf"))
    scores = tl.where(scores == scores, scores, float("inf"))  # noqa: PLR0124 (NaN)
    weights = tl.zeros((ROWS, COUNTS), tl.float32)
    for k in tl.static_range(COUNT):
        best = tl.max(scores, axis=1)
        # of equal scores the lowest expert; where nothing but -inf is left, one that exists
        at = tl.min(tl.where(scores == best[:, None], index[None, :], EXPERTS), axis=1)
        scores = tl.where(index[None, :] == at[:, None], float("-inf"), scores)
        probability = tl.load(probabilities_ptr + rows * experts + at, mask=here, other=0.0)
        weights = tl.where(slots[None, :] == k, probability[:, None], weights)
        tl.store(expert_ptr + rows * COUNT + k, at, mask=here)
    if NORMALISED:
        total = tl.sum(weights, axis=1) + least_sum
        weights = tl.div_rn(weights, total[:, None] + tl.zeros_like(weights))
    stored = here[:, None] & (slots < COUNT)[None, :]
    tl.store(chosen_ptr + rows[:, None] * COUNT + slots[None, :], weights * scale, mask=stored)


@triton.jit
def _load_entries(expert_ptr, entries, ENTRIES: tl.constexpr, EXPERTS: tl.constexpr):
    """(places of a block's entries, whether each is of each expert [ENTRIES, EXPERTS])."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    expert = tl.load(expert_ptr + at, mask=at < entries, other=EXPERTS)
    return at, (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["entries"])
def _count_kernel(expert_ptr, counts_ptr, entries, experts, ENTRIES: tl.constexpr, EXPERTS: tl.constexpr):
    _, own = _load_entries(expert_ptr, entries, ENTRIES, EXPERTS)
    index = tl.arange(0, EXPERTS)
    row = counts_ptr + (tl.program_id(0) + 1).to(tl.int64) * experts
    tl.store(row + index, tl.sum(own, axis=0), mask=index < experts)


@triton.jit(do_not_specialize=["blocks"])
def _add_up_kernel(counts_ptr, blocks, experts, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Counts of a block become those of the blocks before it; the sums over all go to the first row."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        at = counts_ptr + (1 + block).to(tl.int64)[:, None] * experts + columns[None, :]
        mask = (block < blocks)[:, None] & (columns < experts)[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=mask)
        before += tl.sum(counts, axis=0)
    tl.store(counts_ptr + columns, before, mask=columns < experts)


@triton.jit(do_not_specialize=["entries"])
def _place_kernel(
    expert_ptr, weight_ptr, counts_ptr, place_ptr, bounds_ptr, row_weight_ptr, entries, experts,
    ENTRIES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    at, own = _load_entries(expert_ptr, entries, ENTRIES, EXPERTS)
    index = tl.arange(0, EXPERTS)
    sums = tl.load(counts_ptr + index, mask=index < experts, other=0)
    ends = tl.cumsum(sums, axis=0)
    if tl.program_id(0) == 0:
        tl.store(bounds_ptr, 0)
        tl.store(bounds_ptr + 1 + index, ends, mask=index < experts)
    row = counts_ptr + (tl.program_id(0) + 1).to(tl.int64) * experts
    before = tl.load(row + index, mask=index < experts, other=0)
    places = (ends - sums + before)[None, :] + tl.cumsum(own, axis=0) - 1
    place = tl.sum(places * own, axis=1)
    mask = at < entries
    tl.store(place_ptr + at, place, mask=mask)
    tl.store(row_weight_ptr + place, tl.load(weight_ptr + at, mask=mask, other=0.0), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _logits_gradient_kernel(
    probabilities_ptr, expert_ptr, place_ptr, grad_ptr, added_ptr, out_ptr, tokens, experts, scale, least_sum,
    ADDED: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISED: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = tl.arange(0, EXPERTS)
    here = rows < tokens
    mask = here[:, None] & (index < experts)[None, :]
    at = rows[:, None] * experts + index[None, :]
    p = tl.load(probabilities_ptr + at, mask=mask, other=0.0)
    total, product = tl.zeros((ROWS,), tl.float32) + least_sum, tl.zeros((ROWS,), tl.float32)
    if NORMALISED:
        for k in tl.static_range(COUNT):
            expert = tl.load(expert_ptr + rows * COUNT + k, mask=here, other=0)
            grad = tl.load(grad_ptr + tl.load(place_ptr + rows * COUNT + k, mask=here, other=0), mask=here, other=0.0)
            chosen = tl.load(probabilities_ptr + rows * experts + expert, mask=here, other=1.0)
            total += chosen
            product += grad * scale * chosen
        product = tl.div_rn(product, total)
    grads = tl.zeros((ROWS, EXPERTS), tl.float32)
    for k in tl.static_range(COUNT):
        expert = tl.load(expert_ptr + rows * COUNT + k, mask=here, other=0)
        grad = tl.load(grad_ptr + tl.load(place_ptr + rows * COUNT + k, mask=here, other=0), mask=here, other=0.0)
        grad *= scale
        if NORMALISED:
            grad = tl.div_rn(grad - product, total)
        grads = tl.where(index[None, :] == expert[:, None], grad[:, None], grads)
    if ADDED:
        grads += tl.load(added_ptr + index, mask=index < experts, other=0.0)[None, :]
    if SOFTMAX:
        grads -= tl.sum(grads * p, axis=1)[:, None]
    else:
        grads *= 1.0 - p
    grads *= p
    tl.store(out_ptr + at, round_to(grads, out_ptr.dtype.element_ty), mask=mask)
