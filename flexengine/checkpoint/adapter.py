"""Adapter folders as PEFT writes them: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flexengine.checkpoint.adapter_config import ADAPTER_WEIGHTS
from flexengine.checkpoint.atomic import sha256_of
from flexengine.checkpoint.layout import ADAPTER_CONFIG, RUN_FILE
from flexengine.checkpoint.manifest import FOLDER_MANIFEST, FileRecord, check_files, manifest_text
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.checkpoint.staged_folder import staged_folder


def save_adapter(
    folder: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    beside: Mapping[str, Path | str],
    made_by: Mapping[str, Any],
) -> None:
    """Write an adapter folder with its manifest, all files of it at once or none.

    beside: further files by name: one to copy, or a text. made_by: what the manifest says beside the files.
    Raises: OSError; nothing is left behind then.
    """
    with staged_folder(Path(folder)) as staged:
        staged.drop({RUN_FILE})  # that of an earlier run
        weights = staged.stage(ADAPTER_WEIGHTS)
        save_file(dict(tensors), weights, metadata={"format": "pt"})
        records = {ADAPTER_WEIGHTS: FileRecord(weights.stat().st_size, sha256_of(weights))}
        texts: dict[str, Path | str] = {ADAPTER_CONFIG: json.dumps(dict(config), indent=2) + "\n", **beside}
        for name, contents in texts.items():
            data = contents.read_bytes() if isinstance(contents, Path) else contents.encode()
            staged.stage(name).write_bytes(data)
            records[name] = FileRecord(len(data), hashlib.sha256(data).hexdigest())
        staged.stage(FOLDER_MANIFEST).write_text(manifest_text(records, made_by), encoding="utf-8")


_MODULES = (
    ("base_model.model.language_model.model.", "base_model.model.model.language_model."),
    ("base_model.model.language_model.lm_head.", "base_model.model.lm_head."),
    (".block_sparse_moe.gate.", ".mlp.gate."),
)
"""Parts of names as some checkpoints have them, and as the modules of transformers do, by which PEFT writes adapters:
those of a text beside what sees images, and of Mixtral's routers."""


def adapter_tensors(folder: Path | str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of an adapter folder one by one, in float32 or wider.

    shapes: the tensors that it must hold, by name. Raises: CheckpointError where it lacks one, has others, or one in
    another shape; ManifestError where the file is not what the manifest of the folder says.
    """
    path = Path(folder) / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: there is no {ADAPTER_WEIGHTS}; give the folder of an adapter as PEFT writes it"
        )
    check_files(Path(folder), [ADAPTER_WEIGHTS], threading.Event())
    try:
        with safe_open(path, framework="pt") as file:
            held = {_as_in_checkpoint(name, shapes): name for name in file.keys()}  # noqa: SIM118 - no mapping
            _check_names(path, set(held), shapes)
            for name, shape in shapes.items():
                tensor = file.get_tensor(held[name])
                if tuple(tensor.shape) != shape:
                    raise CheckpointError(
                        f"{path}: {name} has shape {list(tensor.shape)}, but the model and its {ADAPTER_CONFIG} ask for"
                        f" {list(shape)}; give the adapter of this model"
                    )
                yield name, tensor if tensor.dtype == torch.float64 else tensor.float()
    except (OSError, ValueError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: {error}") from None


def _as_in_checkpoint(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The name of a tensor as the checkpoint beneath names its module."""
    for stored, module in _MODULES:
        if name not in shapes and name.replace(module, stored) in shapes:
            return name.replace(module, stored)
    return name


def _check_names(path: Path, names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(shapes.keys() - names), sorted(names - shapes.keys())
    if missing or extra:
        what = f"lacks {len(missing)} tensors, such as {missing[0]}" if missing else f"holds {extra[0]}, for no module"
        raise CheckpointError(f"{path}: the adapter {what}; give the adapter of this model, with its {ADAPTER_CONFIG}")
