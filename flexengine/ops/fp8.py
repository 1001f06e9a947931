"""Linear layers whose products take FP8 operands: half the bytes, and up to twice the rate, of 16 bits.

Current scaling with one scale per operand: a matrix is divided by its largest magnitude over FP8's largest number and
rounded to nearest even; products sum in float32 and are multiplied by both scales. Weights and activations are e4m3 (3
bits of mantissa), gradients e5m2 (5 bits of exponent). Everything between products stays in the compute dtype.
Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.

Shapes: x [T, D], weight [F, D], y [T, F]. Tensor cores sum along the last dimension of both operands, so the gradients
take transposed operands: grad_x = grad_y [T, F] @ (weight.T [D, F]).T and
grad_weight = grad_y.T [F, T] @ (x.T [D, T]).T, with T filled up by zeros to a multiple of 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import OpEnv, TensorSpec, Work, use_kernel
from flexengine.ops.linear import Linear

FORWARD_DTYPE, GRADIENT_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Sizes along which FP8 products sum, and widths of their results, are multiples of this."""
LEAST_ABSMAX = 1e-30
"""A matrix is scaled as if it held a magnitude of at least this, so that one of zeros has a scale."""
PARTIALS = 1024
SCALE_STRIDE = 4
"""Elements of float32 from one scale to the next: cuBLAS takes addresses that are multiples of 16 bytes."""
CUBLASLT_BYTES = 33 * 2**20
"""What torch gives cuBLASLt to work in on Hopper, for the time of a call; less on other cards."""
PRODUCT_ELEMENTS = 1 << 24
"""Bytes of the part of a weight gradient that is computed at once where it is added to an accumulator."""


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device takes FP8 operands: NVIDIA cards since Ada do; the CPU rounds to FP8 and sums in float32."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


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


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, bias: Tensor | None = None, fast: bool = False
) -> None:
    """out = scale_a * scale_b * a @ b.T (+ bias), rounded once.

    Shapes: a [M, K] and b [N, K] in FP8, K and N multiples of 16; scales [1] float32; out [M, N]. Sums are float32;
    fast: with the fewer bits that tensor cores keep by themselves, as is usual in forward.
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


class Fp8Linear(Linear):
    """y = x @ weight.T + bias with FP8 operands; with `residual`, y = residual + the product rounded to y's dtype.

    The input half quantises grad_y for both halves; the weight half finds it there. adds: another op reads x after this
    one, so that the input half adds to what is there: some rows at a time.
    """

    def __init__(self, linear: Linear, adds: bool = False) -> None:
        self.adds = adds
        super().__init__(
            linear.name,
            linear.x,
            linear.y,
            linear.in_features,
            linear.out_features,
            linear.weight,
            linear.bias,
            linear.residual,
        )
        if linear.transposed:
            raise ValueError(
                f"{self.name} stores its weight input by output, which FP8 products do not take; leave "
                "--matmul-dtype out"
            )
        if self.in_features % MULTIPLE or self.out_features % MULTIPLE:
            raise ValueError(
                f"{self.name} has {self.in_features} input and {self.out_features} output features; FP8 products need"
                f" multiples of {MULTIPLE}; leave --matmul-dtype out"
            )

    def forward(self, env: OpEnv) -> None:
        x, y, scales = env.t[self.x], env.t[self.y], env.t[f"{self.name}_scales"]
        x8, weight8 = self._fp8(env, "x8", FORWARD_DTYPE), self._fp8(env, "weight8", FORWARD_DTYPE)
        scale_x = quantize(x, scales, 0, rows=x8)
        scale_weight = quantize(env.p[self.weight], scales, 1, rows=weight8)
        bias = None if self.bias is None else env.p[self.bias]
        scaled_product(x8, weight8, scale_x, scale_weight, y, bias, fast=True)
        if self.residual is not None:
            y.add_(env.t[self.residual])

    def backward_input(self, env: OpEnv) -> None:
        grad_y, scales = env.g[self.y], env.t[f"{self.name}_grad_scales"]
        assert (self.x in env.accumulate) == self.adds, f"{self.name} adds to a gradient where it was made not to"
        grad8, weight8_t = self._fp8(env, "grad8", GRADIENT_DTYPE), self._fp8(env, "weight8_t", FORWARD_DTYPE)
        grad8_t = self._transposed(env, "grad8_t", GRADIENT_DTYPE) if self.trained else None
        scale_weight = quantize(env.p[self.weight], scales, 1, columns=weight8_t)
        scale_grad = quantize(grad_y, scales, 0, rows=grad8, columns=grad8_t)
        grad_x = env.g[self.x]
        if not self.adds:
            return scaled_product(grad8, weight8_t, scale_grad, scale_weight, grad_x)
        for rows, target in zip(grad8.split(self._added_rows), grad_x.split(self._added_rows), strict=True):
            part = torch.empty_like(target)
            scaled_product(rows, weight8_t, scale_grad, scale_weight, part)
            target.add_(part)

    def backward_weight(self, env: OpEnv) -> None:
        acc, scales = env.gp[self.weight], env.t[f"{self.name}_grad_scales"]
        grad8_t, x8_t = self._transposed(env, "grad8_t", GRADIENT_DTYPE), self._transposed(env, "x8_t", FORWARD_DTYPE)
        scale_x, scale_grad = quantize(env.t[self.x_again], scales, 1, columns=x8_t), scale_of(scales, 0)
        if env.first:
            scaled_product(grad8_t, x8_t, scale_grad, scale_x, acc)
        else:
            product, step = env.t[f"{self.name}_product"], self._product_rows
            for start in range(0, self.out_features, step):
                rows = grad8_t[start : start + step]
                part = product[: len(rows)]
                scaled_product(rows, x8_t, scale_grad, scale_x, part)
                acc[start : start + step].add_(part)
        self.add_bias_grad(env)

    @property
    def _added_rows(self) -> int:
        return max(MULTIPLE, PRODUCT_ELEMENTS // self.in_features)

    @property
    def _product_rows(self) -> int:
        return min(self.out_features, max(MULTIPLE, PRODUCT_ELEMENTS // self.in_features // MULTIPLE * MULTIPLE))

    def _fp8(self, env: OpEnv, name: str, dtype: torch.dtype) -> Tensor:
        return env.t[f"{self.name}_{name}"].view(dtype)

    def _transposed(self, env: OpEnv, name: str, dtype: torch.dtype) -> Tensor:
        """A buffer that is declared by tokens, with its features first."""
        buffer = self._fp8(env, name, dtype)
        return buffer.view(buffer.shape[1], buffer.shape[0])

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        added = min(tokens, self._added_rows) * self.in_features * compute_bytes if self.adds else 0
        return CUBLASLT_BYTES + super().workspace_bytes(tokens, compute_bytes) + added

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        d, f = self.in_features, self.out_features

        def of_tokens(name: str, features: int, multiple: int = 1) -> TensorSpec:
            return TensorSpec(f"{self.name}_{name}", (features,), "uint8", multiple=multiple)

        def of_weight(name: str, num_rows: int, features: int) -> TensorSpec:
            return TensorSpec(f"{self.name}_{name}", (features,), "uint8", rows=num_rows)

        if half == "forward":
            return of_tokens("x8", d), of_weight("weight8", f, d), scale_buffer(self.name)
        for_weights = (of_tokens("grad8_t", f, MULTIPLE),) if self.trained else ()
        for_both = *for_weights, scale_buffer(f"{self.name}_grad")
        if half == "input":
            return *for_both, of_tokens("grad8", f), of_weight("weight8_t", d, f)
        product = TensorSpec(f"{self.name}_product", (d,), "float32", rows=self._product_rows)
        return *for_both, of_tokens("x8_t", d, MULTIPLE), product

    def _product(self, tokens: int) -> Work:
        return Work(fp8_flops=2.0 * tokens * self.in_features * self.out_features, kernels=1)

    def _quantised(self, elements: int, compute_bytes: int, results: int = 1) -> Work:
        """Work of quantising: two reads, one of them for the maximum, and a write per result."""
        return Work(memory_bytes=float(elements * (2 * compute_bytes + results)), kernels=2)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        d, f = self.in_features, self.out_features
        work = self._product(tokens).plus(self._quantised(tokens * d, compute_bytes))
        work = work.plus(self._quantised(d * f, compute_bytes))
        if self.residual is None:
            return work
        return work.plus(Work(memory_bytes=3.0 * tokens * f * compute_bytes, kernels=1))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        d, f = self.in_features, self.out_features
        work = self._product(tokens).plus(self._quantised(d * f, compute_bytes))
        work = work.plus(self._quantised(tokens * f, compute_bytes, results=2 if self.trained else 1))
        return work.plus(Work(memory_bytes=4.0 * tokens * d * compute_bytes, kernels=2)) if self.adds else work

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_weight_work(tokens, seq_len, compute_bytes)
        return work.plus(self._quantised(tokens * self.in_features, compute_bytes))

    def accumulation_work(self, compute_bytes: int) -> Work:
        """Work of writing the product and adding it to the accumulator, which is read and written."""
        return Work(memory_bytes=16.0 * self.in_features * self.out_features, kernels=1)
