"""Tells rows of padding by places of patches, where a pooler tells them by weights that no trace computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pool = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def count_by_places(model: Any) -> None:
    """Have a pooler of patches by their places find which of its rows are real by how many patches are."""
    pooler: Any = getattr(getattr(model.base_model, "vision_tower", None), "pooler", None)
    if hasattr(pooler, "_avg_pool_by_positions"):
        pooler._avg_pool_by_positions = _counting(pooler._avg_pool_by_positions)


def _counting(pool: Pool) -> Pool:
    def counting(patches: Tensor, places: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Rows [n, length, D], and which are real; padding stands behind all patches that are not."""
        rows, _ = pool(patches, places, length)
        real = (places != -1).all(-1).sum(-1, keepdim=True) // (places.shape[1] // length)
        return rows, torch.arange(length, device=places.device) < real

    return counting
