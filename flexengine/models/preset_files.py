"""Where the shapes of published models lie, and their names; imports nothing, so that help is quick."""

import re
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "assets"
PRESET_PREFIX = "preset:"
_OF_TUNED = re.compile(r"^meta-|-(instruct|it|chat|base|hf|v\d\.\d)(?=-|$)")
"""What names of checkpoints have beside the name of their shape."""


def preset_names() -> list[str]:
    """List the names that may follow `preset:`."""
    return ["demo", *sorted(path.stem for path in (ASSETS / "presets").glob("*.json"))]


def preset_of(name: str) -> str | None:
    """Find the preset that has the shape of a checkpoint, such as that of Meta-Llama-3-8B-Instruct; None for none."""
    names = preset_names()
    return next((found for found in (name, _OF_TUNED.sub("", name.lower())) if found in names), None)
