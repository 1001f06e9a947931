"""What a run may keep on a drive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flexengine.options.option import Option

MOST_DISK_GIB = 2**20


@dataclass(frozen=True, kw_only=True)
class DriveOptions:
    """Without them everything lies in memory."""

    offload_dir: Annotated[
        str | None,
        Option(
            "folder on a drive for optimizer states, weights, gradients and, of one GPU, kept activations that the host"
            " has no room for; the GPUs of a node share one file there, which has no name and is gone when the run ends"
            " (default: no drive)",
            decides_plan=False,
        ),
    ] = None
    max_disk_gib: Annotated[
        float | None,
        Option(
            "most GiB that all of it takes on the drive of --offload-dir (default: 15/16 of what is free there)",
            above=0,
            most=MOST_DISK_GIB,
        ),
    ] = None
