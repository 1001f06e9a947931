"""Names of the files of a run's checkpoint, and its description, which is compared and checked before it is used."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexengine.checkpoint.manifest import ManifestError, check_files, manifest_path, read_manifest
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.wording import parse_json, shown

STATE_INDEX_FILE = "state.safetensors.index.json"
STATE_FILE = "checkpoint.json"
"""What a checkpoint holds beside tensors: the steps taken, the optimizer's options, where the data stands."""
FORMAT_VERSION = 1
DAMAGED = "The checkpoint is damaged; resume another."


class Fields:
    """The values of a JSON object out of a checkpoint, each checked when it is asked for.

    where: names the object in messages. All raise CheckpointError for what is missing or of another type.
    """

    def __init__(self, values: object, where: str) -> None:
        self.where = where
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"{where} is {shown(values)}, expected an object of fields; resume another checkpoint"
            )
        self.values = values

    def whole(self, name: str, least: int = 0) -> int:
        """A whole number from `least` on."""
        value = self.values.get(name)
        if type(value) is not int or value < least:
            raise self._wrong(name, f"a whole number from {least}")
        return value

    def wholes(self, name: str) -> list[int]:
        """A list of whole numbers from 0 on."""
        value = self.values.get(name)
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            raise self._wrong(name, "a list of whole numbers from 0")
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(name, "a finite number")
        return value

    def power_of_two(self, name: str) -> float:
        """A power of two."""
        value = self.number(name)
        if math.frexp(value)[0] != 0.5:
            raise self._wrong(name, "a power of two")
        return value

    def text(self, name: str) -> str:
        """A text that is not empty."""
        value = self.values.get(name)
        if not isinstance(value, str) or not value:
            raise self._wrong(name, "a text")
        return value

    def fields(self, name: str) -> Fields:
        """An object."""
        return Fields(self.values.get(name), f"{self.where}, {name}")

    def _wrong(self, name: str, expected: str) -> CheckpointError:
        found = shown(self.values[name]) if name in self.values else "missing"
        return CheckpointError(f"{self.where}: {name} is {found}, expected {expected}; resume another checkpoint")


def read_description(folder: Path | str) -> dict[str, Any]:
    """Read the description of a checkpoint: `engine`, checked field by field, and `run`, which is the caller's.

    Before anything is made of them, it and the index of the tensors are compared with the manifest.
    Raises: CheckpointError when there is none, it is damaged, or of another format.
    """
    folder = Path(folder)
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder}: no checkpoint of a run (no {STATE_FILE}); give a folder checkpoints/step-N")
    try:
        _compare(folder)
        found = parse_json(path.read_bytes(), path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {shown(version)}, and this flexengine reads {FORMAT_VERSION}")
    described = Fields(found, str(path))
    _check_engine(described.fields("engine"))
    described.fields("run")
    return found


def _compare(folder: Path) -> None:
    if not manifest_path(folder).is_file():
        raise ManifestError(f"{folder} has no {manifest_path(folder).name}, so its files cannot be checked. {DAMAGED}")
    names = (STATE_FILE, STATE_INDEX_FILE)
    unlisted = [name for name in names if name not in read_manifest(folder)["files"]]
    if unlisted:
        raise ManifestError(f"{manifest_path(folder)} does not list {unlisted[0]}. {DAMAGED}")
    check_files(folder, names, threading.Event(), DAMAGED)


def _check_engine(engine: Fields) -> None:
    """Raise CheckpointError unless the engine's part has every field, of its type."""
    engine.text("model")
    engine.fields("optimizer").text("name")
    if engine.fields("numerics").values.get("compute") == "float16":
        scale = engine.fields("loss_scale")
        scale.power_of_two("scale")
        scale.whole("good_steps")
    for name, least in {"step_count": 0, "seed": 0, "chunk_tokens": 1, "round_tokens": 1}.items():
        engine.whole(name, least)
    for name in ("round_multiple", "nodes"):
        if name in engine.values:
            engine.whole(name, 1)
    if "exchange" in engine.values:
        exchange = engine.fields("exchange")
        exchange.text("sent")
        exchange.whole("nodes", 2)
        exchange.number("weight")
        exchange.number("usual")
    if engine.values.get("lora") is not None:
        engine.fields("lora").whole("rank", 1)
        engine.fields("lora").number("scale")
