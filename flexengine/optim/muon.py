"""Muon: the momentum of a matrix, made orthogonal by a few matrix products, is the direction in which it moves.

An update is a whole matrix: every source of a fused projection, every expert, by itself. It is scaled so that its
elements are as large as AdamW's, and one learning rate drives both. Source: Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/, with the scale of Liu et al. 2025, "Muon is Scalable for LLM Training",
https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.optim.momentum import STATE, check_settings
from flexengine.optim.rule import Rule, StatePlane, Update
from flexengine.optim.stored import (
    MOMENTUM_STREAM,
    WEIGHT_STREAM,
    math_dtype,
    part_of,
    pieces,
    read_master,
    scaled_grad,
    write_master,
    write_state,
)
from flexengine.random_bits import stream_keys

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5 in an iteration on singular values, chosen to bring small ones to about 1 as fast as possible."""
NUM_STEPS = 5
NORM_EPS = 1e-7
"""Added to the norm that a matrix is divided by before the first iteration: gradients of zeros give no update."""
RMS = 0.2
"""Root mean square of an update's elements, which is about that of AdamW's."""
_TILE_ELEMENTS = 1 << 18  # bounds the temporaries of a plain update
_ALIGNMENT = 256  # bytes; of the matrices in the scratch memory


@dataclass(frozen=True)
class Muon:
    """Settings of Muon for the hidden matrices of blocks, and of AdamW (betas, eps) for everything else.

    Raises: ValueError when a value lies outside its range.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        betas = {"beta1": self.betas[0], "beta2": self.betas[1]}
        check_settings("Muon", self.lr, self.weight_decay, momentum=self.momentum, **betas)
        if not 0.0 < self.eps < float("inf"):
            raise ValueError(f"Muon eps must be finite and above 0, got {self.eps}")


def muon_rule(state_dtype: str) -> Rule:
    """Muon with its momentum in one dtype."""
    return Rule("Muon", (StatePlane(STATE, state_dtype),), _update, muon_flops, muon_scratch_bytes)


def muon_flops(rows: int, columns: int) -> float:
    """FLOPs of an update of one matrix: three products in every iteration."""
    small, large = sorted((rows, columns))
    return NUM_STEPS * (4.0 * small * small * large + 2.0 * small**3)


def muon_scratch_bytes(rows: int, columns: int, element_bytes: int) -> int:
    """Bytes of the temporaries of one matrix: two of its size and two of its smaller side's square."""
    squared = min(rows, columns) ** 2
    return 2 * _aligned(rows * columns * element_bytes) + 2 * _aligned(squared * element_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Scratch:
    """Cuts the temporaries of a matrix out of scratch memory."""

    def __init__(self, memory: Tensor, dtype: torch.dtype) -> None:
        self._memory, self._dtype, self._end = memory, dtype, 0

    def matrix(self, rows: int, columns: int) -> Tensor:
        """The next matrix."""
        num_bytes = rows * columns * self._dtype.itemsize
        found = self._memory[self._end : self._end + num_bytes].view(self._dtype).view(rows, columns)
        self._end += _aligned(num_bytes)
        return found


def _update(update: Update) -> None:
    """Update the matrices one by one; the bits of each are the same in any company."""
    assert update.scratch is not None
    start = 0
    for rows, columns in update.matrices:
        _update_matrix(part_of(update, start, rows * columns), rows, columns)
        start += rows * columns


def _update_matrix(update: Update, rows: int, columns: int) -> None:
    assert update.scratch is not None
    scratch, side = _Scratch(update.scratch, update.planes["weights"].dtype), min(rows, columns)
    x, y, a, b = (scratch.matrix(*shape) for shape in ((rows, columns), (rows, columns), (side, side), (side, side)))
    _take_momentum(update, x.view(-1))
    x = orthogonalise_(x, y, a, b)
    _apply(update, x.view(-1), RMS * math.sqrt(max(rows, columns)) * update.lr)


def orthogonalise_(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Bring the singular values of x near 1; returns x or y, which holds the result.

    Shapes: x and y [rows, columns], a and b [n, n] with n the smaller of both; all in one dtype, and all overwritten.
    Source: Newton-Schulz iteration of Jordan et al. 2024: X <- p X + (q A + r A A) X with A = X X^T.
    """
    p, q, r = COEFFICIENTS
    # of values that are rounded already, so that nothing else of the matrix's past matters
    x.div_(torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) + NORM_EPS)
    wide = x.shape[0] <= x.shape[1]
    for _ in range(NUM_STEPS):
        torch.mm(*((x, x.T) if wide else (x.T, x)), out=a)
        torch.addmm(a, a, a, beta=q, alpha=r, out=b)
        torch.addmm(x, *((b, x) if wide else (x, b)), beta=p, out=y)
        x, y = y, x
    return x


def _take_momentum(update: Update, x: Tensor) -> None:
    """Store the new momentum, and in x [n] the direction ahead of it (Nesterov)."""
    keep = update.settings.momentum
    planes = update.planes
    if planes["weights"].is_cuda and planes["weights"].dtype != torch.float64:
        from flexengine.kernels.muon import take_momentum_  # noqa: PLC0415  imports Triton

        keys = stream_keys(update.seed, update.step, MOMENTUM_STREAM)
        take_momentum_(planes[STATE], planes["grad"], x, update.grad_scale, keep, keys, update.element_offset)
        return
    for piece, target in zip(pieces(update, _TILE_ELEMENTS), x.split(_TILE_ELEMENTS), strict=True):
        momentum, direction = muon_values(piece.planes[STATE].to(math_dtype(update)), scaled_grad(piece), keep)
        target.copy_(direction)
        write_state(piece, STATE, momentum, MOMENTUM_STREAM)


def muon_values(momentum: Tensor, grad: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """The new momentum, a mean that fades, and the direction ahead of it; one rounding per operator."""
    momentum = momentum + (grad - momentum) * (1.0 - keep)
    return momentum, grad + (momentum - grad) * keep


def _apply(update: Update, x: Tensor, step_size: float) -> None:
    """Move the masters by step_size * x, after decay."""
    planes, decay = update.planes, 1.0 - update.lr * update.weight_decay
    weight = planes["weights"]
    if weight.is_cuda and weight.dtype != torch.float64:
        from flexengine.kernels.muon import apply_  # noqa: PLC0415  imports Triton

        keys, masters = stream_keys(update.seed, update.step, WEIGHT_STREAM), (weight, planes.get("remainder"))
        apply_(masters, x, update.grad_scale, decay, step_size, keys, update.element_offset)
        return
    for piece, moved in zip(pieces(update, _TILE_ELEMENTS), x.split(_TILE_ELEMENTS), strict=True):
        write_master(piece, read_master(piece) * decay - moved.to(math_dtype(update)) * step_size)
