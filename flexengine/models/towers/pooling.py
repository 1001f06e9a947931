"""Changes how models of transformers make rows of patches, where a trace or a small picture would stop them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pool = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def with_rows_of_any_call(model: Any) -> None:
    """Have a model make rows of any pictures, also where nothing is computed."""
    _count_by_places(model)
    if model.config.model_type == "mistral3":
        # it takes a first axis of one away, which of all that a projector gives is the rows' own, where they are one
        model.base_model.multi_modal_projector.register_forward_hook(lambda module, given, rows: rows[None])


def _count_by_places(model: Any) -> None:
    """Have a pooler of patches by their places find which of its rows are real by how many patches are: it tells them
    by weights, which no trace computes."""
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
