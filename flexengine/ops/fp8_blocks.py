"""FP8 products with scales for blocks: activations and gradients per row and 128 terms, weights per 128 x 128.

Source: DeepSeek-AI 2024, "DeepSeek-V3", https://arxiv.org/abs/2412.19437, section 3.3: all operands are e4m3, and sums
over 128 terms are added in float32. An outlier then takes bits from its own block alone.

Shapes: a product is a [M, K] @ b [N, K].T. Codes lie as these do; scales [ceil(K / 128), M] of rows lie term block by
term block, those of squares [ceil(N / 128), L] with L = ceil(K / 128) filled up to a multiple of 4: so cuBLAS reads
them.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flexengine.ops.base import TensorSpec, Work, use_kernel
from flexengine.ops.fp8_scaling import (
    CUBLASLT_BYTES,
    FORWARD_DTYPE,
    LARGEST,
    LEAST_ABSMAX,
    MULTIPLE,
    Buffers,
    Operand,
    Role,
    Scaling,
)
from flexengine.ops.linear_shape import LinearShape
from flexengine.ops.products import use_product_kernel
from flexengine.ops.scaled_mm import ScaledMatrix, has_scale_kinds, scaled_product

TERMS = 128
"""Terms of a sum that share a scale, and so rows and columns of a weight."""


def num_blocks(features: int) -> int:
    """Blocks of 128 that hold so many features."""
    return -(-features // TERMS)


def square_scales(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a matrix in squares."""
    return num_blocks(rows), -(-num_blocks(columns) // 4) * 4


def round_vectors(x: Tensor, rows: Operand | None, columns: Operand | None, bounds: Tensor | None = None) -> None:
    """rows = x in FP8 with a scale for every row and 128 columns; columns = the same of x transposed, whose rows have
    zeros up to their ends. bounds [E + 1]: the rows of these experts are wanted alone."""
    if use_kernel(x):
        from flexengine.kernels import fp8_blocks  # noqa: PLC0415 (Triton is imported when first used)

        of_rows, of_columns = (None if side is None else side[:2] for side in (rows, columns))
        return fp8_blocks.round_vectors(x, LARGEST, LEAST_ABSMAX, of_rows, of_columns, bounds)
    for matrix, side in ((x, rows), (x.t(), columns)):
        if side is not None:
            inner = matrix.shape[1]
            side.codes[:, inner:].view(torch.uint8).zero_()
            for block, start in enumerate(range(0, inner, TERMS)):
                terms = slice(start, min(start + TERMS, inner))
                part = matrix[:, terms].float()
                side.codes[:, terms], side.scales[block] = _rounded(part, part.abs().nan_to_num(0.0, torch.inf).amax(1))


def round_squares(x: Tensor, side: Operand, transposed: bool) -> None:
    """side = x (transposed: x.mT, whose rows have zeros up to their ends) in FP8 with a scale for every 128 x 128
    elements; also of stacks of matrices."""
    if use_kernel(x):
        from flexengine.kernels import fp8_blocks  # noqa: PLC0415 (Triton is imported when first used)

        return fp8_blocks.round_squares(x, LARGEST, LEAST_ABSMAX, side.codes, side.scales, transposed)
    if x.dim() == 3:
        for matrix, codes, scales in zip(x, side.codes, side.scales, strict=True):
            round_squares(matrix, Operand(codes, scales, side.kind), transposed)
        return None
    matrix = x.t() if transposed else x
    codes, rest = side.codes.split((matrix.shape[1], side.codes.shape[1] - matrix.shape[1]), dim=1)
    rest.view(torch.uint8).zero_()
    for row in range(0, len(matrix), TERMS):
        for column in range(0, matrix.shape[1], TERMS):
            place = slice(row, row + TERMS), slice(column, column + TERMS)
            part = matrix[place].float()
            absmax = part.abs().nan_to_num(0.0, torch.inf).max()
            codes[place], side.scales[row // TERMS, column // TERMS] = _rounded(part, absmax)


def _rounded(part: Tensor, absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of some rows, or of all of a matrix, with these largest magnitudes, and their scales."""
    absmax = absmax.clamp(min=LEAST_ABSMAX)
    factor = torch.full_like(absmax, LARGEST).div_(absmax)  # a number over a tensor is not rounded correctly
    scaled = (part * factor.view(-1, 1)).clamp_(-LARGEST, LARGEST)
    return scaled.to(FORWARD_DTYPE), absmax / LARGEST


def block_product(a: Operand, b: Operand, out: Tensor, bias: Tensor | None = None, accumulate: bool = False) -> None:
    """out = (or +=) a @ b.T of what codes and scales stand for (+ bias), summed in float32.

    Shapes: a of rows with M of them, b of rows or squares with N; out [M, N]. On Hopper cuBLAS takes the rows before
    the last multiple of 16, where sizes are multiples of 128; our kernel multiplies what is left.
    """
    if not use_product_kernel(out):
        return _plain_product(a, b, out, bias, accumulate)
    whole = 0 if accumulate or not _takes_cublas(a, b) else len(out) // MULTIPLE * MULTIPLE
    if whole:
        cublas_product(a.rows(0, whole), b, out[:whole], bias)
    if whole < len(out):
        from flexengine.kernels import fp8_block_product  # noqa: PLC0415 (Triton is imported when first used)

        rest = a.rows(whole, len(out))
        fp8_block_product.block_product(
            rest.codes, b.codes, rest.scales, b.scales, b.square, out[whole:], bias, accumulate
        )


def _plain_product(a: Operand, b: Operand, out: Tensor, bias: Tensor | None, accumulate: bool) -> None:
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for block, start in enumerate(range(0, a.codes.shape[1], TERMS)):
        terms = slice(start, start + TERMS)
        scale_b = b.scales[:, block].repeat_interleave(TERMS)[: len(b.codes)] if b.square else b.scales[block]
        part = a.codes[:, terms].float() @ b.codes[:, terms].float().t()
        total += part.mul_(a.scales[block, :, None]).mul_(scale_b)
    if bias is not None:
        total += bias
    out.add_(total) if accumulate else out.copy_(total)


def _takes_cublas(a: Operand, b: Operand) -> bool:
    if not a.codes.is_cuda or not _has_block_scales(a.codes.get_device()):
        return False
    return a.codes.shape[1] % TERMS == 0 and len(b.codes) % (TERMS if b.square else MULTIPLE) == 0


@cache
def _has_block_scales(device: int) -> bool:
    """Whether cuBLAS takes scales for blocks on a card: on Hopper alone."""
    return has_scale_kinds() and torch.cuda.get_device_capability(device)[0] == 9


def cublas_product(a: Operand, b: Operand, out: Tensor, bias: Tensor | None) -> None:
    """out = a @ b.T (+ bias), by cuBLAS."""
    of_b = "BlockWise128x128" if b.square else "BlockWise1x128"
    rows = ScaledMatrix(a.codes, [a.scales.contiguous().t()], ["BlockWise1x128"])
    scaled_product(rows, ScaledMatrix(b.codes, [b.scales.contiguous().t()], [of_b]), out, bias)


class BlockScaling(Scaling):
    """Scales for 128 terms of a row, and for 128 x 128 elements of a weight.

    The weight's gradient sums along tokens, of which 128 share a scale. gradient_in_fp8: or it takes the compute dtype.
    squares: there x has scales for 128 x 128 elements, as a weight has: on an H200 cuBLAS multiplies by these at 0.89
    of the rate with one scale, and two operands of rows at 0.72.
    """

    def __init__(self, name: str, gradient_in_fp8: bool, squares: bool = False) -> None:
        self.name, self.gradient_in_fp8, self.squares = name, gradient_in_fp8, squares

    def forward_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        return *_token_specs(shape, "x8", shape.in_features), *self.weight_scratch_of(shape, transposed=False)

    def input_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        return *_token_specs(shape, "grad8", shape.out_features), *self.weight_scratch_of(shape, transposed=True)

    def shared_scratch(self, shape: LinearShape, both: bool) -> tuple[TensorSpec, ...]:
        return _transposed_specs(shape, "grad8_t", shape.out_features) if both else ()

    def weight_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        return _transposed_specs(shape, "x8_t", shape.in_features)

    def forward_operands(self, t: Buffers, x: Tensor | None, weight: Tensor) -> tuple[Operand, Operand]:
        x8 = self.rows_side(t, "x8")
        if x is not None:
            round_vectors(x, x8, None)
        return x8, self.weight_side(t, weight, transposed=False)

    def input_operands(self, t: Buffers, grad_y: Tensor | None, weight: Tensor, both: bool) -> tuple[Operand, Operand]:
        grad8 = self.rows_side(t, "grad8")
        if grad_y is not None:
            round_vectors(grad_y, grad8, self.transposed_side(t, "grad8_t") if both else None)
        return grad8, self.weight_side(t, weight, transposed=True)

    def weight_operands(self, t: Buffers, x: Tensor) -> tuple[Operand, Operand]:
        x8_t = self.transposed_side(t, "x8_t")
        round_squares(x, x8_t, transposed=True) if x8_t.square else round_vectors(x, None, x8_t)
        return self.transposed_side(t, "grad8_t"), x8_t

    def weight_scratch_of(self, shape: LinearShape, transposed: bool) -> tuple[TensorSpec, ...]:
        """Codes and scales of a weight, or of it transposed."""
        name, rows, columns = f"{shape.name}_weight8", shape.out_features, shape.in_features
        if transposed:
            name, rows, columns = f"{name}_t", columns, rows
        squares, stride = square_scales(rows, columns)
        return (
            TensorSpec(name, (columns,), "uint8", rows=rows),
            TensorSpec(f"{name}_scales", (stride,), "float32", rows=squares),
        )

    def weight_side(self, t: Buffers, weight: Tensor, transposed: bool) -> Operand:
        """A weight, or it transposed, as an operand."""
        side = self.empty_weight_side(t, transposed)
        round_squares(weight, side, transposed)
        return side

    def empty_weight_side(self, t: Buffers, transposed: bool) -> Operand:
        """The buffers of that operand."""
        suffix = "weight8_t" if transposed else "weight8"
        return Operand(t.codes(suffix, FORWARD_DTYPE), t[f"{suffix}_scales"], "squares")

    def rows_side(self, t: Buffers, suffix: str) -> Operand:
        """Codes of x or of the gradient of y."""
        codes = t.codes(suffix, FORWARD_DTYPE)
        return Operand(codes, t[f"{suffix}_scales"].view(-1, len(codes)), "terms")

    def transposed_side(self, t: Buffers, suffix: str) -> Operand:
        """Codes of these transposed."""
        squares, codes = self.squares and suffix == "x8_t", t.transposed(suffix, FORWARD_DTYPE)
        features, tokens = codes.shape
        shape = square_scales(features, tokens) if squares else (tokens // TERMS, features)
        scales = t[f"{suffix}_scales"].view(-1)[: shape[0] * shape[1]].view(shape)
        return Operand(codes, scales, "squares" if squares else "terms")

    def multiply(self, a: Operand, b: Operand, out: Tensor, bias: Tensor | None = None, fast: bool = False) -> None:
        block_product(a, b, out, bias)

    def add_product(self, a: Operand, b: Operand, acc: Tensor) -> bool:
        if _takes_cublas(a, b):
            return False
        block_product(a, b, acc, accumulate=True)
        return True

    def with_ones(self, codes: Tensor, role: Role) -> Operand:
        rows, terms = len(codes), num_blocks(codes.shape[1])
        square = role == "weight" or (self.squares and role == "transposed tokens")
        shape = square_scales(rows, codes.shape[1]) if square else (terms, rows)
        return Operand(codes, torch.ones(shape, device=codes.device), "squares" if square else "terms")

    def workspace_bytes(self, tokens: int, widest: int) -> int:
        """cuBLAS, and scales of the rows that it takes in one piece."""
        return CUBLASLT_BYTES + 4 * (tokens + TERMS) * -(-widest // TERMS)

    def plain_workspace_bytes(self, tokens: int, in_features: int, out_features: int) -> int:
        """Both operands of a block of terms, and the sums twice: of all tokens by a side, or of both sides."""
        rows, columns = sorted((tokens, in_features, out_features))[1:]
        return 4 * (2 * rows * columns + TERMS * (rows + columns)) + 8 * TERMS * columns

    def rounding_work(self, elements: int, compute_bytes: int, results: int = 1, transposed: bool = False) -> Work:
        """A read, and a write of codes and scales for each result."""
        return Work(memory_bytes=elements * (compute_bytes + results * (1.0 + 4.0 / TERMS)), kernels=1)


def _token_specs(shape: LinearShape, suffix: str, features: int) -> tuple[TensorSpec, ...]:
    """Codes and scales of a matrix with a row for every token."""
    name = f"{shape.name}_{suffix}"
    return (
        TensorSpec(name, (features,), "uint8"),
        TensorSpec(f"{name}_scales", (num_blocks(features),), "float32"),
    )


def _transposed_specs(shape: LinearShape, suffix: str, features: int) -> tuple[TensorSpec, ...]:
    """Codes and scales of such a matrix transposed, declared by tokens: 128 of them have a scale for each feature."""
    name = f"{shape.name}_{suffix}"
    return (
        TensorSpec(name, (features,), "uint8", multiple=TERMS),
        TensorSpec(f"{name}_scales", (num_blocks(features),), "float32", multiple=TERMS),
    )
