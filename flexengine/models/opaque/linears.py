"""Linear layers inside the layers of a skeleton, and what low-rank adapters add to them while they are called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from flexengine.models.opaque.skeleton import Skeleton, replaced_forward
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.opaque import OpaqueLinear


def linears_of(skeleton: Skeleton, index: int, context: dict[str, Any]) -> tuple[OpaqueLinear, ...]:
    """The linear layers of a layer that adapters may change: those that its forward calls, as PEFT has them.

    A weight that a layer multiplies by itself, such as that of all experts, is none.
    """
    layer = skeleton.layers[index]
    names = [name for name, _ in layer.named_parameters()]
    return linears_called(layer, names, lambda: skeleton.call_without_storage(index, context, TOKENS))


def linears_called(layer: nn.Module, weights: Collection[str], run: Callable[[], object]) -> tuple[OpaqueLinear, ...]:
    """The linear layers of a module with these weights whose forward `run` calls."""
    described = (_described(name, module) for name, module in layer.named_modules())
    found = {one.name: one for one in described if one is not None and one.weight in weights}
    called: set[str] = set()

    def noting(name: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            called.add(name)
            return type(module).forward(module, x)

        return forward

    with ExitStack() as stack:
        for name in found:
            module = layer.get_submodule(name)
            stack.enter_context(replaced_forward(module, noting(name, module)))
        run()
    return tuple(one for name, one in found.items() if name in called)


TOKENS = 5
"""Tokens of the contexts that `linears_of` is given."""


def _described(name: str, module: nn.Module) -> OpaqueLinear | None:
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415, takes seconds

    if isinstance(module, nn.Linear):
        return OpaqueLinear(name, f"{name}.weight", module.in_features, module.out_features, False)
    if isinstance(module, Conv1D):
        return OpaqueLinear(name, f"{name}.weight", module.nx, module.nf, True)
    return None


def shapes_of(adapters: Adapters) -> Iterator[tuple[str, tuple[int, int]]]:
    """The names of A and B with their shapes."""
    yield adapters.down, (adapters.width, adapters.in_features)
    yield adapters.up, (adapters.adapted_features, adapters.rank)


@contextmanager
def adding(layer: nn.Module, adapters: Sequence[Adapters], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the linear layers of a layer add what their adapters make of their inputs."""
    with ExitStack() as stack:
        for one in adapters:
            module = layer.get_submodule(one.name)
            stack.enter_context(replaced_forward(module, _adapted(module, one, weights)))
        yield


def _adapted(module: nn.Module, adapters: Adapters, weights: Mapping[str, Tensor]) -> Callable[[Tensor], Tensor]:
    down, up = weights[adapters.down], weights[adapters.up]

    def forward(x: Tensor) -> Tensor:
        y, low = type(module).forward(module, x), adapters.scale * linear(x, down)
        if adapters.rows == (range(adapters.out_features),):
            return y + linear(low, up)
        rows, low = y.flatten(0, -2).clone(), low.flatten(0, -2)
        for part in adapters.modules:
            rows[:, part.columns] += linear(low[:, part.low], up[part.up])
        return rows.view_as(y)

    return forward
