"""The checkpoints of a run: checkpoints/step-N of its folder, of which the newest are kept."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from flexengine.checkpoint.atomic import temporary_name
from flexengine.checkpoint.manifest import FOLDER_MANIFEST, ManifestError, read_manifest
from flexengine.checkpoint.staged_folder import remove_leftovers

CHECKPOINTS_FOLDER = "checkpoints"
_STEP = re.compile(r"step-([0-9]{1,12})")


class RunCheckpoint(NamedTuple):
    """A checkpoint by the number of steps that were taken before it."""

    step: int
    folder: Path


def checkpoint_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps of a run lies."""
    return run_folder / CHECKPOINTS_FOLDER / f"step-{step}"


def checkpoints_of(run_folder: Path) -> list[RunCheckpoint]:
    """All checkpoints of a run, the newest first, whether they are whole or not."""
    found = []
    with contextlib.suppress(OSError):
        for path in (run_folder / CHECKPOINTS_FOLDER).iterdir():
            named = _STEP.fullmatch(path.name)
            if named and path.is_dir():
                found.append(RunCheckpoint(int(named[1]), path))
    return sorted(found, reverse=True)


def whole_checkpoints(run_folder: Path) -> list[RunCheckpoint]:
    """The checkpoints of a run whose files are there at the sizes of their manifest, the newest first.

    Checksums are compared when one is loaded.
    """
    return [found for found in checkpoints_of(run_folder) if not fault_of(found.folder)]


def fault_of(folder: Path) -> str:
    """Why a folder is no whole checkpoint, as far as sizes tell; empty where its files have those of its manifest."""
    try:
        files = read_manifest(folder)["files"] if (folder / FOLDER_MANIFEST).is_file() else {}
        differing = [name for name in files if (folder / name).stat().st_size != files[name]["size"]]
    except ManifestError:
        return f"{FOLDER_MANIFEST} is damaged"
    except OSError as error:
        return f"{Path(error.filename or FOLDER_MANIFEST).name}: {error.strerror}"
    if differing:
        return f"{differing[0]} has not the size that {FOLDER_MANIFEST} tells"
    return "" if files else f"no {FOLDER_MANIFEST} that lists files"


def keep_newest(run_folder: Path, step: int, limit: int | None) -> None:
    """Remove checkpoints when that of `step` is durable: all but the newest `limit` whole ones, and later steps.

    Later steps belong to a run that was gone back on. limit None: all earlier ones that are whole are kept.
    """
    earlier = [found for found in whole_checkpoints(run_folder) if found.step <= step]
    kept = {found.folder for found in earlier[:limit]}
    for found in checkpoints_of(run_folder):
        if found.folder not in kept:
            _remove(found.folder)


def remove_checkpoints(run_folder: Path) -> None:
    """Remove all checkpoints of a run, and what killed saves left beside them."""
    clean_up(run_folder)
    for found in checkpoints_of(run_folder):
        _remove(found.folder)
    with contextlib.suppress(OSError):  # somebody else's files are in it
        (run_folder / CHECKPOINTS_FOLDER).rmdir()


def clean_up(run_folder: Path) -> None:
    """Remove what killed saves of checkpoints left; what a living one writes stays."""
    remove_leftovers(run_folder / CHECKPOINTS_FOLDER, r"step-[0-9]+")


def _remove(folder: Path) -> None:
    """Remove a checkpoint under a hidden name: a removal that is cut short leaves nothing that looks like one."""
    hidden = temporary_name(folder)
    with contextlib.suppress(OSError):  # gone already, or not ours to remove
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
