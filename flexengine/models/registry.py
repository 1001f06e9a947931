"""From what a person names (a folder or preset:NAME) to a ModelSpec. The one place that knows which families exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flexengine.models import llama
from flexengine.models.spec import ModelSpec

FAMILIES: dict[str, Callable[[str, dict], ModelSpec]] = {"llama": llama.build}
"""Hugging Face `model_type` -> builder."""

ASSETS = Path(__file__).resolve().parent.parent / "assets"
PRESET_PREFIX = "preset:"


class ModelSource(NamedTuple):
    """Where a model comes from: its description, its folder of weights (None: random initial weights) and of support
    files such as the tokenizer (None: there are none)."""

    spec: ModelSpec
    weights_folder: Path | None
    support_folder: Path | None


def preset_names() -> list[str]:
    """Names that follow `preset:`."""
    return ["demo", *sorted(p.stem for p in (ASSETS / "presets").glob("*.json"))]


def build_model(name: str, config: dict) -> ModelSpec:
    """The ModelSpec of a Hugging Face config. Raises ValueError when the family is unknown or a field is missing."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{name}: model_type {family!r} in config.json is not supported; known: {', '.join(FAMILIES)}")
    try:
        return FAMILIES[family](name, config)
    except KeyError as missing:
        raise ValueError(f"{name}: config.json lacks the field {missing} that model_type {family!r} needs") from None
    except TypeError as error:
        raise ValueError(f"{name}: a field of config.json has no usable value: {error}") from None


def open_model(path_or_preset: str | Path) -> ModelSource:
    """Read the description of a Hugging Face folder or of a preset. Loads no weights.

    Raises ValueError when there is no such preset or folder, when config.json is missing or unreadable, or when the
    folder has no safetensors weights.
    """
    text = str(path_or_preset)
    if text.startswith(PRESET_PREFIX):
        return _open_preset(text.removeprefix(PRESET_PREFIX))
    folder = Path(text)
    config = _read_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"model folder {folder} has a config.json but no *.safetensors file; download the weights first"
        )
    return ModelSource(build_model(folder.name, config), folder, folder)


def _open_preset(name: str) -> ModelSource:
    if name == "demo":
        return ModelSource(build_model("demo", _read_config(ASSETS / "demo")), None, ASSETS / "demo")
    path = ASSETS / "presets" / f"{name}.json"
    if name not in preset_names():
        raise ValueError(f"unknown preset {name!r}; known presets: {', '.join(preset_names())}")
    return ModelSource(build_model(name, json.loads(path.read_text())), None, None)


def _read_config(folder: Path) -> dict:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model {folder}: no such folder or no config.json in it; give a Hugging Face model folder"
            f" (python download.py model ORG/NAME --target DIR) or {PRESET_PREFIX}NAME"
        )
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
