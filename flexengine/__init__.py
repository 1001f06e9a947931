"""Train transformer language models that do not fit in GPU memory, under declared GPU and host memory budgets."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import flexengine.plan as _plan_module
from flexengine.version import __version__

if TYPE_CHECKING:
    from flexengine.api import PlannedRun, Sampling, from_pretrained
    from flexengine.api import prepare as plan
    from flexengine.models.registry import register_family
    from flexengine.options.lora import LoRA
    from flexengine.options.train_config import TrainConfig
    from flexengine.run.callbacks import Callback
    from flexengine.run.flex_trainer import FlexTrainer
    from flexengine.run.from_python import TrainResult, train

__all__ = [
    "Callback",
    "FlexTrainer",
    "LoRA",
    "Sampling",
    "TrainConfig",
    "TrainResult",
    "__version__",
    "from_pretrained",
    "plan",
    "register_family",
    "train",
]

_HOMES = {
    "Callback": "flexengine.run.callbacks",
    "FlexTrainer": "flexengine.run.flex_trainer",
    "LoRA": "flexengine.options.lora",
    "Sampling": "flexengine.api",
    "TrainConfig": "flexengine.options.train_config",
    "TrainResult": "flexengine.run.from_python",
    "from_pretrained": "flexengine.api",
    "register_family": "flexengine.models.registry",
    "train": "flexengine.run.from_python",
}
"""Where the names come from that are imported when they are first asked for: planning and downloading start quickly."""


def __getattr__(name: str) -> Any:
    """Import what is first asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flexengine' has no attribute {name!r}")


class _PlanModule(ModuleType):
    """Has `flexengine.plan`, the module of plans, be called as well: a person plans with `flexengine.plan(MODEL)`."""

    def __call__(self, *arguments: Any, **keywords: Any) -> PlannedRun:
        """Plan a run without loading it: `flexengine.api.prepare`, with its keywords."""
        return importlib.import_module("flexengine.api").prepare(*arguments, **keywords)


setattr(_plan_module, "__class__", _PlanModule)  # noqa: B010 - as Python's data model has it, unknown to pyright
