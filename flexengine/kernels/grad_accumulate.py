"""Store a layer's accumulated weight gradient, add what earlier rounds left, and reduce its squared norm on the way.

What several ranks have of a piece is added one after the other, each sum rounded as it would be if it were stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.rounding import round_to

_BLOCK = 4096  # elements per iteration of a program; 8 warps hold 16 per thread


def grad_accumulate(
    acc: Tensor, stored: Tensor, has_previous: bool, partial_squares: Tensor, part_elements: int | None = None
) -> None:
    """stored = round(acc + (stored if has_previous else 0)); partial_squares[p] = part p of the sum of its squares.

    Shapes: acc [n] fp32, stored [n] in bf16 or fp32, partial_squares [P] fp32, all contiguous and flat.
    The squares are those of the ROUNDED values, which are what the optimizer will see; their sum over p is the squared
    norm. Program p takes the p-th run of part_elements: by default ceil(n / P / 4096) * 4096, so that the bits depend
    on n and P only. Who stores a gradient in pieces gives that of the whole, so that the parts are the same. P sets how
    many programs run (a few per multiprocessor, such as 1024, fills any card). Unused parts are 0.
    Cost: reads 4n bytes (and the old stored), writes stored.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes or dtypes, P = 0, or part_elements that is no multiple of 4096 or too small.
    """
    check_tensor("acc", acc, (acc.numel(),), (torch.float32,))
    _launch(acc.unsqueeze(0), None, None, stored, has_previous, partial_squares, part_elements)


def fold(
    first: Tensor,
    second: Tensor | None,
    stored: Tensor,
    has_previous: bool,
    partial_squares: Tensor,
    part_elements: int | None = None,
    elsewhere: tuple[int, Tensor] | None = None,
) -> None:
    """What `grad_accumulate` does of first[0], second[0], first[1], ... one after the other, in one kernel.

    Shapes: first, second [R, n] fp32, rows contiguous and as far apart in both; the others as there. The squares are
    those of the last sum, so all bits are those of R or 2R calls. elsewhere: the number of a row of `first`, and its
    values [n], which are read there instead.
    Cost: reads 4n bytes a row (and the old stored), writes stored once.
    Order and errors: as there.
    """
    for rows in (first,) if second is None else (first, second):
        check_tensor("rows of what is folded", rows[0], (first.shape[1],), (torch.float32,))
        if rows.shape != first.shape or rows.stride() != first.stride():
            raise ValueError(
                f"what is folded has shapes {list(first.shape)} and {list(rows.shape)} with strides {first.stride()}"
                f" and {rows.stride()}; give equal ones"
            )
    if elsewhere is not None:
        number, values = elsewhere
        check_tensor("the row that lies elsewhere", values, (first.shape[1],), (torch.float32,))
        if not 0 <= number < len(first):
            raise ValueError(f"row {number} lies elsewhere, of {len(first)}")
    _launch(first, second, elsewhere, stored, has_previous, partial_squares, part_elements)


def _launch(
    first: Tensor,
    second: Tensor | None,
    elsewhere: tuple[int, Tensor] | None,
    stored: Tensor,
    has_previous: bool,
    partial_squares: Tensor,
    part_elements: int | None,
) -> None:
    """Check what both functions take alike, and launch."""
    (rounds, num_elements), num_parts = first.shape, partial_squares.numel()
    check_tensor("stored", stored, (num_elements,), FLOATS)
    check_tensor("partial_squares", partial_squares, (num_parts,), (torch.float32,))
    if num_parts == 0:
        raise ValueError("partial_squares must have at least one element, got shape [0]")
    if part_elements is None:
        part_elements = cdiv(cdiv(num_elements, _BLOCK), num_parts) * _BLOCK
    elif part_elements % _BLOCK or part_elements * num_parts < num_elements:
        raise ValueError(
            f"{num_parts} parts of {part_elements} elements do not hold {num_elements}, or are no multiple of {_BLOCK}"
        )
    number, values = (-1, first) if elsewhere is None else elsewhere
    _grad_accumulate_kernel[(num_parts,)](
        first, first if second is None else second, values, first.stride(0), stored, partial_squares, num_elements,
        part_elements, ROUNDS=rounds, ELSEWHERE=number, BOTH=second is not None, HAS_PREVIOUS=has_previous,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _grad_accumulate_kernel(
    first_ptr, second_ptr, elsewhere_ptr, row_elements, stored_ptr, partial_squares_ptr, num_elements, part_elements,
    ROUNDS: tl.constexpr, ELSEWHERE: tl.constexpr, BOTH: tl.constexpr, HAS_PREVIOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    begin = part * part_elements
    end = tl.minimum(begin + part_elements, num_elements)
    dtype: tl.constexpr = stored_ptr.dtype.element_ty
    lane_squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < num_elements
        kept = tl.zeros((BLOCK,), tl.float32)
        if HAS_PREVIOUS:
            kept = tl.load(stored_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        first_row, second_row = first_ptr + offsets, second_ptr + offsets
        for number in tl.static_range(ROUNDS):
            row = first_row
            if number == ELSEWHERE:
                row = elsewhere_ptr + offsets
            total = tl.load(row, mask=mask, other=0.0)
            if HAS_PREVIOUS or number > 0:  # -0.0 alone stays what it is
                total += kept
            kept = round_to(total, dtype).to(tl.float32)
            if BOTH:
                total = tl.load(second_row, mask=mask, other=0.0) + kept
                kept = round_to(total, dtype).to(tl.float32)
            first_row += row_elements
            second_row += row_elements
        tl.store(stored_ptr + offsets, kept.to(dtype), mask=mask)
        lane_squares += kept * kept
    tl.store(partial_squares_ptr + part, tl.sum(lane_squares, axis=0))
