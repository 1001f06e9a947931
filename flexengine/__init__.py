"""Train transformer language models that do not fit in GPU memory, under declared GPU and host memory budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexengine.version import __version__

if TYPE_CHECKING:
    from flexengine.api import from_pretrained
    from flexengine.options.lora import LoRA

__all__ = ["LoRA", "__version__", "from_pretrained"]


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for, so that planning and downloading start quickly."""
    if name == "from_pretrained":
        from flexengine.api import from_pretrained  # noqa: PLC0415

        return from_pretrained
    if name == "LoRA":
        from flexengine.options.lora import LoRA  # noqa: PLC0415

        return LoRA
    raise AttributeError(f"module 'flexengine' has no attribute {name!r}")
