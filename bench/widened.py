"""Computes a model of transformers in float64, also where its code says float32.

Norms and the delta rule of transformers work in float32 whatever the model's dtype. A model of several of them rounds
gradients by 1e-4 and more; in float64 its formulas can be compared.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from functools import lru_cache
from types import MethodType, ModuleType
from typing import Any

NARROW = {"torch.float32": "torch.float64", ".float()": ".double()", "dtype=torch.float)": "dtype=torch.double)"}


def widen(model: Any) -> Any:
    """The model itself, in float64: its modules call copies of their code in which float32 is float64."""
    model = model.double()
    model.set_experts_implementation("eager")  # torch's grouped products take no float64
    for module in model.modules():
        scope = _scope(sys.modules[type(module).__module__])
        if scope is None or "Rotary" in type(module).__name__:  # frequencies are float32 here as well
            continue
        for name in ("forward", "_norm"):
            source = _source(getattr(type(module), name, None))
            if source is not None:
                exec(source, scope)
                setattr(module, name, MethodType(scope[name], module))
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__name__ in scope:
                setattr(module, name, scope[value.__name__])
    return model


@lru_cache
def _scope(module: ModuleType) -> dict[str, Any] | None:
    """What the code of a module of transformers' models finds by name, with its functions widened; None of others."""
    if not module.__name__.startswith("transformers.models."):
        return None
    scope = dict(vars(module))
    for function in [value for value in scope.values() if inspect.isfunction(value)]:
        source = _source(function) if function.__module__ == module.__name__ else None
        if source is not None:
            exec(source, scope)
    return scope


def _source(function: Any) -> str | None:
    """The widened source of a function that says float32; None of others."""
    if not inspect.isfunction(function):
        return None
    source = wide = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    for narrow, double in NARROW.items():
        wide = wide.replace(narrow, double)
    return None if wide == source else wide
