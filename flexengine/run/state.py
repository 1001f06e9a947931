"""What a checkpoint holds of a run beside its engine: where it stands in its steps, its data, its options and logs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.checkpoint.state_files import Fields
from flexengine.options.train_config import EVAL_LOG_FILE, LOG_FILE

LOGS = (LOG_FILE, EVAL_LOG_FILE)


@dataclass(frozen=True)
class DataPlace:
    """Where a run stands in its data: the epoch of the next batch, its number there, and what decides all batches."""

    epoch: int
    position: int
    seed: int
    fingerprint: str


@dataclass(frozen=True)
class LogRecord:
    """A log as it was when a checkpoint was saved."""

    num_bytes: int
    sha256: str

    @staticmethod
    def of(contents: bytes) -> LogRecord:
        """That of a log with these contents."""
        return LogRecord(len(contents), hashlib.sha256(contents).hexdigest())

    def kept_of(self, contents: bytes) -> bytes | None:
        """What a log held when this was recorded; None where it is not the beginning of what it holds now."""
        kept = contents[: self.num_bytes]
        is_same = LogRecord.of(kept) == self and (not kept or kept.endswith(b"\n"))  # a full disk may have cut a line
        return kept if is_same else None


@dataclass(frozen=True)
class RunState:
    """The state of a run after `step` of `num_steps` steps.

    loss_sum, num_tokens: over all steps so far. options: every option as a flag has it. logs: by file name. parts: what
    followers of the run found, by name, each in its own form.
    """

    step: int
    num_steps: int
    data: DataPlace
    loss_sum: float
    num_tokens: int
    options: Mapping[str, Any]
    logs: Mapping[str, LogRecord] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` gives it back."""
        values = asdict(self)
        return {**{name: value for name, value in values.items() if name != "parts"}, **values["parts"]}

    @staticmethod
    def from_json(values: object, where: str) -> RunState:
        """The state out of a checkpoint's description, field by field. where: names it in messages.

        Raises: CheckpointError for a field that is missing or cannot be.
        """
        found = Fields(values, where)
        data, logs = found.fields("data"), found.fields("logs") if "logs" in found.values else Fields({}, where)
        own = RunState.__dataclass_fields__
        state = RunState(
            step=found.whole("step"),
            num_steps=found.whole("num_steps"),
            data=DataPlace(data.whole("epoch"), data.whole("position"), data.whole("seed"), data.text("fingerprint")),
            loss_sum=found.number("loss_sum"),
            num_tokens=found.whole("num_tokens"),
            options=found.fields("options").values,
            logs={name: _log(logs.fields(name)) for name in logs.values},
            parts={name: value for name, value in found.values.items() if name not in own},
        )
        if state.step > state.num_steps:
            raise CheckpointError(f"{where}: step is {state.step} of {state.num_steps}; resume another checkpoint")
        return state


def _log(found: Fields) -> LogRecord:
    return LogRecord(found.whole("num_bytes"), found.text("sha256"))


def record_logs(run_folder: Path) -> dict[str, LogRecord]:
    """The logs of a run as they are now."""
    return {name: LogRecord.of((run_folder / name).read_bytes()) for name in LOGS if (run_folder / name).is_file()}
