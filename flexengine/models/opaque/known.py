"""Modules inside the layers of a skeleton whose formulas have kernels here, which are called in their place.

A module is known by what it computes: its own forward is compared with the formula, in values and gradients, wide and
rounding for rounding in 16 bits. Its class and its names say nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flexengine.models.opaque.skeleton import replaced_forward
from flexengine.ops.fused_calls import fused_rmsnorm
from flexengine.ops.rmsnorm import NormStyle

SCALES = (1e-3, 1.0, 30.0)
"""Of the rows that are compared: of the smallest ones eps decides."""
BOUND = 1e-5
"""Largest relative difference in float32, in which most modules compute whatever they are given."""
SAME_BITS = 0.99
"""Share of the elements in 16 bits that are equal where two functions round at the same places."""

Forward = Callable[[Tensor], Tensor]


class KnownModules:
    """The modules of each layer that are known, with what computes them."""

    def __init__(self, layers: nn.ModuleList) -> None:
        found: dict[object, NormStyle | None] = {}
        self._of_layer: list[list[tuple[nn.Module, Forward]]] = []
        for layer in layers:
            mine: list[tuple[nn.Module, Forward]] = []
            for module in layer.modules():
                if (key := _candidate(module)) is None:
                    continue
                if key not in found:
                    found[key] = norm_style(module)
                if (style := found[key]) is not None:
                    mine.append((module, _norm(module, style)))
            self._of_layer.append(mine)

    @contextmanager
    def called(self, index: int) -> Iterator[None]:
        """Call what is known of a layer in the place of its own modules' forward."""
        with ExitStack() as stack:
            for module, forward in self._of_layer[index]:
                stack.enter_context(replaced_forward(module, forward))
            yield

    def count(self, index: int) -> int:
        """How many modules of a layer are known."""
        return len(self._of_layer[index])


def _candidate(module: nn.Module) -> object | None:
    """What two modules have in common that compute the same; None for one that is no norm with one weight [D]."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1:
        return None
    if next(module.children(), None) or next(module.buffers(), None) is not None:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    return type(module), len(parameters["weight"]), *_numbers(module)


def _numbers(module: nn.Module) -> list[tuple[str, float]]:
    """The numbers that a module has beside its weight."""
    return sorted((name, value) for name, value in vars(module).items() if isinstance(value, float))


def norm_style(module: nn.Module) -> NormStyle | None:
    """How an RMSNorm computes that has one weight [D] and is called with x alone; None for what is no RMSNorm."""
    width, generator = len(module.get_parameter("weight")), torch.Generator().manual_seed(0)
    x = torch.cat([scale * torch.randn(2, width, generator=generator) for scale in SCALES])[None]
    weight = torch.randn(width, generator=generator)
    try:
        wide, narrow = (_run(_own(module), x.to(dtype), weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16))
    except (RuntimeError, TypeError, ValueError, IndexError):  # it is no function of x alone, or has no gradient
        return None
    for (_, eps), offset, is_wide in product(_numbers(module), (0.0, 1.0), (False, True)):
        style = NormStyle(eps, offset, is_wide)
        call = lambda rows, own, style=style: fused_rmsnorm(rows, own, style)  # noqa: E731
        if not all(map(_close, wide, _run(call, x, weight))):
            continue
        if (narrow[0] == _run(call, x.bfloat16(), weight.bfloat16())[0]).float().mean() >= SAME_BITS:
            return style
    return None


def _own(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The module's own forward as a function of x and its weight."""
    return lambda x, weight: functional_call(module, {"weight": weight}, (x,))


def _run(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """y, and the gradients by x and the weight of a sum of y whose terms count differently."""
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = call(x, weight)
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError("it gives rows of another kind")
        return y.detach(), *torch.autograd.grad(y, [x, weight], torch.linspace(-1, 1, x.numel()).view_as(y).to(y))


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether every row of two tensors is the same but for rounding."""
    return bool(((one - other).norm(dim=-1) <= BOUND * one.norm(dim=-1)).all())


def _norm(module: nn.Module, style: NormStyle) -> Forward:
    own: Any = module

    def forward(x: Tensor) -> Tensor:
        if x.dtype != own.weight.dtype or x.dtype == torch.float16:  # what its own forward rounds to is its own
            return type(own).forward(own, x)
        return fused_rmsnorm(x, own.weight, style)

    return forward
