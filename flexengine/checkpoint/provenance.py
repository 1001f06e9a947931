"""What the manifests of exports and checkpoints say of their making: the plan, the model beneath, its revision."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flexengine.checkpoint.atomic import sha256_of
from flexengine.checkpoint.layout import ADAPTER_CONFIG, CONFIG_FILE
from flexengine.checkpoint.manifest import FOLDER_MANIFEST, manifest_path, read_manifest

_HUB_CACHE = re.compile(r"models--(?P<repo>.+)/snapshots/(?P<revision>[0-9a-f]{40})")
"""The end of a folder's path in the cache of huggingface_hub, which names repository and commit."""


def hub_place(folder: Path) -> tuple[str, str] | None:
    """The repository and commit of a folder in the cache of huggingface_hub; None for one elsewhere."""
    cached = _HUB_CACHE.search(folder.resolve().as_posix())
    return None if cached is None else (cached["repo"].replace("--", "/"), cached["revision"])


def base_of(folder: Path | None, name: str) -> dict[str, Any]:
    """Name the model or adapter in a folder that a run begins with, by what others can look up; no local path.

    folder: None for a model with random weights, of which there is the name alone. Repository and commit come from the
    manifest of a download, or from the folder's place in the hub's cache.
    Raises: ValueError where the manifest is damaged.
    """
    if folder is None:
        return {"name": name}
    found: dict[str, Any] = {"name": folder.resolve().name}
    if manifest_path(folder).is_file():
        manifest = read_manifest(folder)
        found |= {key: manifest[key] for key in ("repo", "revision") if key in manifest}
        found["manifest_sha256"] = sha256_of(folder / FOLDER_MANIFEST)
    elif cached := hub_place(folder):
        found |= {"name": cached[0], "repo": cached[0], "revision": cached[1]}
    configs = [folder / file for file in (CONFIG_FILE, ADAPTER_CONFIG) if (folder / file).is_file()]
    return {**found, "config_sha256": sha256_of(configs[0])} if configs else found


def beneath(folder: Path | None, name: str, adapter: Path | None) -> dict[str, Any]:
    """Name what a run begins with: the base, and the adapter that it goes on from if there is one."""
    return {"base": base_of(folder, name), **({} if adapter is None else {"adapter": base_of(adapter, adapter.name)})}


def made_by(
    kind: Literal["export", "checkpoint"], plan_json: str, num_steps: int, made_from: Mapping[str, Any]
) -> dict[str, Any]:
    """What a manifest says beside its files. plan_json: as plan.json of a run folder, whose SHA-256 this gives."""
    digest = hashlib.sha256(f"{plan_json.removesuffix(chr(10))}\n".encode()).hexdigest()
    return {"source": kind, "made_from": {"steps": num_steps, "plan_sha256": digest, **made_from}}
