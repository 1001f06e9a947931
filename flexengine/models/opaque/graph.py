"""Reads from autograd's graph which tensors a result depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def leaves_of(*results: Tensor) -> set[int]:
    """The ids of the leaves with a gradient that tensors depend on."""
    found = {id(result) for result in results if result.is_leaf and result.requires_grad}
    waiting: list[Any] = [result.grad_fn for result in results if result.grad_fn is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def used_by(run: Callable[[dict[str, Tensor]], Tensor], parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the parameters that what `run` gives depends on; they are zeros of one element's memory each."""
    values = {name: torch.zeros(()).expand(p.shape).requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad():
        reached = leaves_of(run(dict(values)))
    return tuple(name for name, value in values.items() if id(value) in reached)
