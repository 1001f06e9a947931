"""What a person names to talk to: a run, a model or an adapter, each found by the files in its folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from flexengine.checkpoint.layout import ADAPTER_CONFIG
from flexengine.checkpoint.layout import CONFIG_FILE as MODEL_CONFIG
from flexengine.options.train_config import BEST_FOLDER, CONFIG_FILE, FINAL_FOLDER, TrainConfig
from flexengine.wording import hub_model

MODEL_HELP = (
    "folder of a run, a model or an adapter (which finds its base), FILE.gguf, an id on the hub (ORG/NAME), or"
    " preset:NAME (required; --model M means the same)"
)


class Place(NamedTuple):
    """A model, and the adapter that is used on it."""

    model: str
    adapter: str | None = None


def find_place(named: str, adapter: str | None = None) -> Place:
    """Find the model, and the adapter on it, that a person named; adapter: one that was named beside it.

    Of a run it is final/, what the run saved at its end. An adapter's base is what adapter_config.json names, or, of an
    adapter in a run folder, the model of that run.
    Raises: ValueError where nothing is named, a run has saved no model, or an adapter's base is not to be found.
    """
    if not named:
        raise ValueError("nothing is named to load; give a run, a model or an adapter")
    folder = Path(named)
    if is_run(folder):
        folder = folder / FINAL_FOLDER
        if not ((folder / MODEL_CONFIG).is_file() or (folder / ADAPTER_CONFIG).is_file()):
            raise ValueError(
                f"the run {named} has no {FINAL_FOLDER}/, which `train --save` writes at its end; make a model of its"
                f" checkpoint: flexengine export --run {named}"
            )
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / MODEL_CONFIG).is_file():
        if adapter is not None:
            raise ValueError(f"{named} is an adapter, and --adapter {adapter} another one; name one of them")
        return Place(_base_of(folder), str(folder))
    return Place(str(folder) if folder.exists() else named, adapter)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Have a command take what it is about, as its first word or by --model."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="RUN | MODEL | ADAPTER", help=MODEL_HELP)
    parser.add_argument("--model", default="", dest="model", help=argparse.SUPPRESS)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run of `train`."""
    return (folder / CONFIG_FILE).is_file() and not (folder / MODEL_CONFIG).is_file()


def _base_of(folder: Path) -> str:
    """The model beneath an adapter."""
    run = folder.resolve().parent
    if folder.resolve().name in (FINAL_FOLDER, BEST_FOLDER) and is_run(run):
        return TrainConfig.from_yaml((run / CONFIG_FILE).read_text(encoding="utf-8")).model
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if isinstance(base, str) and base:
        # Adapters name no folder of the machine that made them, so theirs is looked for here and beside them.
        beside = (place for place in (Path(base), folder.resolve().parent / base) if _is_base(place, folder))
        if (found := next(beside, None)) is not None:
            return str(found)
        if hub_model(base):
            return base
    raise ValueError(
        f"the base of the adapter {folder} is not to be found: {ADAPTER_CONFIG} names {base or 'none'}; give"
        f" --model BASE --adapter {folder}"
    )


def _is_base(place: Path, adapter: Path) -> bool:
    """Whether a folder holds the model that an adapter was trained on, as far as the adapter's manifest tells."""
    from flexengine.checkpoint.atomic import sha256_of  # noqa: PLC0415, loads torch
    from flexengine.checkpoint.manifest import manifest_path, read_manifest  # noqa: PLC0415

    if not (place / MODEL_CONFIG).is_file():
        return False
    if not manifest_path(adapter).is_file():
        return True
    base = read_manifest(adapter).get("made_from", {}).get("base", {})
    found = sha256_of(place / MODEL_CONFIG)
    return base.get("config_sha256", found) == found
