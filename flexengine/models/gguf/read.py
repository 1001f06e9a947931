"""Makes a Hugging Face folder of a GGUF file, once: decoded tensor by tensor, kept under the hash of the file.

Weights are decoded by the package `gguf`, the tokenizer by transformers. It all happens in a process of its own, whose
memory goes back to the system.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flexengine.checkpoint.bounded_process import BoundedProcess, report_alive
from flexengine.checkpoint.layout import CONFIG_FILE
from flexengine.checkpoint.manifest import check_acted_on
from flexengine.checkpoint.writer import TensorSource, write_checkpoint
from flexengine.models.gguf.architectures import (
    ARCHITECTURES,
    REMEDY,
    ROPE_FACTORS,
    TOKENS,
    Architecture,
    config_of,
    paired,
    places,
    shift,
)
from flexengine.models.spec import ModelSpec

Describe = Callable[[str, dict], ModelSpec]

logger = logging.getLogger(__name__)

PIECE_ELEMENTS = 2**22
"""Elements decoded at once, 16 MiB of float32: a matrix of any size takes no more memory."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that stay as they are; all others are decoded to float32, which holds them exactly."""
MOST_BYTES = 3 * 2**30
"""Memory of the process: reading the 262,144 tokens of Gemma takes 1.1 GiB, whatever the size of the model."""
LOADING_CPU_S = 240.0
"""CPU seconds in which libraries, keys and tokenizer are read; Gemma's take 40."""


def converted(path: Path, describe: Describe) -> Path:
    """Give the Hugging Face folder of a GGUF file; it is made where the cache has none.

    describe: `registry.build_model`, which opens these files and so cannot be imported here.

    Raises: ValueError where `gguf` is missing, or for what cannot be read of the file; OSError of the file system.
    """
    if find_spec("gguf") is None:
        raise ValueError(f"model {path}: GGUF files are read by the package gguf; install it: {REMEDY}")
    folder = _cache() / f"{path.stem}-{_digest(path)[:32]}"
    if not (folder / CONFIG_FILE).is_file():
        with BoundedProcess(str(path), lambda: {"convert": partial(convert, describe)}, MOST_BYTES) as process:
            summary = process.call("convert", str(path), str(folder))
        logger.warning("model %s: %s, kept in %s", path, summary, folder)
    check_acted_on(folder)
    return folder


def _cache() -> Path:
    """gguf/ in the cache of $FLEXENGINE_CACHE, else of flexengine/ in the XDG cache folder."""
    if folder := os.environ.get("FLEXENGINE_CACHE"):
        return Path(folder) / "gguf"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexengine" / "gguf"


def _digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Opened(NamedTuple):
    """A file that was read but for its weights. tensors: by name, as `gguf` reads them."""

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def own_keys(self) -> dict[str, Any]:
        """The keys of its architecture, without that before them."""
        start = f"{self.keys['general.architecture']}."
        return {key.removeprefix(start): value for key, value in self.keys.items() if key.startswith(start)}


def convert(describe: Describe, path: str, folder: str) -> str:
    """Write the folder of a file in this process; returns what was done, in words.

    Raises: ValueError for what cannot be read.
    """
    report_alive("", LOADING_CPU_S)
    opened = _open(Path(path))
    try:
        config, architecture = _config(opened)
        sources = _sources(opened, config, architecture, describe(opened.path.stem, config))
    except (ValueError, KeyError) as error:
        why = f"it lacks the key {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"model {path} cannot be read: {why}. Give the checkpoint that it was made from") from None
    beside = {CONFIG_FILE: json.dumps(config, indent=2) + "\n", **_tokenizer(opened)}
    write_checkpoint(folder, sources, beside=beside, with_manifest=True, made_by={"source": "gguf"})
    num_bytes = sum(source.num_bytes for source in sources)
    kinds = sorted({tensor.tensor_type.name for tensor in opened.tensors.values()})
    return f"{len(sources)} tensors ({', '.join(kinds)}) decoded to {num_bytes / 2**30:.2f} GiB of safetensors"


def _open(path: Path) -> _Opened:
    import gguf  # noqa: PLC0415, an extra

    try:
        reader = gguf.GGUFReader(path)
        long = ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")
        keys = {key: field.contents() for key, field in reader.fields.items() if key not in long}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:  # of a file that ends too early
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{path} is no whole GGUF file ({why}); fetch it again") from None
    if keys.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {keys['split.count']} parts; join them with llama-gguf-split --merge")
    return _Opened(path, keys, tensors)


def _config(opened: _Opened) -> tuple[dict[str, Any], Architecture]:
    """Make config.json. Raises: ValueError for an architecture or a key that is not known."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    named = opened.keys["general.architecture"]
    model_type = next((kind for kind, row in ARCHITECTURES.items() if row.name == named), None)
    if model_type is None:
        raise ValueError(f"it holds a model of {named}, and {', '.join(ARCHITECTURES)} are read")
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in opened.tensors.items()}
    factors = opened.tensors[ROPE_FACTORS].data if ROPE_FACTORS in opened.tensors else None
    config = config_of(model_type, {key: _exact(value) for key, value in opened.own_keys().items()}, shapes, factors)
    names = {"padding": "pad"}
    for token in TOKENS:
        config[f"{names.get(token, token)}_token_id"] = opened.keys.get(f"tokenizer.ggml.{token}_token_id")
    return {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]], **config}, ARCHITECTURES[model_type]


def _exact(value: Any) -> Any:
    """The shortest number that a float32 was written from: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _sources(
    opened: _Opened, config: dict[str, Any], architecture: Architecture, spec: ModelSpec
) -> list[TensorSource]:
    """List the tensors of the checkpoint, each decoded when it is written.

    Raises: ValueError naming tensors that the file lacks, that no part of the model reads, or that cannot be decoded.
    """
    place_of = places(architecture, config["num_hidden_layers"])
    sources = [source for group in spec.groups for param in group.params for source in param.sources]
    found = {source.name: place_of(source.name) for source in sources}
    missing = [name for name, place in found.items() if place is None or place.name not in opened.tensors]
    if missing:
        raise ValueError(f"it lacks {len(missing)} of the model's {len(found)} tensors, such as {missing[:3]}")
    read = {place.name for place in found.values() if place} | {ROPE_FACTORS}
    if unread := [name for name in opened.tensors if name not in read]:
        raise ValueError(f"nothing here reads {len(unread)} of its tensors, such as {unread[:3]}")
    _check_decodable(opened)
    made = []
    for source in sources:
        place = found[source.name]
        assert place is not None
        tensor = opened.tensors[place.name]
        rows = tensor.data if place.expert is None else tensor.data[place.expert]
        if (order := paired(architecture, place.name, config, invert=True)) is not None:
            rows = rows[order]  # whole rows, still as they are stored
        dtype = PLAIN.get(tensor.tensor_type.name, torch.float32)
        read_it = partial(_pieces, rows, tensor.tensor_type, dtype, shift(architecture, place.name))
        made.append(TensorSource(source.name, dtype, source.shape, read_it))
    return made


def _check_decodable(opened: _Opened) -> None:
    import gguf  # noqa: PLC0415

    for kind in {tensor.tensor_type for tensor in opened.tensors.values()}:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            names = [name for name, tensor in opened.tensors.items() if tensor.tensor_type == kind]
            found = f"as {len(names)} tensors such as {names[0]} are"
            raise ValueError(f"the package gguf decodes no {kind.name}, {found}") from None


def _pieces(rows: Any, kind: Any, dtype: torch.dtype, shifted: float) -> Iterator[torch.Tensor]:
    """Decode some rows at a time, flat. rows: as stored, [rows, bytes], or a vector."""
    import gguf  # noqa: PLC0415

    rows = rows.reshape(-1, rows.shape[-1])
    row_elements = rows.shape[-1] * rows.itemsize // gguf.GGML_QUANT_SIZES[kind][1] * gguf.GGML_QUANT_SIZES[kind][0]
    step = max(1, PIECE_ELEMENTS // row_elements)
    for start in range(0, rows.shape[0], step):
        report_alive()
        piece = np.array(gguf.dequantize(rows[start : start + step], kind), np.float32).reshape(-1)
        yield (torch.from_numpy(piece) - shifted).to(dtype)


def _tokenizer(opened: _Opened) -> dict[str, str]:
    """Make the files of the tokenizer, as texts by name; none where the file has no tokens."""
    if "tokenizer.ggml.model" not in opened.keys:
        return {}
    import tempfile  # noqa: PLC0415

    from transformers import AutoTokenizer  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as scratch:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                opened.path.parent, gguf_file=opened.path.name, local_files_only=True, trust_remote_code=False
            )
            tokenizer.save_pretrained(scratch)
        except Exception as error:  # transformers raises all kinds
            logger.warning("model %s: transformers reads no tokenizer of it (%s)", opened.path, str(error)[:200])
            return {}
        return {file.name: file.read_text(encoding="utf-8") for file in Path(scratch).iterdir()}
