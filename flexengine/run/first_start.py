"""Begins what a first start takes in other processes, before this one has imported what it needs itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from flexengine.hardware.cache import remembers_any
from flexengine.ops.ready_compiler import READY
from flexengine.options.train_config import TrainConfig

__all__ = ["COMPILING", "READY", "begin_first_start"]

COMPILING = ("flexengine.hardware.measure.gpu", "flexengine.run.compiled_kernels")
"""Modules with what is compiled ahead: the kernels that a model is measured by, and those of its steps."""
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""What is there where the driver of an NVIDIA card is; the second on Windows' Linux."""


def begin_first_start(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Have a process import what compiling takes, where no kernels are remembered for a model of this name.

    A process that proves to be needless costs nobody a result: it ends with the block of READY.
    """
    is_first = environment.get("LOCAL_RANK", "0") == "0"  # of a node's ranks, as others find its kernels
    may_use_card = config.device != "cpu" and environment.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
    if config.dry_run or not is_first or not may_use_card or not any(driver.exists() for driver in DRIVERS):
        return
    if not remembers_any(_name_of(config.model), "kernels"):
        READY.begin(*COMPILING)


def _name_of(model: str) -> str:
    """The name that a described model has, for a folder, a file, a preset or an id on the hub."""
    return re.split(r"[/:]", model.rstrip("/"))[-1].partition("@")[0].removesuffix(".gguf")
