"""`flexengine verify`: is a download, an export or a checkpoint what its manifest says, byte for byte?

Of a run folder it looks at all that is in it: the checkpoints, the trained model and the best one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexengine.checkpoint.manifest import ManifestError, accept, compare, listed, manifest_path, read_manifest
from flexengine.checkpoint.run_checkpoints import checkpoints_of
from flexengine.options.train_config import BEST_FOLDER, FINAL_FOLDER
from flexengine.wording import FlagParser


def main(argv: Sequence[str]) -> int:
    """Compare what a command line names with its manifests; returns the exit status 0.

    Raises: ValueError naming every file that is missing, altered or not listed, and what has no manifest.
    """
    arguments = _parser().parse_args(argv)
    wrong = [text for target in _targets(arguments.folder) if (text := _verify(target, arguments.accept))]
    if wrong:
        raise ValueError("\n".join(wrong))
    return 0


def _verify(target: Path, accepted: bool) -> str:
    """Print that a target is as it was written, or what is taken into its manifest; returns what is wrong."""
    try:
        problems = accept(target) if accepted else compare(target)
    except ManifestError as error:
        return str(error)
    name, manifest = manifest_path(target).name, read_manifest(target)
    if problems and not accepted:
        return f"{target}: {len(problems)} files differ from {name}:{listed(problems)}\n{_remedy(target, manifest)}"
    what = f"accepted as they are:{listed(problems)}" if problems else "as the manifest says"
    print(f"{target}: {len(manifest['files'])} files {what}{_origin(manifest)}")
    return ""


def _remedy(target: Path, manifest: Mapping[str, Any]) -> str:
    if manifest.get("source") == "checkpoint":
        return "Resume another checkpoint of the run."
    again = "Download it" if "repo" in manifest else "Export it"
    return f"{again} again; if the files were changed on purpose: flexengine verify --accept {target}"


def _origin(manifest: Mapping[str, Any]) -> str:
    """Where the files came from, a line for each thing that the manifest says of it."""
    facts = {key: manifest[key] for key in ("flexengine", "repo", "revision", "accepted") if key in manifest}
    facts |= manifest.get("made_from", {})
    return listed(f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in facts.items())


def _targets(folder: Path) -> list[Path]:
    """What has a manifest of its own: the target, or what a run folder holds. Raises: ValueError where nothing has."""
    if not folder.exists():
        raise ValueError(f"{folder}: there is no such file or folder")
    if manifest_path(folder).is_file():
        return [folder]
    models = [folder / name for name in (FINAL_FOLDER, BEST_FOLDER) if (folder / name).is_dir()]
    found = [*models, *(checkpoint.folder for checkpoint in checkpoints_of(folder))]
    if not found:
        raise ValueError(
            f"{folder} has no {manifest_path(folder).name}, so there is nothing to compare it with; give a folder that"
            " flexengine downloaded, exported or saved, a data set that it downloaded, or a run folder"
        )
    return found


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="flexengine verify",
        description="Compares every file of a download, an export or a checkpoint with the sizes and SHA-256 of its"
        " manifest, and names each that is missing, altered or not listed. Exit status: 0 all is as it was written, 2"
        " it is not.",
    )
    parser.add_argument("folder", type=Path, help="a folder with a manifest, a downloaded .jsonl file, or a run folder")
    parser.add_argument(
        "--accept",
        action="store_true",
        help="take the files as they are into the manifest, as after a change by hand; not for checkpoints",
    )
    return parser
