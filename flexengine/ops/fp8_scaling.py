"""How operands of FP8 products are scaled: what is rounded where, with which scales, and what multiplies it.

A matrix is divided by its scales, each the largest magnitude of what shares it over FP8's largest number, and rounded
to nearest even; products sum in float32 and are multiplied by the scales of both operands. Here are one scale for a
matrix and one for every row; `ops/fp8_blocks.py` has scales for blocks.
Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.

Shapes: x [T, D], weight [F, D], y [T, F] of a linear layer; a product is a [M, K] @ b [N, K].T, as tensor cores sum
along the last dimension of both operands. So gradients take transposed operands, whose tokens are filled up by zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import DropoutDraws, TensorSpec, Work, use_kernel
from flexengine.ops.linear_shape import LinearShape

FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = torch.finfo(FORWARD_DTYPE).max
MULTIPLE = 16
"""Sizes along which FP8 products sum, and widths of their results, are multiples of this."""
LEAST_ABSMAX = 1e-30
"""A matrix is scaled as if it held a magnitude of at least this, so that one of zeros has a scale."""
PARTIALS = 1024
SCALE_STRIDE = 4
"""Elements of float32 from one scale to the next: cuBLAS takes addresses that are multiples of 16 bytes."""
Role = Literal["tokens", "transposed tokens", "weight", "gradient"]
CUBLASLT_BYTES = 33 * 2**20
"""What torch gives cuBLASLt to work in on Hopper, for the time of a call; less on other cards."""


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device takes FP8 operands: NVIDIA cards since Ada do; the CPU rounds to FP8 and sums in float32."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


class Operand(NamedTuple):
    """Codes [R, K] of a matrix, and its float32 scales: of a matrix [1], of rows [R], of rows and blocks of terms
    [ceil(K / 128), R], of squares [ceil(R / 128), L >= ceil(K / 128)], or bytes in tiles as `ops/scale_tiles.py` has
    them. factor [1]: that these scales are multiplied by."""

    codes: Tensor
    scales: Tensor
    kind: Literal["matrix", "rows", "terms", "squares", "tiles"]
    factor: Tensor | None = None

    @property
    def square(self) -> bool:
        """Whether 128 rows share scales."""
        return self.kind == "squares"

    def rows(self, start: int, stop: int) -> Operand:
        """Some rows, but not of squares, and of tiles from the first row of one."""
        assert not self.square, "a square belongs to 128 rows"
        assert self.kind != "tiles" or start % 128 == 0, "a tile belongs to 128 rows"
        scales = {"matrix": self.scales, "rows": self.scales[start:stop], "terms": self.scales[..., start:stop]}
        scales["tiles"] = self.scales[start // 128 : -(-stop // 128)]
        return self._replace(codes=self.codes[start:stop], scales=scales[self.kind])


class Buffers(NamedTuple):
    """The buffers of a layer, by what they are called beside its name. draws, number: of what rounds at random, and of
    the layer in the model."""

    tensors: dict[str, Tensor]
    name: str
    draws: DropoutDraws | None = None
    number: int = 0

    def __getitem__(self, suffix: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - by name alone
        return self.tensors[f"{self.name}_{suffix}"]

    def codes(self, suffix: str, dtype: torch.dtype) -> Tensor:
        """A buffer of bytes as FP8."""
        return self[suffix].view(dtype)

    def transposed(self, suffix: str, dtype: torch.dtype) -> Tensor:
        """A buffer that is declared by tokens, with its features first."""
        codes = self.codes(suffix, dtype)
        return codes.view(codes.shape[1], codes.shape[0])


class Scaling(ABC):
    """A scheme of scales for the three products of a linear layer.

    name: the value of --matmul-dtype. gradient_in_fp8: whether the weight's gradient takes FP8 operands; without, it
    takes the compute dtype. of_experts: whether experts' products take FP8 operands, too. feature_multiple: of a
    layer's sizes; row_multiple: where rows of an operand may be cut. draws: whether gradients are rounded at random.
    """

    name: str
    gradient_in_fp8: bool = True
    of_experts: bool = True
    feature_multiple: int = MULTIPLE
    row_multiple: int = MULTIPLE
    draws: bool = False

    def refusal(self, device: torch.device) -> str | None:
        """Say why a device multiplies no such operands; None where it does."""
        return None if multiplies_fp8(device) else "it multiplies no FP8 operands"

    @abstractmethod
    def forward_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        """What forward rounds to."""

    @abstractmethod
    def input_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        """What the input half rounds to for itself."""

    @abstractmethod
    def shared_scratch(self, shape: LinearShape, both: bool) -> tuple[TensorSpec, ...]:
        """What the input half leaves to the weight half; both: there is one in FP8."""

    @abstractmethod
    def weight_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        """What the weight half rounds to for itself."""

    @abstractmethod
    def forward_operands(self, t: Buffers, x: Tensor | None, weight: Tensor) -> tuple[Operand, Operand]:
        """x [T, D] and weight [F, D]. None, here and below: its codes are in the buffers already."""

    @abstractmethod
    def input_operands(self, t: Buffers, grad_y: Tensor | None, weight: Tensor, both: bool) -> tuple[Operand, Operand]:
        """grad_y [T, F] and weight.T [D, F]; both: also leave grad_y.T."""

    @abstractmethod
    def weight_operands(self, t: Buffers, x: Tensor) -> tuple[Operand, Operand]:
        """grad_y.T [F, T], which the input half left, and x.T [D, T]."""

    @abstractmethod
    def multiply(self, a: Operand, b: Operand, out: Tensor, bias: Tensor | None = None, fast: bool = False) -> None:
        """out = a @ b.T (+ bias). fast: sums may keep the fewer bits that tensor cores keep by themselves."""

    def add_product(self, a: Operand, b: Operand, acc: Tensor) -> bool:
        """acc += a @ b.T where one call does both; returns whether it did."""
        return False

    @abstractmethod
    def with_ones(self, codes: Tensor, role: Role) -> Operand:
        """Codes with scales of 1, as the probe multiplies them."""

    @abstractmethod
    def workspace_bytes(self, tokens: int, widest: int) -> int:
        """Bytes that a product takes on CUDA; widest: of the layer's features."""

    def plain_workspace_bytes(self, tokens: int, in_features: int, out_features: int) -> int:
        """Bytes that a product takes on the CPU beside what it takes on CUDA."""
        return 0

    @abstractmethod
    def rounding_work(self, elements: int, compute_bytes: int, results: int = 1, transposed: bool = False) -> Work:
        """Work of rounding a matrix to as many results. transposed: to its transpose alone."""

    def weight_work(self, elements: int, compute_bytes: int, transposed: bool) -> Work:
        """Work of making the operand of a weight, or of it transposed."""
        return self.rounding_work(elements, compute_bytes, transposed=transposed)


def quantize(
    x: Tensor, scales: Tensor, index: int, rows: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """rows = x / scale and columns = the same transposed, in their FP8 dtype; returns the scale, which is
    scales[SCALE_STRIDE * index].

    Shapes: x [R, C]; rows [R, C]; columns [C, S] with S >= R, zero beyond R; scales as `scale_buffer` declares.
    """
    target = rows if rows is not None else columns
    assert target is not None, "a matrix is quantised as it is, transposed, or both"
    largest, scale, partials = torch.finfo(target.dtype).max, scale_of(scales, index), scales[-PARTIALS:]
    if use_kernel(x):
        from flexengine.kernels import fp8  # noqa: PLC0415 (Triton is imported when first used)

        fp8.absmax_partials(x, partials)
        fp8.quantize(x, partials, largest, LEAST_ABSMAX, scale, rows, columns)
        return scale
    wide = x.float()
    absmax = wide.abs().nan_to_num(0.0, torch.inf).max().clamp(min=LEAST_ABSMAX)
    torch.div(absmax, largest, out=scale[0])
    scaled = (wide * (largest / absmax)).clamp(-largest, largest).to(target.dtype)
    if rows is not None:
        rows.copy_(scaled)
    if columns is not None:
        columns.view(torch.uint8)[:, x.shape[0] :] = 0
        columns[:, : x.shape[0]].copy_(scaled.t())
    return scale


def round_rows(x: Tensor, codes: Tensor, scales: Tensor, bounds: Tensor | None = None) -> None:
    """codes [R, K] = x [R, K] / scales [R], in FP8; with bounds [E + 1] the rows of these experts alone."""
    if use_kernel(x):
        from flexengine.kernels import fp8_rows  # noqa: PLC0415 (Triton is imported when first used)

        return fp8_rows.round_rows(x, codes, scales, LARGEST, LEAST_ABSMAX, bounds)
    wide = x.float()
    absmax = wide.abs().nan_to_num(0.0, torch.inf).amax(-1).clamp_(min=LEAST_ABSMAX)
    torch.div(absmax, LARGEST, out=scales)
    factors = torch.full_like(absmax, LARGEST).div_(absmax)  # a number over a tensor is not rounded correctly
    codes.copy_((wide * factors[:, None]).clamp_(-LARGEST, LARGEST))


def round_columns(weight: Tensor, codes: Tensor, scales: Tensor) -> None:
    """codes [E, N, K] = weight [E, K, N].mT / scales [E, N], in FP8."""
    if use_kernel(weight):
        from flexengine.kernels import fp8_rows  # noqa: PLC0415 (Triton is imported when first used)

        return fp8_rows.round_columns(weight, codes, scales, LARGEST, LEAST_ABSMAX)
    for matrix, own, factors in zip(weight, codes, scales, strict=True):
        round_rows(matrix.t(), own, factors)


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, bias: Tensor | None = None, fast: bool = False
) -> None:
    """out = scale_a * scale_b * a @ b.T (+ bias), rounded once.

    Shapes: a [M, K] and b [N, K] in FP8, K and N multiples of 16; scales [1], or of rows [M, 1] and [1, N], float32;
    out [M, N]. Sums are float32; fast: with the fewer bits that tensor cores keep by themselves, as is usual in
    forward.
    """
    assert a.shape[1] % MULTIPLE == b.shape[0] % MULTIPLE == 0, "tensor cores take multiples of 16"
    if a.is_cuda:
        torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] - torch.nn.functional.scaled_mm has no out
            a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out.dtype, use_fast_accum=fast, out=out
        )
        return
    product = (a.float() @ b.float().t()) * (scale_a * scale_b)
    out.copy_(product if bias is None else product + bias)


def scale_buffer(name: str) -> TensorSpec:
    """A buffer with two scales, and behind them the values that maxima are taken from."""
    return TensorSpec(f"{name}_scales", (), "float32", rows=2 * SCALE_STRIDE + PARTIALS)


def scale_of(scales: Tensor, index: int) -> Tensor:
    """One of the scales [1] of a scale buffer."""
    return scales[SCALE_STRIDE * index : SCALE_STRIDE * index + 1]


def of_tokens(shape: LinearShape, suffix: str, features: int, multiple: int = 1) -> TensorSpec:
    """Codes with as many features for every token."""
    return TensorSpec(f"{shape.name}_{suffix}", (features,), "uint8", multiple=multiple)


def of_weight(shape: LinearShape, suffix: str, num_rows: int, features: int) -> TensorSpec:
    """Codes of a weight, or of its transpose."""
    return TensorSpec(f"{shape.name}_{suffix}", (features,), "uint8", rows=num_rows)


class TensorScaling(Scaling):
    """One scale for a matrix: weights and activations are e4m3 (3 bits of mantissa), gradients e5m2 (5 of exponent)."""

    name = "fp8"

    def forward_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        d, f = shape.in_features, shape.out_features
        return of_tokens(shape, "x8", d), of_weight(shape, "weight8", f, d), scale_buffer(shape.name)

    def input_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        d, f = shape.in_features, shape.out_features
        return of_tokens(shape, "grad8", f), of_weight(shape, "weight8_t", d, f)

    def shared_scratch(self, shape: LinearShape, both: bool) -> tuple[TensorSpec, ...]:
        transposed = (of_tokens(shape, "grad8_t", shape.out_features, MULTIPLE),) if both else ()
        return *transposed, scale_buffer(f"{shape.name}_grad")

    def weight_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        return (of_tokens(shape, "x8_t", shape.in_features, MULTIPLE),)

    def forward_operands(self, t: Buffers, x: Tensor | None, weight: Tensor) -> tuple[Operand, Operand]:
        assert x is not None, "only codes with scales for blocks are written elsewhere"
        x8, weight8, scales = t.codes("x8", FORWARD_DTYPE), t.codes("weight8", FORWARD_DTYPE), t["scales"]
        of_x = Operand(x8, quantize(x, scales, 0, rows=x8), "matrix")
        return of_x, Operand(weight8, quantize(weight, scales, 1, rows=weight8), "matrix")

    def input_operands(self, t: Buffers, grad_y: Tensor | None, weight: Tensor, both: bool) -> tuple[Operand, Operand]:
        assert grad_y is not None, "only codes with scales for blocks are written elsewhere"
        grad8, weight8_t = t.codes("grad8", GRADIENT_DTYPE), t.codes("weight8_t", FORWARD_DTYPE)
        grad8_t = t.transposed("grad8_t", GRADIENT_DTYPE) if both else None
        of_weight_t = Operand(weight8_t, quantize(weight, t["grad_scales"], 1, columns=weight8_t), "matrix")
        return Operand(grad8, quantize(grad_y, t["grad_scales"], 0, grad8, grad8_t), "matrix"), of_weight_t

    def weight_operands(self, t: Buffers, x: Tensor) -> tuple[Operand, Operand]:
        grad8_t, x8_t = t.transposed("grad8_t", GRADIENT_DTYPE), t.transposed("x8_t", FORWARD_DTYPE)
        of_x = Operand(x8_t, quantize(x, t["grad_scales"], 1, columns=x8_t), "matrix")
        return Operand(grad8_t, scale_of(t["grad_scales"], 0), "matrix"), of_x

    def multiply(self, a: Operand, b: Operand, out: Tensor, bias: Tensor | None = None, fast: bool = False) -> None:
        scaled_product(a.codes, b.codes, a.scales, b.scales, out, bias, fast)

    def with_ones(self, codes: Tensor, role: Role) -> Operand:
        codes = codes.view(GRADIENT_DTYPE) if role == "gradient" else codes
        return Operand(codes, torch.ones(1, device=codes.device), "matrix")

    def workspace_bytes(self, tokens: int, widest: int) -> int:
        return CUBLASLT_BYTES

    def rounding_work(self, elements: int, compute_bytes: int, results: int = 1, transposed: bool = False) -> Work:
        """Two reads, one of them for the maximum, and a write per result."""
        return Work(memory_bytes=float(elements * (2 * compute_bytes + results)), kernels=2)


class RowScaling(Scaling):
    """One scale for every row of an operand, all e4m3; the weight's gradient, which sums along rows, takes the compute
    dtype.

    Source: PyTorch 2025, torchao.float8, recipe rowwise_with_gw_hp,
    https://github.com/pytorch/ao/tree/main/torchao/float8.
    """

    name = "fp8-rowwise-gw-hp"
    gradient_in_fp8 = False

    def forward_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        return self._scratch(shape, ("x8", "weight8"), shape.in_features, shape.out_features)

    def input_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        return self._scratch(shape, ("grad8", "weight8_t"), shape.out_features, shape.in_features)

    def _scratch(self, shape: LinearShape, suffixes: tuple[str, str], terms: int, rows: int) -> tuple[TensorSpec, ...]:
        tokens, weight = suffixes
        return (
            of_tokens(shape, tokens, terms),
            TensorSpec(f"{shape.name}_{tokens}_scales", (), "float32"),
            of_weight(shape, weight, rows, terms),
            TensorSpec(f"{shape.name}_{weight}_scales", (), "float32", rows=rows),
        )

    def shared_scratch(self, shape: LinearShape, both: bool) -> tuple[TensorSpec, ...]:
        return ()

    def weight_scratch(self, shape: LinearShape) -> tuple[TensorSpec, ...]:
        return ()

    def forward_operands(self, t: Buffers, x: Tensor | None, weight: Tensor) -> tuple[Operand, Operand]:
        return self._rounded(t, "x8", x), self._rounded(t, "weight8", weight)

    def input_operands(self, t: Buffers, grad_y: Tensor | None, weight: Tensor, both: bool) -> tuple[Operand, Operand]:
        codes, scales = t.codes("weight8_t", FORWARD_DTYPE), t["weight8_t_scales"]
        round_columns(weight[None], codes[None], scales[None])
        return self._rounded(t, "grad8", grad_y), Operand(codes, scales, "rows")

    def _rounded(self, t: Buffers, suffix: str, x: Tensor | None) -> Operand:
        assert x is not None, "only codes with scales for blocks are written elsewhere"
        codes, scales = t.codes(suffix, FORWARD_DTYPE), t[f"{suffix}_scales"]
        round_rows(x, codes, scales)
        return Operand(codes, scales, "rows")

    def weight_operands(self, t: Buffers, x: Tensor) -> tuple[Operand, Operand]:
        raise AssertionError("the weight's gradient takes the compute dtype")

    def multiply(self, a: Operand, b: Operand, out: Tensor, bias: Tensor | None = None, fast: bool = False) -> None:
        scaled_product(a.codes, b.codes, a.scales[:, None], b.scales[None, :], out, bias, fast)

    def with_ones(self, codes: Tensor, role: Role) -> Operand:
        return Operand(codes, torch.ones(len(codes), device=codes.device), "rows")

    def workspace_bytes(self, tokens: int, widest: int) -> int:
        return CUBLASLT_BYTES

    def rounding_work(self, elements: int, compute_bytes: int, results: int = 1, transposed: bool = False) -> Work:
        """A read, as what is read again comes from the card's cache, or two for scales of columns, and a write."""
        reads = 2 if transposed else 1
        return Work(memory_bytes=float(elements * (reads * compute_bytes + results)), kernels=1)
