"""`flexengine models`: lists the families that can be trained, what each was compared with, and the presets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from flexengine.commands.parsers import models_parser
from flexengine.models.outside import load_families
from flexengine.models.registry import FAMILIES, PRESET_PREFIX, open_model, preset_names
from flexengine.reports.text_format import align_columns

COMPARED = "losses, gradients, logits and exports equal those of transformers; tiny configs compared: {count}"

OUTSIDE = "not compared with transformers here"


def main(argv: Sequence[str]) -> int:
    """Print families and presets; returns the exit status."""
    arguments = models_parser().parse_args(argv)
    load_families()
    print(json.dumps(as_json(), indent=2) if arguments.json else "\n".join(describe()))
    return 0


def as_json() -> dict[str, object]:
    """Give families by `model_type`, and presets, as JSON values."""
    families = {
        name: {"checkpoints": f.checkpoints, "options": f.options, "configs_compared": f.configs_compared}
        for name, f in FAMILIES.items()
    }
    presets = {name: {"model_type": family, "parameters": count} for name, family, count in _presets()}
    return {"families": families, "presets": presets}


def describe() -> list[str]:
    """Give the lines to print."""
    lines = ["Families, by model_type in config.json:", ""]
    for name, family in FAMILIES.items():
        lines += [
            f"{name}: {family.checkpoints}",
            *([f"    {family.options}"] if family.options else []),
            f"    {OUTSIDE if family.outside else COMPARED.format(count=family.configs_compared)}",
        ]
    rows = [(PRESET_PREFIX + name, family, _billions(count)) for name, family, count in _presets()]
    rows.insert(0, ("preset", "model_type", "parameters"))
    return [*lines, "", "Presets, shapes without weights, for --model:", "", *align_columns(rows, left=(0, 1))]


def _presets() -> Iterator[tuple[str, str, int]]:
    """Give (name, family, parameters) of every preset."""
    # A description of billions of parameters takes milliseconds: no weights are read.
    for name in preset_names():
        spec = open_model(PRESET_PREFIX + name).spec
        yield name, spec.family, spec.num_parameters


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 10**9 else f"{count / 1e6:.1f} M"
