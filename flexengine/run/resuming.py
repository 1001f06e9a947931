"""Continues a run from a checkpoint: finds it, holds it against what is asked now, and puts everything back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexengine.checkpoint.atomic import atomic_file
from flexengine.checkpoint.manifest import manifest_path
from flexengine.checkpoint.run_checkpoints import RunCheckpoint, checkpoints_of, fault_of, whole_checkpoints
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.checkpoint.state_files import STATE_FILE, Fields, read_description
from flexengine.options.option import flag_of, options_of
from flexengine.options.train_config import TrainConfig
from flexengine.parallel.team import Team, is_first, told_by_first
from flexengine.plan import Request
from flexengine.run.state import LOGS, DataPlace, LogRecord, RunState
from flexengine.run.training_data import TrainingData
from flexengine.runtime.engine import Engine
from flexengine.runtime.ranks.saved_errors import are_taken

logger = logging.getLogger(__name__)

AUTO = "auto"
SAME_RESULTS = (
    *(
        "max_gpu_mem_gib",
        "max_host_mem_gib",
        "offload_dir",
        "max_disk_gib",
        "device",
        "recompute",
        "deterministic",
        "chunk_tokens",
        "round_tokens",
    ),
    *("output_dir", "save", "save_steps", "save_total_limit", "resume", "overwrite", "dry_run", "plan_json", "logging"),
    *("trace", "trace_step", "profile_start_step", "profile_stop_step"),
    *("gpus", "transport", "round_multiple", "replan", "data_cache", "max_skipped_steps", "verbose", "yes"),
    "generator",
)
"""Options that a resumed run may change without a word: they change no bit, or are pinned by the checkpoint."""


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from. engine and run: what its description says of both."""

    checkpoint: RunCheckpoint
    engine: dict[str, Any]
    run: RunState

    @property
    def step(self) -> int:
        """Steps that were taken."""
        return self.checkpoint.step

    def pinned(self, config: TrainConfig) -> TrainConfig:
        """The options with what sets the order of sums, as the checkpoint has it, unless given.

        It is the sizes of chunks and rounds, the number whose multiple rounds are, and the dtype of the sums.
        """
        multiple, saved = self.engine.get("round_multiple", 1), self.engine["numerics"]
        pinned = config if config.round_multiple is not None else replace(config, round_multiple=multiple)
        if config.grad_dtype is None and saved["compute"] == config.dtype:
            pinned = replace(pinned, grad_dtype=saved["grad"])
        if config.chunk_tokens is not None or config.round_tokens is not None:
            return pinned
        return replace(pinned, chunk_tokens=self.engine["chunk_tokens"], round_tokens=self.engine["round_tokens"])


POINT_RECORDS = (ResumePoint, RunCheckpoint, RunState, DataPlace, LogRecord)
"""The classes of named tuples and dataclasses in a ResumePoint."""


def resume_points(config: TrainConfig) -> list[ResumePoint]:
    """Find what --resume names, the best first: with auto all whole checkpoints of the run folder.

    Raises ValueError where a checkpoint that is named cannot be used.
    """
    if config.resume is None:
        return []
    if config.resume != AUTO:
        return [_point(_named(Path(config.resume)))]
    found: list[ResumePoint] = []
    for checkpoint in checkpoints_of(config.run_folder):
        try:
            if fault := fault_of(checkpoint.folder):
                raise CheckpointError(f"{checkpoint.folder} is not whole: {fault}")
            found.append(_point(checkpoint))
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
    if not found:
        print(f"--resume auto: {config.run_folder} has no checkpoint, so the run starts from the beginning")
    return found


def seen_by_all(team: Team | None, find: Callable[[], list[ResumePoint]]) -> list[ResumePoint]:
    """The checkpoints that rank 0 finds, which all nodes read alike, as each may have a disk of its own.

    Raises: ValueError unless the best one is among them, as going on with an older one would lose it.
    """
    points = told_by_first(team, find, *POINT_RECORDS)
    if team is None or team.ranks.nodes == 1 or not points:
        return points
    paths = [manifest_path(point.checkpoint.folder) for point in points]
    seals = team.control.gather([path.read_text() if path.is_file() else "" for path in paths])
    with team.control.all_or_none():
        others = [(rank, found[0]) for rank, found in enumerate(seals) if found[0] != seals[0][0]]
        if others and is_first(team):
            (rank, seal), folder = others[0], points[0].checkpoint.folder
            found = f"another {folder} than rank 0" if seal else f"no {folder}, which rank 0 has"
            raise ValueError(
                f"rank {rank} finds {found}; all nodes read a checkpoint, so give an --output-dir that they share, or"
                " copy the folder to each"
            )
    return [point for point, *found in zip(points, *seals, strict=True) if len(set(found)) == 1]


def saved_date(config: TrainConfig) -> str | None:
    """Find the day that chat templates saw in the run which --resume names; None where there is none yet.

    A run whose checkpoints cannot be read is told of later.
    """
    if config.resume is None:
        return None
    try:
        folder = config.run_folder if config.resume == AUTO else Path(config.resume)
        found = whole_checkpoints(folder)
        return read_description(found[0].folder if found else folder)["run"].get("options", {}).get("template_date")
    except (ValueError, OSError, AttributeError):
        return None


def _named(folder: Path) -> RunCheckpoint:
    """The checkpoint that a person named: itself, or the newest whole one of a run folder."""
    if not folder.is_dir():
        raise ValueError(
            f"--resume {folder}: there is no such folder; give auto, a run folder or its checkpoints/step-N"
        )
    whole = whole_checkpoints(folder)
    if whole:
        return whole[0]
    if fault := fault_of(folder):
        raise ValueError(
            f"--resume {folder} holds no whole checkpoint ({fault}); give a run folder, or a folder checkpoints/step-N"
            " in it"
        )
    found = read_description(folder)["run"]
    if "step" not in found:
        raise ValueError(f"--resume {folder} was not saved by a run of train, so its place in the data is unknown")
    return RunCheckpoint(Fields(found, f"{folder / STATE_FILE}, run").whole("step"), folder)


def _point(checkpoint: RunCheckpoint) -> ResumePoint:
    found = read_description(checkpoint.folder)
    where = f"{checkpoint.folder / STATE_FILE}, run"
    if Fields(found["run"], where).whole("step") != checkpoint.step:
        raise CheckpointError(f"{checkpoint.folder} was saved at step {found['run']['step']}, not by this run")
    run = RunState.from_json(found["run"], where)
    if found["engine"]["step_count"] > run.step * (run.options.get("num_iterations") or 1):
        updates = found["engine"]["step_count"]
        raise CheckpointError(f"{where}: step is {run.step}, but its engine has made {updates} updates; resume another")
    return ResumePoint(checkpoint, found["engine"], run)


def check_same_data(point: ResumePoint, data: TrainingData, num_steps: int) -> None:
    """Raise ValueError unless the batches are those of the checkpoint's run and its steps are not beyond the end."""
    saved, found = point.run.data, data.batches.fingerprint()
    if saved.fingerprint != found:
        raise ValueError(
            f"{point.checkpoint.folder} was saved on other data: give the same --dataset, --seed, --max-seq-len and"
            f" --max-global-batch-tokens, whose batches it is to continue (was {saved.fingerprint}, is {found})"
        )
    if point.step > num_steps:
        raise ValueError(
            f"{point.checkpoint.folder} was saved after {point.step} steps, the run has {num_steps}; raise --steps or"
            " --epochs"
        )
    place = data.batches.cursor(point.step)
    if (saved.epoch, saved.position) != place:
        raise CheckpointError(
            f"{point.checkpoint.folder} stands at epoch {saved.epoch}, batch {saved.position} of the data, where step"
            f" {point.step} of this data stands at epoch {place[0]}, batch {place[1]}; resume another"
        )


def describe_resumption(point: ResumePoint, config: TrainConfig, num_steps: int, request: Request) -> str:
    """Say where a run goes on, what differs from the run that saved the checkpoint, and what of it is lost."""
    text = f"resumed after step {point.step} of {num_steps} from {point.checkpoint.folder}"
    differing, saved = differing_options(point, config), point.engine.get("exchange")
    nodes = point.engine.get("nodes", request.nodes)
    if nodes != request.nodes:
        text += f"\n  nodes that add up gradients: {nodes} -> {request.nodes}, which changes last bits"
    if saved is not None and not are_taken(point.engine, request):
        now = f"{request.nodes} exchange {request.exchanged}" if request.nodes > 1 else "one exchanges nothing"
        text += f"\n  dropped: what {saved['nodes']} nodes had lost of gradients to {saved['sent']} in the last step;"
        text += f" now {now}"
    return f"{text}\n  other options than before: {differing}" if differing else text


def differing_options(point: ResumePoint, config: TrainConfig) -> str:
    """Which options that may change results differ from those of the checkpoint's run; empty where none do."""
    saved = point.run.options
    return ", ".join(
        f"{flag_of(name)} {_as_given(saved[name])} -> {_as_given(value)}"
        for name, value in options_as_flags(config).items()
        if name in saved and saved[name] != value and name not in SAME_RESULTS
    )


def _as_given(value: Any) -> Any:
    return "not given" if value is None else value


def options_as_flags(config: TrainConfig) -> dict[str, Any]:
    """Every option as a flag has it, as JSON values."""
    values = {name: option.to_flag(getattr(config, name)) for name, option in options_of(TrainConfig).items()}
    return json.loads(json.dumps(values))


def load_point(engine: Engine, points: list[ResumePoint]) -> ResumePoint:
    """Put the first checkpoint that is not damaged into the engine; raises CheckpointError when all are."""
    for number, point in enumerate(points):
        try:
            engine.load_checkpoint(point.checkpoint.folder)
        except CheckpointError as error:
            if number + 1 == len(points):
                raise
            logger.warning("%s\n  going on with an older checkpoint", error)
        else:
            return point
    raise AssertionError("there is at least one")


def cut_logs(run_folder: Path, point: ResumePoint) -> None:
    """Remove what came after a checkpoint from the logs of a run: those steps are taken again.

    A log that is not what the run had written when it saved is said, and keeps the lines whose steps can be read.
    """
    saved = point.run.logs if point.checkpoint.folder.resolve().is_relative_to(run_folder.resolve()) else {}
    for path in (run_folder / name for name in LOGS if (run_folder / name).is_file()):
        found = path.read_bytes()
        kept = saved[path.name].kept_of(found) if path.name in saved else None
        if kept is None:
            lines = found.splitlines(keepends=True)
            kept = b"".join(line for line in lines if line.endswith(b"\n") and 0 < _step_of(line) <= point.step)
            if path.name in saved:
                logger.warning(
                    "%s is not what the run had written up to step %d: it was changed or damaged since. %d of its %d"
                    " lines are kept; the run goes on, as nothing is computed from them",
                    path, point.step, kept.count(b"\n"), len(lines),
                )  # fmt: skip
        with atomic_file(path) as file:
            file.write(kept)


def _step_of(line: bytes) -> int:
    """The step of a line of the log; 0 for a line that was cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return 0
