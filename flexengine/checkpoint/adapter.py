"""Adapter folders as PEFT writes them: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flexengine.checkpoint.adapter_config import ADAPTER_WEIGHTS, MERGE_FIRST
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


_NAMED = re.compile(r"\.(lora_[AB]|lora_magnitude_vector|modules_to_save)\.(?!weight$|bias$)[^.]+(?=\.weight$|\.bias$)")
"""Where the states of PEFT's models have an adapter's own name, such as default; files of PEFT leave it out."""


def adapter_tensors(
    folder: Path | str, shapes: Mapping[str, tuple[int, ...]], beside: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of an adapter folder one by one.

    shapes: the tensors that it must hold, by name. beside: others that it may hold, of the embedding and the head.
    Raises: CheckpointError where it lacks one, has others, or one in another shape; ManifestError where the file is not
    what the manifest of the folder says.
    """
    path = Path(folder) / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{folder}: there is no {ADAPTER_WEIGHTS}{_found_instead(path)}")
    check_files(Path(folder), [ADAPTER_WEIGHTS], threading.Event())
    try:
        with safe_open(path, framework="pt") as file:
            held = _held(file.keys(), {**beside, **shapes})
            _check_names(path, set(held) - beside.keys(), shapes)
            for name, shape in {**beside, **shapes}.items():
                if name in held:
                    tensor, *others = (file.get_tensor(stored) for stored in held[name])
                    _check_shape(path, name, tuple(tensor.shape), shape)
                    if any(not torch.equal(tensor, other) for other in others):
                        raise CheckpointError(
                            f"{path}: {' and '.join(held[name])} differ: it holds two adapters; save one of them"
                        )
                    yield name, tensor
    except (SafetensorError, OSError, ValueError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: {error}") from None


def _found_instead(path: Path) -> str:
    if path.with_suffix(".bin").is_file():
        return f", but {path.stem}.bin, which is not opened because it may run code; save it as safetensors with PEFT"
    return "; give the folder of an adapter as PEFT writes it"


def _held(names: Iterable[str], known: Collection[str]) -> dict[str, list[str]]:
    """Pair the names that files of PEFT have for the tensors of a file with those that these have in it."""
    held: dict[str, list[str]] = {}
    for name in names:
        own = _NAMED.sub(r".\1", name).replace(".modules_to_save.", ".")
        own = own.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")
        for stored, module in _MODULES:
            if own not in known and own.replace(module, stored) in known:
                own = own.replace(module, stored)
        if ".original_module." not in name:  # what PEFT keeps of a module that is trained in full, and does not use
            held.setdefault(own, []).append(name)
    return held


def _check_names(path: Path, names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(shapes.keys() - names), sorted(names - shapes.keys())
    if extra:
        raise CheckpointError(f"{path} holds {extra[0]}: {_why_not(extra[0])}; {MERGE_FIRST}")
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the {len(shapes)} tensors that {ADAPTER_CONFIG} asks for in this model,"
            f" such as {missing[0]}; correct target_modules and modules_to_save there, or save the adapter again"
        )


def _why_not(name: str) -> str:
    """Why a tensor of an adapter's file is not read."""
    module, _, kind = name.removesuffix(".weight").rpartition(".")
    if kind.startswith("lora_embedding_"):
        return "adapters of an embedding are not built here"
    if module.removesuffix(".base_layer").endswith(".experts"):
        return "adapters of experts as PEFT stacks them (target_parameters) are not built here for this model"
    if kind in ("lora_A", "lora_B", "lora_magnitude_vector"):
        short = module.rpartition(".")[2]
        return f"{ADAPTER_CONFIG} does not name {short}, or it is no linear layer of the model's blocks"
    return f"it is not part of an adapter, and modules_to_save in {ADAPTER_CONFIG} does not name it"


def _check_shape(path: Path, name: str, found: tuple[int, ...], asked: tuple[int, ...]) -> None:
    if found == asked:
        return
    if ".lora_" not in name and len(found) == 2 and found[1:] == asked[1:]:
        raise CheckpointError(
            f"{path}: {name} has {found[0]} rows, but the model's vocab_size is {asked[0]}: the vocabulary was resized"
            f" before the adapter was trained; {MERGE_FIRST}, with the adapter's tokenizer"
        )
    raise CheckpointError(
        f"{path}: {name} has shape {list(found)}, but the model and {ADAPTER_CONFIG} ask for {list(asked)}; give the"
        " model that the adapter was trained on, and the config that was saved with it"
    )
