"""The gradient of attention's sinks, summed over all tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2

_ROWS = 16  # tokens of a tile: 4 KiB of bf16 and as much of the gradient at a head width of 128


def sink_gradients(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, partials: Tensor) -> None:
    """partials[p, n] = -(sum over the p-th share of all tokens of exp(sinks - lse) * sum over H of grad_out * out).

    Shapes: grad_out and out [T, N, H] in bf16 or fp32, lse [N, T] fp32, sinks [N] in bf16 or fp32, partials [P, N]
    fp32; all contiguous. Sums in fp32; their order depends on shapes alone.
    Cost: reads 2*T*N*H elements. Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, num_heads, width = out.shape
    check_tensor("out", out, (tokens, num_heads, width), FLOATS)
    check_tensor("grad_out", grad_out, (tokens, num_heads, width), FLOATS)
    check_tensor("lse", lse, (num_heads, tokens), (torch.float32,))
    check_tensor("sinks", sinks, (num_heads,), FLOATS)
    check_tensor("partials", partials, (len(partials), num_heads), (torch.float32,))
    _gradient_kernel[(len(partials), num_heads)](
        grad_out, out, lse, sinks, partials, tokens, num_heads, width, cdiv(tokens, len(partials)),
        ROWS=_ROWS, BLOCK=next_power_of_2(width), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "share"])
def _gradient_kernel(
    grad_out_ptr, out_ptr, lse_ptr, sinks_ptr, partials_ptr, tokens, num_heads, width, share,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = group * share
    end = tl.minimum(begin + share, tokens)
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    lanes = tl.zeros((ROWS,), tl.float32)
    for first in range(begin, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        here = rows < end
        offsets = (rows[:, None] * num_heads + head) * width + columns[None, :]
        mask = here[:, None] & (columns < width)[None, :]
        grad = tl.load(grad_out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + head.to(tl.int64) * tokens + rows, mask=here, other=float("inf"))
        lanes += tl.exp(sink - lse) * tl.sum(grad * out, axis=1)
    tl.store(partials_ptr + group * num_heads + head, -tl.sum(lanes, axis=0))
