"""`train --gpus N`: starts this command once for every GPU, through torch's elastic launcher, as torchrun does."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

SHUTDOWN_S = 3600
"""How long ranks that are asked to stop may take to finish their step and save."""
FAILED = 1
STATUS_VARIABLE = "FLEXENGINE_STATUS_FILE"
"""Environment variable: the file that rank 0 tells its exit status in. A launcher that was asked to stop sees none."""


def is_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is one of several ranks already, as torchrun or `launch` starts them."""
    environment = os.environ if environment is None else environment
    return environment.get("WORLD_SIZE", "1").strip() not in ("", "1")


def launch(num_gpus: int, command: Sequence[str]) -> int:
    """Run `python -m flexengine COMMAND` as `num_gpus` ranks of this machine; returns the exit status of the run.

    A signal reaches all ranks, which save where they are if the run makes checkpoints. When one fails, the others end,
    too; ranks say themselves what was wrong.
    """
    with tempfile.TemporaryDirectory(prefix="flexengine-launch") as folder:
        told = Path(folder, "status")
        os.environ[STATUS_VARIABLE] = str(told)
        try:
            return _run(num_gpus, command, told)
        finally:
            del os.environ[STATUS_VARIABLE]


def tell_status(status: int) -> int:
    """Tell `launch`, if it started this process as rank 0, how the run ended; returns the status."""
    told = os.environ.get(STATUS_VARIABLE)
    if told is not None and os.environ.get("RANK") == "0":
        with suppress(OSError):  # the launcher is gone, or its disk is full
            Path(told).write_text(str(status), encoding="ascii")
    return status


def _run(num_gpus: int, command: Sequence[str], told: Path) -> int:
    """Do what `launch` does; `told` is the file of `tell_status`."""
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException  # noqa: PLC0415 (loads torch)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    more = _waits_for_saving(LaunchConfig, PContext, SignalException)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # repeats at length what ranks say
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does; updates on the CPU have their own number
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_gpus,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT,SIGUSR1",
        **more,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "flexengine", *command)
    except ChildFailedError as error:
        return _status({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:
        return _told_status(told, 128 + int(error.sigval))
    return 0


def _waits_for_saving(config: type, context: type, asked: type[BaseException]) -> dict[str, Any]:
    """Have torch's launcher wait for `SHUTDOWN_S` after a signal, and return what its `config` takes to do so.

    torch 2.11 has no such setting: it kills ranks 30 s after it passed a signal on. There what closes its `context` of
    processes waits for longer while an exception of type `asked` is handled.
    """
    if any(field.name == "shutdown_timeout" for field in fields(config)):
        return {"shutdown_timeout": SHUTDOWN_S}
    close: Callable[..., None] = getattr(context, "close")  # noqa: B009

    def patient(self: object, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        close(self, death_sig, SHUTDOWN_S if isinstance(sys.exc_info()[1], asked) else timeout)

    setattr(context, "close", patient)  # noqa: B010 (no attribute of any class)
    return {}


def _told_status(told: Path, otherwise: int) -> int:
    try:
        return int(told.read_text(encoding="ascii"))
    except (OSError, ValueError):  # rank 0 did not come to its end
        return otherwise


def _status(exits: Mapping[int, int]) -> int:
    """The exit status of a run from those of ranks that failed: the first one that a rank chose, or of a signal."""
    chosen = [status for _, status in sorted(exits.items()) if status > 0]
    if chosen:
        return chosen[0]
    killed = [-status for status in exits.values() if status < 0 and -status != signal.SIGTERM]
    return 128 + killed[0] if killed else FAILED
