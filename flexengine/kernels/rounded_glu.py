"""Gated linear units whose backward reads gate and up rounded to FP8 (e4m3), with a scale for every 128 columns.

T tokens, F FFN width, B = ceil(F / 128) blocks of columns of either half. Codes [T, 2F] lie as gate_up does; scales
[T, 2B] are those of gate's blocks, then of up's. Units are those of kernels/glu.py, without the clamped ones. One
function reads the codes for either gradient, and one writes them, so that who wrote them changes no bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.fp8 import fp8_bits, from_e4m3
from flexengine.kernels.glu import ACTIVATIONS, _gate, _unit_gradients
from flexengine.kernels.rounding import round_to

COLUMNS = 128
"""Columns that share a scale."""
_COLUMNS = tl.constexpr(COLUMNS)
_BLOCKS = 16  # blocks of columns per program: 2048 columns, as in kernels/glu.py
NATIVE_SINCE = (8, 9)
"""Compute capability of the first cards that convert to FP8, and from it, by an instruction."""


def round_gate_up(
    gate_up: Tensor, codes: Tensor, scales: Tensor, largest: float, least: float, out: Tensor | None = None,
    activation: str = "silu",
) -> None:  # fmt: skip
    """codes = gate_up / scales, where a scale is max(largest magnitude of its block, least) / largest; with `out` also
    out = act(gate) * up of gate_up itself, as `glu_forward` of kernels/glu.py.

    Shapes: gate_up [T, 2F] in bf16 or fp32, codes [T, 2F] uint8, scales [T, 2B] fp32, out [T, F] in bf16 or fp32.
    Rounding: as kernels/fp8.py. NaN stays NaN; a block with an infinity becomes NaN.
    Cost: reads 2*T*F elements, writes as many bytes, 8*T*B bytes of scales, and T*F elements of `out`.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    check_tensor("gate_up", gate_up, (tokens, 2 * width), FLOATS)
    launch = _launch(codes, scales, tokens, width, activation)
    if out is not None:
        check_tensor("out", out, (tokens, width), FLOATS)
    if gate_up.numel() == 0:
        return
    _round_kernel[(tokens * launch["tiles"],)](
        gate_up, codes, scales, gate_up if out is None else out, largest=largest, least=least, UNIT=out is not None,
        **launch,
    )  # fmt: skip


def glu_from_codes(codes: Tensor, scales: Tensor, out: Tensor, activation: str) -> None:
    """out = act(gate) * up of the rounded gate and up.

    Shapes: as `round_gate_up`. Rounding: fp32 arithmetic, one rounding at the store.
    Cost: reads 2*T*F + 8*T*B bytes, writes T*F elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = out.shape
    check_tensor("out", out, (tokens, width), FLOATS)
    launch = _launch(codes, scales, tokens, width, activation)
    if out.numel() > 0:
        _forward_kernel[(tokens * launch["tiles"],)](codes, scales, out, **launch)


def glu_backward_from_codes(
    grad_out: Tensor, codes: Tensor, scales: Tensor, grad_gate_up: Tensor, activation: str
) -> None:
    """Gradients of both halves at the rounded gate and up, by the formulas of kernels/glu.py.

    Shapes: as `round_gate_up`; grad_out [T, F] and grad_gate_up [T, 2F] in bf16 or fp32.
    Cost: reads 2*T*F + 8*T*B bytes and T*F elements, writes 2*T*F elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes, strides or activations.
    """
    tokens, width = grad_out.shape
    check_tensor("grad_out", grad_out, (tokens, width), FLOATS)
    check_tensor("grad_gate_up", grad_gate_up, (tokens, 2 * width), FLOATS)
    launch = _launch(codes, scales, tokens, width, activation)
    if grad_out.numel() > 0:
        _backward_kernel[(tokens * launch["tiles"],)](grad_out, codes, scales, grad_gate_up, **launch)


def _launch(codes: Tensor, scales: Tensor, tokens: int, width: int, activation: str) -> dict[str, int | bool]:
    """Check codes, scales and the name of the unit; returns the keywords of a launch."""
    blocks = cdiv(width, COLUMNS)
    check_tensor("codes", codes, (tokens, 2 * width), (torch.uint8,))
    check_tensor("scales", scales, (tokens, 2 * blocks), (torch.float32,))
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {ACTIVATIONS}")
    together = min(_BLOCKS, next_power_of_2(blocks))
    return {
        "width": width, "blocks": blocks, "tiles": cdiv(blocks, together), "GELU": activation == "gelu_tanh",
        "NATIVE": is_native(codes), "BLOCKS": together, "num_warps": 4,
    }  # fmt: skip


def is_native(codes: Tensor) -> bool:
    """Whether the card of these codes has the instructions, or Triton's interpreter stands for them."""
    return not codes.is_cuda or torch.cuda.get_device_capability(codes.device) >= NATIVE_SINCE


@triton.jit
def _tile(width, tiles, BLOCKS: tl.constexpr):
    """(token, blocks [BLOCKS], their columns [BLOCKS, 128], which of these there are) of a program: neighbours take
    neighbouring columns."""
    token = (tl.program_id(0) // tiles).to(tl.int64)
    block = (tl.program_id(0) % tiles) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    return token, block, column, column < width


@triton.jit
def _codes_of_gate(codes_ptr, scales_ptr, token, block, column, width, blocks):
    """Where codes and scales of gate lie; those of up lie `width` codes and `blocks` scales behind."""
    return codes_ptr + token * 2 * width + column, scales_ptr + token * 2 * blocks + block


@triton.jit
def _store_codes(x, codes_at, scales_at, inside, held, largest, least, NATIVE: tl.constexpr):
    """Write blocks [BLOCKS, 128] of one half, in fp32 and zero outside, as codes and scales.

    codes_at, scales_at: where they go, [BLOCKS, 128] and [BLOCKS]; inside, held: which of them there are.
    """
    absmax = tl.max(tl.maximum(tl.abs(x), least), axis=1)  # the inner maximum takes NaN for nothing
    tl.store(scales_at, tl.div_rn(absmax, largest), mask=held)
    scaled = x * tl.div_rn(largest, absmax)[:, None]
    scaled = tl.where(scaled > largest, largest, tl.where(scaled < -largest, -largest, scaled))  # NaN stays
    tl.store(codes_at, fp8_bits(scaled, True, NATIVE), mask=inside)


@triton.jit
def _load_codes(codes_at, scales_at, inside, held, NATIVE: tl.constexpr):
    """What `_store_codes` has rounded, in fp32."""
    code = tl.load(codes_at, mask=inside, other=0).to(tl.int32)
    return from_e4m3(code, NATIVE) * tl.load(scales_at, mask=held, other=0.0)[:, None]


@triton.jit
def _round_kernel(
    gate_up_ptr, codes_ptr, scales_ptr, out_ptr, width, blocks, tiles, largest, least,
    UNIT: tl.constexpr, GELU: tl.constexpr, NATIVE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token, block, column, inside = _tile(width, tiles, BLOCKS)
    codes, scales = _codes_of_gate(codes_ptr, scales_ptr, token, block, column, width, blocks)
    row = gate_up_ptr + token * 2 * width
    gate = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width + column, mask=inside, other=0.0).to(tl.float32)
    _store_codes(gate, codes, scales, inside, block < blocks, largest, least, NATIVE)
    _store_codes(up, codes + width, scales + blocks, inside, block < blocks, largest, least, NATIVE)
    if UNIT:
        s, _ = _gate(gate, 0.0, GELU, False)
        tl.store(out_ptr + token * width + column, round_to(gate * s * up, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _forward_kernel(
    codes_ptr, scales_ptr, out_ptr, width, blocks, tiles, GELU: tl.constexpr, NATIVE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    token, block, column, inside = _tile(width, tiles, BLOCKS)
    codes, scales = _codes_of_gate(codes_ptr, scales_ptr, token, block, column, width, blocks)
    gate = _load_codes(codes, scales, inside, block < blocks, NATIVE)
    up = _load_codes(codes + width, scales + blocks, inside, block < blocks, NATIVE)
    s, _ = _gate(gate, 0.0, GELU, False)
    tl.store(out_ptr + token * width + column, round_to(gate * s * up, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad_out_ptr, codes_ptr, scales_ptr, grad_gate_up_ptr, width, blocks, tiles, GELU: tl.constexpr,
    NATIVE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token, block, column, inside = _tile(width, tiles, BLOCKS)
    codes, scales = _codes_of_gate(codes_ptr, scales_ptr, token, block, column, width, blocks)
    gate = _load_codes(codes, scales, inside, block < blocks, NATIVE)
    up = _load_codes(codes + width, scales + blocks, inside, block < blocks, NATIVE)
    grad = tl.load(grad_out_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
    _, grad_gate, grad_up = _unit_gradients(grad, gate, up, 0.0, 0.0, GELU, False)
    row = grad_gate_up_ptr + token * 2 * width
    dtype: tl.constexpr = grad_gate_up_ptr.dtype.element_ty
    tl.store(row + column, round_to(grad_gate, dtype), mask=inside)
    tl.store(row + width + column, round_to(grad_up, dtype), mask=inside)
