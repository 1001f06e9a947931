"""Runs the code that a model folder brings, where a person has asked for it.

Its classes join transformers' own mappings, for this process, and the model is of a type that transformers has then.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from flexengine.wording import shown

logger = logging.getLogger(__name__)

FLAG = "--trust-remote-code (in Python trust_remote_code=True)"
NEEDED = ("AutoConfig", "AutoModelForCausalLM")
_announced: set[str] = set()
_digests: dict[str, str] = {}
"""Of the code that this process runs, by model_type."""


def digest_of_code(family: str | None) -> str:
    """What identifies the code from a folder that computes models of a type; empty where no such code runs."""
    return _digests.get(family or "", "")


def module_files(config: dict[str, Any]) -> list[str]:
    """The files that a config names for the model itself."""
    named = config.get("auto_map")
    modules = [str(named[kind]).rpartition(".")[0] for kind in NEEDED if kind in named] if type(named) is dict else []
    return [f"{module}.py" for module in dict.fromkeys(modules)]


def not_trusted(name: str, config: dict[str, Any]) -> ValueError:
    """Make the error for a model whose code nobody has asked to run."""
    files = ", ".join(module_files(config)) or "unnamed"
    return ValueError(
        f"{name}: its folder brings code of its own (auto_map in config.json: {files}), which is not run unasked. Read"
        f" it, and give {FLAG} to train, plan or check if you trust it, or give a model of a type that transformers has"
    )


def trust(name: str, folder: Path, config: dict[str, Any]) -> None:
    """Run the code in `folder` that the config of a model names, and say so.

    Raises: ValueError for code that is missing, in another repository, or does not load.
    """
    refuse_without_code(name, folder, config)
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415, takes seconds, and few need it
    from transformers.dynamic_module_utils import get_class_from_dynamic_module  # noqa: PLC0415

    family, files = config["model_type"], module_files(config)
    digest = _digest(folder)
    brought = f"{', '.join(files)} of {_place(folder, digest)}"
    if brought not in _announced:
        logger.warning("%s: runs code that is not flexengine's: %s", name, brought)
        _announced.add(brought)
    try:
        kind, model = (get_class_from_dynamic_module(config["auto_map"][own], str(folder)) for own in NEEDED)
        AutoConfig.register(family, kind, exist_ok=True)
        AutoModelForCausalLM.register(kind, model, exist_ok=True)
    except Exception as error:  # whatever a stranger's code raises
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{name}: the code of its folder ({', '.join(files)}) does not load here: {why}") from error
    _digests[family] = digest


def refuse_without_code(name: str, folder: Path, config: dict[str, Any]) -> None:
    """Raise ValueError where a folder has not all the code that its config names."""
    named = config["auto_map"]
    missing = [kind for kind in NEEDED if not isinstance(named, dict) or not isinstance(named.get(kind), str)]
    if missing:
        raise ValueError(
            f"{name}: auto_map in config.json names no {missing[0]}; it takes code of {' and '.join(NEEDED)} to train"
        )
    elsewhere = [file for file in module_files(config) if "--" in file]
    if elsewhere:
        raise ValueError(
            f"{name}: auto_map in config.json names code of another repository ({shown(elsewhere[0])}), which is never"
            " run; copy its files into a folder of the model's own, and name them there"
        )
    if absent := [file for file in module_files(config) if not (folder / file).is_file()]:
        raise ValueError(
            f"{name}: auto_map in config.json names {shown(absent[0])}, which {folder} lacks; fetch it again"
        )


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _place(folder: Path, digest: str) -> str:
    """Which code a folder holds: the repository and commit of the hub's cache, or the folder and its files' digest."""
    parts = folder.parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return f"{parts[-3].removeprefix('models--').replace('--', '/')} at commit {parts[-1]}"
    return f"{folder} (SHA-256 of its code {digest}...)"
