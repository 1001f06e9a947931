"""Writes a Hugging Face folder as a GGUF file for llama.cpp and Ollama, one piece of a tensor in memory at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flexengine.checkpoint.adapter_config import ADAPTER_WEIGHTS
from flexengine.checkpoint.layout import ADAPTER_CONFIG
from flexengine.checkpoint.reader import CheckpointReader, ReadRequest
from flexengine.models.checkpoints import check_fits, open_checkpoint
from flexengine.models.gguf.architectures import (
    REMEDY,
    ROPE_FACTORS,
    Architecture,
    architecture_of,
    config_of,
    head_dim_of,
    keys_of,
    llama3_factors,
    paired,
    places,
    shift,
)
from flexengine.models.gguf.tokens import add_tokenizer
from flexengine.models.spec import ModelSpec
from flexengine.ops.base import Op
from flexengine.wording import parse_json

PIECE_ELEMENTS = 2**22
"""Elements encoded at once, 16 MiB of float32."""
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q5_1": 9, "q5_0": 8, "q4_1": 3, "q4_0": 2}
"""What `gguf` encodes and llama.cpp runs -> `general.file_type` (llama_ftype of llama.h)."""
Describe = Callable[[str, dict], ModelSpec]
LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class _Tensor(NamedTuple):
    """A tensor of the file. shape: row-major; kind: one of FILE_TYPES; pieces: yields its rows in float32, in order."""

    name: str
    shape: tuple[int, ...]
    kind: str
    pieces: Callable[[], Iterator[Any]]


class _InPieces:
    """What the writer of `gguf` takes for an array: writes a tensor piece by piece."""

    def __init__(self, tensor: _Tensor, nbytes: int) -> None:
        self.tensor, self.nbytes = tensor, nbytes

    def tofile(self, file: Any) -> None:
        import gguf  # noqa: PLC0415, an extra

        kind = gguf.GGMLQuantizationType[self.tensor.kind.upper()]
        for piece in self.tensor.pieces():
            file.write(gguf.quantize(piece, kind).tobytes())


def check_writable() -> None:
    """Raise ValueError where the package that writes GGUF files is missing."""
    if find_spec("gguf") is None:
        raise ValueError(f"GGUF files are written by the package gguf; install it: {REMEDY}")


def write_model(
    folder: Path, spec: ModelSpec, name: str, path: Path, describe: Describe, wanted: str | None = None
) -> str:
    """Write the model in a folder to `path`; returns the type that its matrices have.

    spec: as `registry.open_model` describes the folder. describe: `registry.build_model`. wanted: one of FILE_TYPES;
    None keeps bf16, and makes f16 of others. Vectors, routers and rows that no block of a quantised type divides stay
    in float32 or f16.
    Raises: ValueError for a family that llama.cpp lacks, or for what its files cannot say of this model.
    """
    config, architecture, keys = _described(folder, spec, describe)
    rope = keys.pop("factors", None)
    with open_checkpoint(spec, folder) as reader:
        check_fits(spec, reader)
        plain = reader.tensors[spec.embedding_source].dtype
        kind = wanted or ("bf16" if plain is torch.bfloat16 else "f16")
        tensors = _tensors(reader, spec, config, architecture, kind)
        if rope is not None:
            tensors.append(_Tensor(ROPE_FACTORS, rope.shape, "f32", lambda: iter([rope])))
        writer = _writer(architecture, name, "model")
        writer.add_file_type(FILE_TYPES[kind])
        for key, value in keys.items():
            _add(writer, f"{architecture.name}.{key}", value)
        add_tokenizer(writer, folder, config.vocab_size)
        _write(writer, path, tensors)
    return kind


def write_adapter(folder: Path, spec: ModelSpec, name: str, path: Path) -> None:
    """Write the LoRA adapters in a folder of PEFT to `path`, for llama.cpp's --lora. spec: of the model beneath.

    Raises: ValueError for adapters of a kind that llama.cpp lacks.
    """
    from safetensors.torch import load_file  # noqa: PLC0415

    settings = parse_json((folder / ADAPTER_CONFIG).read_bytes(), folder / ADAPTER_CONFIG)
    config, architecture, _ = _described(None, spec, None)
    beyond = [key for key in ("use_dora", "modules_to_save", "alpha_pattern", "rank_pattern") if settings.get(key)]
    place_of = places(architecture, config.num_hidden_layers)
    tensors = []
    for stored, weight in load_file(folder / ADAPTER_WEIGHTS).items():
        match = LORA.fullmatch(stored)
        place = None if match is None else place_of(f"{match[1]}.weight")
        if match is None or place is None or place.expert is not None or beyond:
            raise ValueError(
                f"{folder}: llama.cpp takes plain LoRA of linear layers, and this has {beyond or stored}; merge it:"
                " --format gguf"
            )
        order = paired(architecture, place.name, _heads(config)) if match[2] == "B" else None
        rows = weight.float().numpy() if order is None else weight.float().numpy()[order]
        name_there = f"{place.name}.lora_{match[2].lower()}"
        tensors.append(_Tensor(name_there, rows.shape, "f32", partial(iter, [rows])))
    writer = _writer(architecture, name, "adapter")
    writer.add_string("adapter.type", "lora")
    rank, alpha = settings["r"], float(settings["lora_alpha"])
    writer.add_float32("adapter.lora.alpha", alpha * math.sqrt(rank) if settings.get("use_rslora") else alpha)
    _write(writer, path, tensors)


def _described(
    folder: Path | None, spec: ModelSpec, describe: Describe | None
) -> tuple[Any, Architecture, dict[str, Any]]:
    """The config as transformers fills it in, and the keys that say it. folder: None for keys of no interest.

    Raises: ValueError where the keys would describe another model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    check_writable()
    architecture = architecture_of(str(spec.hf_config.get("model_type")))
    model_type = spec.hf_config["model_type"]
    config = CONFIG_MAPPING[model_type](**{k: v for k, v in spec.hf_config.items() if k != "quantization_config"})
    keys = keys_of(config, architecture)
    if folder is None or describe is None:
        return config, architecture, keys
    rope, factors = dict(config.rope_parameters or {}), None
    if rope.get("rope_type") == "llama3":
        factors = llama3_factors(rope["rope_theta"], head_dim_of(config), rope)
    with open_checkpoint(spec, folder) as reader:
        place_of = places(architecture, config.num_hidden_layers)
        found = {place_of(name): entry.shape for name, entry in reader.tensors.items()}
    shapes = {place.name: shape for place, shape in found.items() if place is not None}
    if spec.tie_word_embeddings:
        shapes.pop("output.weight", None)
    again = describe(spec.name, config_of(model_type, keys, shapes, factors))
    if _computed(again) != _computed(spec):
        raise ValueError(
            f"{spec.name}: a GGUF file cannot say all that config.json asks of this {model_type} model (such as windows"
            " of attention, scaled frequencies or factors of its own), and another model would run; export as hf"
        )
    return config, architecture, keys if factors is None else {**keys, "factors": factors}


def _computed(spec: ModelSpec) -> Any:
    """All that a model computes, as values that can be compared; ops of two descriptions are never one object."""

    def said(value: Any) -> Any:
        if isinstance(value, Op):
            return type(value), {name: said(part) for name, part in vars(value).items()}
        return [said(part) for part in value] if isinstance(value, list | tuple) else value

    layers = [(layer.kind, said(layer.ops), layer.params) for layer in spec.layers]
    tables = [(table.name, np.round(table.values, 6).tolist(), table.scaling) for table in spec.tables]
    return layers, tables, [[(param.name, param.shape) for param in group.params] for group in spec.groups]


def _heads(config: Any) -> dict[str, int]:
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim_of(config),
    }


def _tensors(
    reader: CheckpointReader, spec: ModelSpec, config: Any, architecture: Architecture, kind: str
) -> list[_Tensor]:
    """List the tensors of the file; experts of a layer are one. Raises: ValueError for one without a place."""
    place_of = places(architecture, config.num_hidden_layers)
    named = spec.named_as(reader.tensors)
    stored: dict[str, list[tuple[int, str]]] = {}
    for source in (source for group in named.groups for param in group.params for source in param.sources):
        place = place_of(source.name)
        if place is None or source.decode is not None:
            raise ValueError(f"llama.cpp has no place for the tensor {source.name} of {spec.name}; export it as hf")
        stored.setdefault(place.name, []).append((-1 if place.expert is None else place.expert, source.name))
    return [
        _tensor(
            reader, [one for _, one in sorted(names)], name, kind, paired(architecture, name, _heads(config)),
            shift(architecture, name),
        )
        for name, names in stored.items()
    ]  # fmt: skip


def _tensor(reader: CheckpointReader, stored: list[str], name: str, kind: str, order: Any, shifted: float) -> _Tensor:
    """Describe a tensor of the file. stored: its name in the checkpoint, or those of the experts that it stacks."""
    shape = reader.tensors[stored[0]].shape
    if name.endswith("ffn_gate_inp_shexp.weight"):
        shape = shape[-1:]
    is_expert = "_exps." in name
    if len(shape) < 2 or name.endswith("ffn_gate_inp.weight"):
        kind = "f32"
    elif kind.startswith("q") and shape[-1] % 32:
        kind = "f16"

    def pieces() -> Iterator[Any]:
        for one in stored:
            yield from _rows(reader, one, shape, order, shifted)

    return _Tensor(name, (len(stored), *shape) if is_expert else shape, kind, pieces)


def _rows(reader: CheckpointReader, name: str, shape: tuple[int, ...], order: Any, shifted: float) -> Iterator[Any]:
    """Read some rows of a tensor at a time, as float32 [rows, width]. order: which row comes where, None for as is."""
    width = shape[-1] if order is None or len(shape) > 1 else 1  # of a bias the elements are the rows
    num_rows = math.prod(shape) // width
    step = max(1, PIECE_ELEMENTS // width)
    for start in range(0, num_rows, step):
        rows = range(start, min(start + step, num_rows))
        piece = torch.empty(len(rows), width)
        if order is None:
            reader.read_many([ReadRequest(name, piece.view(-1), None, start * width)])
        else:
            reader.read_many([ReadRequest(name, piece[i], None, int(order[row]) * width) for i, row in enumerate(rows)])
        yield (piece + shifted).numpy()


def _writer(architecture: Architecture, name: str, kind: str) -> Any:
    import gguf  # noqa: PLC0415

    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_type(kind)
    writer.add_name(name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, int(value))


def _write(writer: Any, path: Path, tensors: list[_Tensor]) -> None:
    import gguf  # noqa: PLC0415

    arrays = []
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind.upper()]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        arrays.append(_InPieces(tensor, math.prod(tensor.shape) // block * size))
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), arrays[-1].nbytes, kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array in arrays:
        writer.write_tensor_data(array)
    writer.close()


def modelfile(model: str, adapter: str | None = None) -> str:
    """Write what `ollama create NAME -f Modelfile` reads. The chat template is in the model's own file."""
    return f"FROM ./{model}\n" + (f"ADAPTER ./{adapter}\n" if adapter else "")
