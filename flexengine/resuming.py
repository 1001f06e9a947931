"""Continues a run from a checkpoint: finds it, holds it against what is asked now, and puts everything back."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexengine.checkpoint.atomic import atomic_file
from flexengine.checkpoint.run_checkpoints import RunCheckpoint, checkpoints_of, is_whole, whole_checkpoints
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.checkpoint.state_files import read_description
from flexengine.config import EVAL_LOG_FILE, LOG_FILE, TrainConfig
from flexengine.options import flag_of, options_of
from flexengine.runtime.engine import Engine
from flexengine.training_data import TrainingData

logger = logging.getLogger(__name__)

AUTO = "auto"
SAME_RESULTS = (
    *("max_gpu_mem_gib", "max_host_mem_gib", "device", "recompute", "deterministic", "chunk_tokens", "round_tokens"),
    *("output_dir", "save", "save_steps", "save_total_limit", "resume", "overwrite", "dry_run", "plan_json", "logging"),
    *("trace", "trace_step", "profile_start_step", "profile_stop_step"),
    *("gpus", "transport", "round_multiple", "replan", "data_cache", "max_skipped_steps"),
)
"""Options that a resumed run may change without a word: they change no bit, or are pinned by the checkpoint."""


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from. engine and run: what its description says of both."""

    checkpoint: RunCheckpoint
    engine: dict[str, Any]
    run: dict[str, Any]

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


def resume_points(config: TrainConfig) -> list[ResumePoint]:
    """Find what --resume names, the best first: with auto all whole checkpoints of the run folder.

    Raises ValueError where a checkpoint that is named cannot be used.
    """
    if config.resume is None:
        return []
    if config.resume != AUTO:
        return [_point(_named(Path(config.resume)))]
    found: list[ResumePoint] = []
    whole = whole_checkpoints(config.run_folder)
    for checkpoint in checkpoints_of(config.run_folder):
        try:
            if checkpoint not in whole:
                raise CheckpointError(f"{checkpoint.folder} is not whole")
            found.append(_point(checkpoint))
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
    if not found:
        print(f"--resume auto: {config.run_folder} has no checkpoint, so the run starts from the beginning")
    return found


def _named(folder: Path) -> RunCheckpoint:
    """The checkpoint that a person named: itself, or the newest whole one of a run folder."""
    if not folder.is_dir():
        raise ValueError(
            f"--resume {folder}: there is no such folder; give auto, a run folder or its checkpoints/step-N"
        )
    whole = whole_checkpoints(folder)
    if whole:
        return whole[0]
    if not is_whole(folder):
        raise ValueError(
            f"--resume {folder} holds no whole checkpoint; give a run folder, or a folder checkpoints/step-N in it"
        )
    step = read_description(folder)["run"].get("step")
    if not isinstance(step, int):
        raise ValueError(f"--resume {folder} was not saved by a run of train, so its place in the data is unknown")
    return RunCheckpoint(step, folder)


def _point(checkpoint: RunCheckpoint) -> ResumePoint:
    found = read_description(checkpoint.folder)
    if found["run"].get("step") != checkpoint.step:
        raise CheckpointError(f"{checkpoint.folder} was saved at step {found['run'].get('step')}, not by this run")
    return ResumePoint(checkpoint, found["engine"], found["run"])


def check_same_data(point: ResumePoint, data: TrainingData, num_steps: int) -> None:
    """Raise ValueError unless the batches are those of the checkpoint's run and its steps are not beyond the end."""
    saved, found = point.run["data"], data.batches.fingerprint()
    if saved["fingerprint"] != found:
        raise ValueError(
            f"{point.checkpoint.folder} was saved on other data: give the same --dataset, --seed, --max-seq-len and"
            f" --max-global-batch-tokens, whose batches it is to continue (was {saved['fingerprint']}, is {found})"
        )
    if point.step > num_steps:
        raise ValueError(
            f"{point.checkpoint.folder} was saved after {point.step} steps, the run has {num_steps}; raise --steps or"
            " --epochs"
        )


def describe_resumption(point: ResumePoint, config: TrainConfig, num_steps: int) -> str:
    """Say where a run goes on, and which options differ from those of the run that saved the checkpoint."""
    text = f"resumed after step {point.step} of {num_steps} from {point.checkpoint.folder}"
    saved = point.run.get("options", {})
    differing = [
        f"{flag_of(name)} {saved[name]} -> {value}"
        for name, value in options_as_flags(config).items()
        if name in saved and saved[name] != value and name not in SAME_RESULTS
    ]
    return f"{text}\n  other options than before: {', '.join(differing)}" if differing else text


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


def cut_logs(run_folder: Path, step: int) -> None:
    """Remove the lines after a step from the logs of a run: those steps are taken again."""
    for path in (run_folder / LOG_FILE, run_folder / EVAL_LOG_FILE):
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if 0 < _step_of(line) <= step]
            with atomic_file(path, "w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in kept)


def _step_of(line: str) -> int:
    """The step of a line of the log; 0 for a line that was cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        return 0
