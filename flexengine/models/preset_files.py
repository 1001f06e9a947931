"""Where the shapes of published models lie, and their names; imports nothing, so that help is quick."""

from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "assets"
PRESET_PREFIX = "preset:"


def preset_names() -> list[str]:
    """List the names that may follow `preset:`."""
    return ["demo", *sorted(path.stem for path in (ASSETS / "presets").glob("*.json"))]
