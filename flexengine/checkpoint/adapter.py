"""Adapter folders as PEFT writes them: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flexengine.checkpoint.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.checkpoint.staged_folder import staged_folder


def save_adapter(
    folder: Path | str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], beside: Mapping[str, Path | str]
) -> None:
    """Write an adapter folder, all files of it at once or none. beside: further files by name: one to copy, or a text.

    Raises: OSError; nothing is left behind then.
    """
    with staged_folder(Path(folder)) as staged:
        save_file(dict(tensors), staged.stage(ADAPTER_WEIGHTS), metadata={"format": "pt"})
        texts: dict[str, Path | str] = {ADAPTER_CONFIG: json.dumps(dict(config), indent=2) + "\n", **beside}
        for name, contents in texts.items():
            data = contents.read_bytes() if isinstance(contents, Path) else contents.encode()
            staged.stage(name).write_bytes(data)


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
    another shape.
    """
    path = Path(folder) / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: there is no {ADAPTER_WEIGHTS}; give the folder of an adapter as PEFT writes it"
        )
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
