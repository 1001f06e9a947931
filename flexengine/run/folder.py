"""The folder of a run: whether it can be used, and what is written there before anything is loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexengine.api import PlannedRun
from flexengine.checkpoint.atomic import write_text
from flexengine.checkpoint.run_checkpoints import (
    RunCheckpoint,
    checkpoint_folder,
    checkpoints_of,
    clean_up,
    remove_checkpoints,
)
from flexengine.checkpoint.staged_folder import check_takes_files
from flexengine.metrics import format_bytes
from flexengine.models.registry import ModelSource
from flexengine.options.option import options_of
from flexengine.options.train_config import (
    CONFIG_FILE,
    DATA_FILE,
    EVAL_LOG_FILE,
    FINAL_FOLDER,
    LOG_FILE,
    PLAN_FILE,
    TIMELINE_FILE,
    TRACE_FILE,
    TrainConfig,
)
from flexengine.run.resuming import AUTO, SAME_RESULTS
from flexengine.wording import without_folders

NAMED_PLACES = ("model", "adapter", "tokenizer", "teacher", "dataset", "val_dataset", "rewards")
LOCAL_PLACES = ("output_dir", "resume", "overwrite", "dry_run", "plan_json", "data_cache", "generator", "offload_dir")
"""Options that say where something lies: which of them tell what made a model, and which mean nothing elsewhere."""
ELEMENT_BYTES = {"float64": 8, "float32": 4, **dict.fromkeys(("bfloat16", "float16"), 2), "int8": 1 + 4 / 256}
"""Bytes of an element of stored weights and states; int8 has a float32 scale for 256."""


def check_run_folder(config: TrainConfig, replace: bool) -> None:
    """Raise ValueError when the run folder cannot be used.

    It may be new, empty, or that of an earlier run that took no step. One that holds an earlier run's log, checkpoints
    or model is refused, unless the run goes on from a checkpoint of it, also to another end, or replace=True or
    --overwrite allows that these are replaced. A folder that another process trains in is refused.
    """
    _check_contents(config, replace)
    if config.run_folder.is_dir():
        with held(config.run_folder):
            pass


def _check_contents(config: TrainConfig, replace: bool) -> None:
    folder = config.run_folder
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output-dir {folder} is a file, not a folder")
    _check_can_write("--output-dir", folder)
    if config.plan_json:
        _check_can_write("--plan-json", Path(config.plan_json).absolute().parent)
    if isinstance(config.trace, str):
        _check_can_write("--trace", Path(config.trace).absolute().parent)
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"--output-dir {folder} holds files that are not of a run; choose a new or empty folder")
    if not (replace or config.overwrite):
        _check_replaces_nothing(config, folder)


def _check_replaces_nothing(config: TrainConfig, folder: Path) -> None:
    """Raise ValueError where a run would replace what an earlier one left in its folder."""
    checkpoints, log, final = checkpoints_of(folder), folder / LOG_FILE, folder / FINAL_FOLDER
    if checkpoints and config.resume is None:
        raise ValueError(
            f"{checkpoints[0].folder} is of an earlier run; give --resume auto to continue it, or choose another"
            " --output-dir, or give --overwrite to replace that run"
        )
    if final.exists() and not (_continues(config, checkpoints) or _has_config(folder, config)):
        raise ValueError(
            f"{final} is the model of another run; choose another --output-dir or remove it, or give --overwrite"
        )
    if config.resume is None and log.is_file() and log.stat().st_size:
        raise ValueError(
            f"{log} is of an earlier run; choose another --output-dir, or give --overwrite to replace that run"
        )


def _continues(config: TrainConfig, checkpoints: Sequence[RunCheckpoint]) -> bool:
    """Whether a run goes on from a checkpoint of its own folder, whose model is then that of its own shorter self."""
    if config.resume is None or not checkpoints:
        return False
    return config.resume == AUTO or Path(config.resume).resolve().is_relative_to(config.run_folder.resolve())


def _has_config(folder: Path, config: TrainConfig) -> bool:
    """Tell whether a folder belongs to a run with the same options, however its file is written.

    A run that is resumed may have other budgets, and whatever else changes no bit.
    """
    try:
        found = TrainConfig.from_yaml((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        ignored = ("resume", "overwrite") if config.resume is None else SAME_RESULTS
        return dataclasses.replace(found, **{name: getattr(config, name) for name in ignored}) == config
    except ValueError:  # damaged, or with options that are gone
        return False


def _check_can_write(flag: str, folder: Path) -> None:
    """Raise ValueError when a folder can neither be written to nor be made."""
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"{flag} {folder} cannot be made: {nearest} is a file, not a folder; choose another path")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"{flag} {folder} cannot be written: no permission in {nearest}; choose another path")


def check_disk(config: TrainConfig, source: ModelSource) -> None:
    """Raise ValueError when what is to be written would not fit on the disk of the run folder.

    The trained model takes 4 bytes a parameter. With validation data the best model lies beside it, and a better one
    beside that until it takes its place. Two checkpoints, as the old one stays until the new one is
    durable, take the weights and states of trained parameters.
    """
    copies = 3 if config.validates else 1
    model = 4 * copies * source.spec.num_parameters if config.save else 0
    checkpoints = 0 if config.save_steps is None else 2 * _checkpoint_bytes(config, source)
    nearest = next(p for p in (config.run_folder, *config.run_folder.absolute().parents) if p.exists())
    flags = " and ".join([*["--save"][: bool(model)], *["--save-steps"][: bool(checkpoints)]])
    needed, free = model + checkpoints, shutil.disk_usage(nearest).free
    if free < needed:
        raise ValueError(
            f"{flags} needs up to {format_bytes(needed)} in {config.run_folder}, the disk has {format_bytes(free)}"
            " free; choose another --output-dir or free some space"
        )


def _checkpoint_bytes(config: TrainConfig, source: ModelSource) -> int:
    """Bytes of a checkpoint, as if every parameter were trained and a matrix."""
    numerics = config.numerics
    weight = {"split": 4, "beside": 6}.get(numerics.master) or ELEMENT_BYTES[numerics.compute]
    return round(source.spec.num_parameters * (weight + 2 * ELEMENT_BYTES[numerics.state]))


@contextlib.contextmanager
def started_run_folder(
    config: TrainConfig, planned: PlannedRun, records: Sequence[Mapping[str, Any]], replace: bool
) -> Iterator[None]:
    """Create the folder, hold it for this process, and write what is known before anything is loaded.

    records: what became of the records of each source, as JSON values.
    It is checked again, as another run may have used it since. With config.save it also tries whether the trained model
    can be written at the end. Raises: ValueError as `check_run_folder`.
    """
    if not config.writes_files:
        yield
        return
    config.run_folder.mkdir(parents=True, exist_ok=True)
    with held(config.run_folder):
        _check_contents(config, replace)
        if config.save:
            check_takes_files(config.run_folder / FINAL_FOLDER)
        if config.makes_checkpoints:
            check_takes_files(checkpoint_folder(config.run_folder, 0))
        if config.resume is None:
            remove_checkpoints(config.run_folder)
            (config.run_folder / EVAL_LOG_FILE).unlink(missing_ok=True)  # as the log of steps is replaced
        clean_up(config.run_folder)
        if not _continues(config, checkpoints_of(config.run_folder)):
            (config.run_folder / TRACE_FILE).unlink(missing_ok=True)
        write_text(config.run_folder / CONFIG_FILE, dataclasses.replace(config, resume=None, overwrite=False).to_yaml())
        (config.run_folder / DATA_FILE).unlink(missing_ok=True)
        if records:
            write_text(config.run_folder / DATA_FILE, json.dumps(list(records), indent=1, ensure_ascii=False) + "\n")
        write_plan(config, planned)
        yield


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes; the system lets go of it when this one ends, however it does.

    Raises: ValueError when another process holds it. A file system without locks holds nothing.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--output-dir {folder} is in use by another run; wait for its end, or choose another folder"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
                raise
        yield
    finally:
        os.close(descriptor)


def run_record(config: TrainConfig, num_steps: int) -> str:
    """Describe what made a model, as JSON: the steps, every option but for local places, what became of the records.

    It goes wherever the model goes, so models and data sets have their names, without the folders that they lie in.
    """
    kept = [option for name, option in options_of(TrainConfig).items() if name not in LOCAL_PLACES]
    options = {option.name: option.to_flag(getattr(config, option.name)) for option in kept}
    for name in NAMED_PLACES:
        value = options[name]
        is_list = isinstance(value, (list, tuple))
        options[name] = [without_folders(item) for item in value] if is_list else value and without_folders(value)
    options["trace"] = bool(options["trace"])  # or the file that it went to
    records: list[Any] = []
    with contextlib.suppress(OSError, ValueError):  # a run of an earlier version has no such file
        records = json.loads((config.run_folder / DATA_FILE).read_text(encoding="utf-8"))
    told = {"data": [_named(record) for record in records]} if records else {}
    return json.dumps({"steps": num_steps, "config": options, **told}, indent=1, ensure_ascii=False) + "\n"


def _named(record: dict[str, Any]) -> dict[str, Any]:
    """What became of the records of a source, without the folders that it lies in."""
    given = record["place"]
    place, name = given if "://" in given else str(Path(given)), without_folders(given)
    begins = (f"{place},", f"{place}/")  # of the file itself, or of one in the folder
    lines = [
        f"{name}{line.removeprefix(place)}" if line.startswith(begins) else line for line in record["first_bad_records"]
    ]
    return {**record, "place": name, "first_bad_records": lines}


def write_plan(config: TrainConfig, planned: PlannedRun) -> None:
    """Write the plan and the simulated step into the run folder, and the plan where --plan-json says."""
    if not config.writes_files:
        return
    write_text(config.run_folder / PLAN_FILE, planned.plan.to_json())
    write_text(config.run_folder / TIMELINE_FILE, planned.timeline())
    if config.plan_json:
        write_text(Path(config.plan_json), planned.plan.to_json())
