"""Cross-entropy of a block of logits, and its gradient written over them.

B tokens of the block, V vocabulary. One row per program: the log-sum-exp is built online (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867), so a row is read once for the loss and once more for the gradient. The second pass
goes backwards: it begins with what was read last, which the cache still holds. Every tile is loaded while the one
before it is worked on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import next_power_of_2
from flexengine.kernels.rounding import round_to

IGNORE_LABEL = -100  # the label of tokens that carry no loss, as in torch and Hugging Face
_BLOCK = 8192  # columns at a time: 16 warps hold 16 per thread, and two rows share a multiprocessor


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    write_grad: bool,
    soft_cap: float = 0.0,
    weights: Tensor | None = None,
    grad_factor: float = 1.0,
) -> None:
    """losses[i] = logsumexp(logits[i]) - logits[i, labels[i]]; with write_grad, logits become their gradient.

    soft_cap: logits count as soft_cap * tanh(logits / soft_cap) where it is not 0; the gradient is that of the logits.
    weights: factors on the losses and their gradients; grad_factor: on the gradients alone.

    Shapes: logits [B, V] in bf16, fp16 or fp32, rows may be strided; labels [B] int64; losses and weights [B]
    fp32. Any V.
    The gradient is that of the SUM of the losses: weight * (softmax - onehot), rounded once. Label -100: loss 0 and a
    row of zeros. A label outside 0..V-1 other than -100 gives a NaN loss, so that it is noticed.
    Cost: reads B*V elements; with write_grad reads them twice and writes them once.
    Deterministic for given strides and alignment, which set the order of the sum.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    num_tokens, vocab_size = logits.shape
    check_tensor("logits", logits, (num_tokens, vocab_size), FLOATS, strided_rows=True)
    check_tensor("labels", labels, (num_tokens,), (torch.int64,))
    check_tensor("losses", losses, (num_tokens,), (torch.float32,))
    if weights is not None:
        check_tensor("weights", weights, (num_tokens,), (torch.float32,))
    if num_tokens == 0:
        return
    block = min(_BLOCK, next_power_of_2(vocab_size))
    _cross_entropy_kernel[(num_tokens,)](
        logits, labels, losses if weights is None else weights, losses, vocab_size, logits.stride(0), float(soft_cap),
        float(grad_factor),
        WEIGHTS=weights is not None, CAP=soft_cap != 0, IGNORE=IGNORE_LABEL, WRITE_GRAD=write_grad, BLOCK=block,
        num_warps=16 if block >= 4096 else 4,
    )  # fmt: skip


@triton.jit
def _cross_entropy_kernel(
    logits_ptr, labels_ptr, weights_ptr, losses_ptr, vocab_size, row_stride, soft_cap, grad_factor,
    WEIGHTS: tl.constexpr, CAP: tl.constexpr, IGNORE: tl.constexpr, WRITE_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    row_ptr = logits_ptr + row * row_stride
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    whole = vocab_size // BLOCK * BLOCK  # columns of the tiles that are within the row altogether
    if label == IGNORE:
        tl.store(losses_ptr + row, 0.0)
        if WRITE_GRAD:
            _write_zeros(row_ptr, whole, vocab_size, BLOCK)
    else:
        label_exists = (label >= 0) & (label < vocab_size)
        label_logit = tl.load(row_ptr + label, mask=label_exists, other=float("nan")).to(tl.float32)
        if CAP:
            label_logit = soft_cap * _tanh(label_logit / soft_cap)
        maximum = -3.4e38  # finite, so that exp(-inf - maximum) is 0 and never NaN
        lane_sums = tl.zeros((BLOCK,), tl.float32)  # summed over the lanes once, at the end
        coming = _load_tile(row_ptr, 0, whole, BLOCK)
        for first in range(0, whole, BLOCK):
            logits = coming.to(tl.float32)
            coming = _load_tile(row_ptr, first + BLOCK, whole, BLOCK)
            if CAP:
                logits = soft_cap * _tanh(logits / soft_cap)
            maximum, lane_sums = _with_tile(logits, maximum, lane_sums)
        if whole < vocab_size:
            logits = _load_last(row_ptr, whole, vocab_size, BLOCK).to(tl.float32)
            if CAP:
                inside = whole + tl.arange(0, BLOCK) < vocab_size
                logits = tl.where(inside, soft_cap * _tanh(logits / soft_cap), float("-inf"))
            maximum, lane_sums = _with_tile(logits, maximum, lane_sums)
        total = tl.sum(lane_sums, axis=0)
        weight = _weight(weights_ptr + row, WEIGHTS)
        tl.store(losses_ptr + row, weight * (tl.log(total) + (maximum - label_logit)))
        if WRITE_GRAD:
            weight *= grad_factor
            inverse_total = 1.0 / total
            coming = _load_tile(row_ptr, whole - BLOCK, whole, BLOCK)
            if whole < vocab_size:
                columns = whole + tl.arange(0, BLOCK)
                logits = _load_last(row_ptr, whole, vocab_size, BLOCK).to(tl.float32)
                grad = _gradient(logits, columns == label, maximum, inverse_total, soft_cap, CAP)
                tl.store(row_ptr + columns, round_to(weight * grad, dtype), mask=columns < vocab_size)
            for done in range(BLOCK, whole + BLOCK, BLOCK):
                first = whole - done
                logits = coming.to(tl.float32)
                coming = _load_tile(row_ptr, first - BLOCK, whole, BLOCK)
                columns = first + tl.arange(0, BLOCK)
                grad = _gradient(logits, columns == label, maximum, inverse_total, soft_cap, CAP)
                tl.store(row_ptr + columns, round_to(weight * grad, dtype))


@triton.jit
def _write_zeros(row_ptr, whole, vocab_size, BLOCK: tl.constexpr):
    zeros = tl.zeros((BLOCK,), row_ptr.dtype.element_ty)
    for first in range(0, whole, BLOCK):
        tl.store(row_ptr + first + tl.arange(0, BLOCK), zeros)
    if whole < vocab_size:
        columns = whole + tl.arange(0, BLOCK)
        tl.store(row_ptr + columns, zeros, mask=columns < vocab_size)


@triton.jit
def _with_tile(logits, maximum, lane_sums):
    """The maximum, and the sums of exponentials under it, with one more tile."""
    new_maximum = tl.maximum(maximum, tl.max(logits, axis=0))
    return new_maximum, lane_sums * tl.exp(maximum - new_maximum) + tl.exp(logits - new_maximum)


@triton.jit
def _gradient(logits, is_label, maximum, inverse_total, soft_cap, CAP: tl.constexpr):
    if CAP:
        share = _tanh(logits / soft_cap)
        logits = soft_cap * share
    softmax = tl.exp(logits - maximum) * inverse_total
    grad = tl.where(is_label, softmax - 1.0, softmax)
    if CAP:
        grad *= 1.0 - share * share
    return grad


@triton.jit
def _weight(pointer, WEIGHTS: tl.constexpr):
    if WEIGHTS:
        return tl.load(pointer)
    else:
        return 1.0


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _load_tile(row_ptr, first, whole, BLOCK: tl.constexpr):
    """Columns first .. first + BLOCK - 1, all within the first `whole` or none: then -inf, and nothing is read.

    All columns have one mask. With one for each, only a vocabulary that 16 divides would be read 16 bytes at a time.
    """
    exists = (first >= 0) & (first < whole)
    mask = tl.full((BLOCK,), True, tl.int1) & exists
    return tl.load(row_ptr + first + tl.arange(0, BLOCK), mask=mask, other=float("-inf"))


@triton.jit
def _load_last(row_ptr, first, vocab_size, BLOCK: tl.constexpr):
    """Columns from `first` on; those outside of the row are not read and -inf."""
    columns = first + tl.arange(0, BLOCK)
    return tl.load(row_ptr + columns, mask=columns < vocab_size, other=float("-inf"))
