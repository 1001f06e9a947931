"""What the tests of failures share: a small model on disk, a command line, and what every failure promises."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flexengine import cli, from_pretrained
from flexengine.checkpoint.writer import TensorSource, write_checkpoint
from flexengine.models.registry import ASSETS, build_model
from flexengine.run import trainer

MAX_LINES = 27
"""Lines of one screen."""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
OPTIONS = {
    "data_source": "synthetic",
    "max_seq_len": 16,
    "max_global_batch_tokens": 32,
    "steps": 2,
    "dtype": "float32",
    "device": "cpu",
    "max_gpu_mem_gib": 0.5,
    "max_host_mem_gib": 4.0,
}


class Outcome(NamedTuple):
    """Of one command: exit status and what it printed."""

    status: int
    out: str
    err: str


class Case(NamedTuple):
    """A failure: how it is provoked, and what the message must hold (what was asked, found, and what to do)."""

    name: str
    provoke: Any
    says: tuple[str, ...]
    status: int = cli.BAD_INPUT


def cases(*rows: Case) -> Any:
    """A table of cases as a parametrisation, under names that read like the failure."""
    return pytest.mark.parametrize("case", rows, ids=[row.name for row in rows])


def write_model(folder: Path, sharded: bool = True, **changes: Any) -> Path:
    """A Hugging Face folder with random weights: two shards and an index, or one file."""
    config = {**CONFIG, **changes}
    spec = build_model("small", config)
    shapes = {s.name: s.shape for group in spec.groups for param in group.params for s in param.sources}
    torch.manual_seed(3)
    tensors = [TensorSource(n, torch.float32, s, lambda s=s: 0.1 * torch.randn(s)) for n, s in shapes.items()]
    half = len(tensors) // 2
    shards = {t.name: SHARDS[i >= half] for i, t in enumerate(tensors)} if sharded else None
    write_checkpoint(folder, tensors, shards, beside={"config.json": json.dumps(config)})
    return folder


def write_answering(folder: Path, **changes: Any) -> Path:
    """The same with the tokenizer of the demo, whose words it has."""
    write_model(folder, vocab_size=2944, **changes)
    for file in (ASSETS / "demo").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@contextmanager
def killed_in(step: int) -> Iterator[None]:
    """Have runs of `train` end before this step as by Ctrl-C."""
    take_step = trainer.take_step

    def killed(engine: Any, batch: Any, number: int, *more: Any) -> Any:
        if number == step:
            raise KeyboardInterrupt
        return take_step(engine, batch, number, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "take_step", killed)
        yield


def arguments(**changes: Any) -> list[str]:
    """Flags of OPTIONS with changes; None leaves a flag out, True and False are switches."""
    flags: list[str] = []
    for name, value in {**OPTIONS, **changes}.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags.append(f"{flag}={value}")
    return flags


def fingerprint(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def half_written(folder: Path) -> list[str]:
    """What a failure must not leave below a folder: temporary files, and an export without all of its parts."""
    left = [str(path) for path in folder.rglob("*") if path.name.endswith(".tmp")]
    for final in folder.rglob("final"):
        names = {path.name for path in final.iterdir()} if final.is_dir() else set()
        if not {"config.json"} < names or not any(name.endswith(".safetensors") for name in names):
            left.append(f"{final} with {sorted(names)}")
    return left


def check_message(text: str, says: Sequence[str]) -> None:
    """One screen, no traceback, and every part that the case asks for (a regular expression, line breaks as spaces)."""
    assert text.strip(), "no message"
    assert "Traceback" not in text, text
    assert len(text.splitlines()) < MAX_LINES, text
    assert max(map(len, text.splitlines())) < 1000, text
    flat = " ".join(text.split())
    for part in says:
        assert re.search(part, flat), f"{part!r} is not in: {flat}"


def check_python_face(case: Any, model: Path) -> None:
    """`from_pretrained` of a model that a case has damaged: the same message, and the folder stays as it is."""
    case.provoke(model)
    before = fingerprint(model)
    check_error(lambda: from_pretrained(model, device="cpu", hardware="cpu-test"), case.says)
    assert fingerprint(model) == before


def check_error(action: Callable[[], object], says: Sequence[str], kind: Any = ValueError) -> None:
    """The Python face: an exception of this kind with such a message."""
    with pytest.raises(kind) as caught:
        action()
    check_message(str(caught.value), says)
