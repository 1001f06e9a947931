"""Finds which tensors of a checkpoint a parameter of a model of transformers is made of, and in which order."""

from __future__ import annotations

import math
from typing import Any

import torch

from flexengine.models.opaque.skeleton import StructureError
from flexengine.models.spec import WeightSource


def sources_of(model: Any, name: str, shape: tuple[int, ...]) -> tuple[WeightSource, ...]:
    """The tensors, stacked by rows, that transformers itself would write for a parameter.

    Raises: StructureError where the checkpoint holds the elements in another order.
    """
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415, takes seconds

    # The rows are numbered and converted with one element each: their numbers tell where each tensor's rows lie.
    width = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape) // width
    numbers = torch.arange(rows, dtype=torch.float64).reshape((*shape[:-1], 1) if len(shape) > 1 else shape)
    found = revert_weight_conversion(model, {name: numbers})
    parts = sorted(found.items(), key=lambda item: item[1].reshape(-1)[0].item())
    end = 0
    for stored, part in parts:
        wanted = torch.arange(end, end + part.numel(), dtype=torch.float64)
        if not torch.equal(part.reshape(-1), wanted) or (len(shape) > 1 and part.shape[-1] != 1):
            raise StructureError(f"checkpoints hold {stored} in another order than the model's {name}")
        end += part.numel()
    if end != rows:
        raise StructureError(f"checkpoints hold {end * width} of the {rows * width} elements of the model's {name}")
    return tuple(
        WeightSource(n, (*part.shape[:-1], width) if len(shape) > 1 else tuple(part.shape)) for n, part in parts
    )
