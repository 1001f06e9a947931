"""Global-norm gradient clipping as a multiplier that the optimizer update applies: gradients are never rewritten."""

import torch
from torch import Tensor


def gradient_scales(
    norm_squares: Tensor, loss_weight: float, max_grad_norm: float | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Multipliers of the stored gradients, and the global norm of the gradients they stand for.

    Gradients in memory are sums over target tokens. The loss is their mean, so the gradient that a person thinks of is
    stored / loss_weight (the number of target tokens, where they have no weights of their own), and clipping shrinks it
    to norm max_grad_norm if it is longer.

    Shapes: norm_squares [G] in float32 or float64, the sums of squares of all stored gradients in any grouping (for
    example one per group of parameters); summed here in float64, in the order given.
    max_grad_norm None means no clipping; the norm is still returned.
    Returns: scales [G] and grad_norm [1] in dtype, that of the update's arithmetic, on the device of norm_squares. A
    scale is NaN, which makes the update leave its tensors as they are, where the norm that it depends on is not finite:
    with clipping the global one, so that nothing is updated; without it that of its own gradient, since no update waits
    for another gradient.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError if loss_weight is not above 0, max_grad_norm <= 0, or norm_squares is not a float vector.
    Source: torch.nn.utils.clip_grad_norm_, coefficient min(1, max_norm / (norm + 1e-6)).
    """
    if not loss_weight > 0:
        raise ValueError(f"loss_weight must be above 0, got {loss_weight}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0, or None for no clipping, got {max_grad_norm}")
    if norm_squares.ndim != 1 or norm_squares.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"norm_squares must be a float32 or float64 vector, got {norm_squares.dtype} {list(norm_squares.shape)}"
        )
    squares = norm_squares.to(torch.float64)
    norm = squares.sum(dim=0, keepdim=True).sqrt() / loss_weight
    # x - x is 0, or NaN where x is not finite, by fewer kernels than a comparison: steps of small models wait for them
    if max_grad_norm is None:
        scales = (squares - squares) + 1.0 / loss_weight
    else:
        scale = torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0) * (1.0 / loss_weight)
        scales = (scale + (norm - norm)).expand_as(squares)
    return scales.to(dtype), norm.to(dtype)


def kept_share(grad_norm: float, max_grad_norm: float | None) -> float:
    """The share of gradients that clipping keeps. Under it the norm is finite."""
    return 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (grad_norm + 1e-6))


def unclipped_scale(loss_weight: float, dtype: torch.dtype) -> Tensor:
    """The multiplier [1] of stored gradients where nothing is clipped, on the CPU. Its bits are `gradient_scales`'s."""
    return torch.tensor([1.0 / loss_weight], dtype=torch.float64).to(dtype)
