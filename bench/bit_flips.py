"""Does any flipped bit of a checkpoint, an export or a download change what is trained without a word?

    python -m bench.bit_flips --flips 2000 --json out.json

A small model with a tokenizer and a template is trained, in full and with adapters, stopped, saved and exported. Each
case flips one bit of one file, byte and bit drawn by its seed, all kinds of files in turn. Then `flexengine verify`
must name the file, and a run that uses the folder, through the command line, must refuse it by a message that names
folder and file, pass over a damaged checkpoint for an older one, or end with the very log and weights of a run on
whole files. Anything else is a complaint.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flexengine.api
from bench.environment import write_json
from bench.fuzz_cases import CONFIG
from flexengine import cli
from flexengine.checkpoint.atomic import sha256_of
from flexengine.checkpoint.manifest import FOLDER_MANIFEST, FileRecord, write_manifest
from flexengine.checkpoint.writer import TensorSource, write_checkpoint
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS, build_model

KEPT = ("step", "loss", "grad_norm", "lr", "num_tokens")
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
STEPS, LAST, EARLIER = 6, "checkpoints/step-4", "checkpoints/step-2"
OPTIONS: dict[str, Any] = {
    "max-seq-len": 64, "max-global-batch-tokens": 128, "dtype": "float32", "device": "cpu", "max-gpu-mem-gib": 0.5,
    "max-host-mem-gib": 4, "lr": 0.01,
}  # fmt: skip


class Result(NamedTuple):
    """What came of a case: the kind of folder, the file, "refused", "passed over" or "same", and a complaint, or ""."""

    seed: int
    kind: str
    file: str
    outcome: str
    message: str = ""
    complaint: str = ""


class Ending(NamedTuple):
    """How a command ended: its status, what it said, and the log and weights that a run left."""

    status: int
    said: str
    result: str = ""


def command(name: str, *words: object, **flags: object) -> Ending:
    """Run a command in this process; an exception becomes status -1."""
    said, argv = io.StringIO(), [name, *map(str, words), *(f"--{k.replace('_', '-')}={v}" for k, v in flags.items())]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            return Ending(cli.main(argv), said.getvalue())
        except Exception as error:
            return Ending(-1, f"{said.getvalue()}\n{error!r}")


@contextlib.contextmanager
def known_machine() -> Iterator[None]:
    """Plan for a machine that needs no measuring; equal models and requests are planned once."""
    probe, plan_for_ranks, plans = flexengine.api.probe, flexengine.api.plan_for_ranks, {}

    def planned(*request: object) -> Any:
        key = repr(request)
        if key not in plans:
            plans[key] = plan_for_ranks(*request)  # pyright: ignore[reportArgumentType]
        return plans[key]

    flexengine.api.probe = lambda *_, **__: preset("cpu-test")
    flexengine.api.plan_for_ranks = planned
    try:
        yield
    finally:
        flexengine.api.probe, flexengine.api.plan_for_ranks = probe, plan_for_ranks


class Folders:
    """What cases damage: a download, checkpoints of a run and of one with adapters, and exports of all forms."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.data, self.source = scratch, scratch / "data.jsonl", scratch / "download"
        rows = [{"question": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(12)]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_download(self.source)
        self.run, self.lora = scratch / "run", scratch / "lora"
        for folder, mode in ((self.run, {}), (self.lora, {"mode": "lora", "lora_rank": 2})):
            self.train(folder, "--save", model=self.source, steps=STEPS, save_steps=2, save_total_limit=0, **mode)
        command("export", run=self.run, out=scratch / "exported")
        command("export", run=self.lora, format="merged", out=scratch / "merged")
        models = {"download": self.source, "export": self.run / "final"}
        models |= {"export of a checkpoint": scratch / "exported", "merged": scratch / "merged"}
        runs = {"checkpoint": self.run, "checkpoint of adapters": self.lora}
        self.places = {**models, "adapter": self.lora / "final", **{kind: run / LAST for kind, run in runs.items()}}
        self.files = [(kind, path.name) for kind, at in self.places.items() for path in sorted(at.iterdir())]
        uses = [(kind, auto) for kind in self.places for auto in (False, True)]
        self.whole = {(kind, auto): self.used(kind, self.places[kind], auto).result for kind, auto in uses}

    def train(self, folder: Path, *words: str, **flags: object) -> Ending:
        """Run `train` into a folder, with what it leaves."""
        given = {**OPTIONS, "data_cache": self.scratch / "cache", "dataset": self.data, "output_dir": folder, **flags}
        ending = command("train", *words, **given)
        log = folder / "train_log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if ending.status == 0 else []
        weights = sorted((folder / "final").glob("*.safetensors"))
        parts = [[[line[name] for name in KEPT] for line in lines], *map(sha256_of, weights)]
        return ending._replace(result=hashlib.sha256(json.dumps(parts).encode()).hexdigest() if lines else "")

    def used(self, kind: str, place: Path, auto: bool) -> Ending:
        """Train from a model or adapter; or resume a checkpoint by its name, or with auto the best of a copied run."""
        output, words = self.scratch / "used", ("--save",)
        shutil.rmtree(output, ignore_errors=True)
        if kind in ("checkpoint", "checkpoint of adapters"):
            mode = {} if kind == "checkpoint" else {"mode": "lora", "lora_rank": 2}
            run = self.run if kind == "checkpoint" else self.lora
            if auto:
                shutil.copytree(run / EARLIER, output / EARLIER)
                shutil.copytree(place, output / LAST)
                for name in ("config.yaml", "train_log.jsonl"):
                    shutil.copy(run / name, output)
            return self.train(output, *words, model=self.source, steps=STEPS, resume="auto" if auto else place, **mode)
        adapter = {"adapter": place} if kind == "adapter" else {}
        return self.train(output, *words, model=self.source if adapter else place, steps=1, **adapter)


def write_download(folder: Path) -> None:
    """Write a model folder of two shards with what is read beside them, a README, and the manifest of a download."""
    config = {**CONFIG, "vocab_size": 3000}
    shapes = {s.name: s.shape for group in build_model("small", config).groups for p in group.params for s in p.sources}
    torch.manual_seed(3)
    tensors = [TensorSource(n, torch.float32, s, lambda s=s: 0.1 * torch.randn(s)) for n, s in shapes.items()]
    shards = {t.name: f"model-0000{1 + (i > 4)}-of-00002.safetensors" for i, t in enumerate(tensors)}
    beside = {name: ASSETS / "demo" / name for name in BESIDE if (ASSETS / "demo" / name).is_file()}
    texts = {"config.json": json.dumps(config), "generation_config.json": '{"eos_token_id": 6}', "README.md": "# small"}
    write_checkpoint(folder, tensors, shards, beside={**beside, **texts})
    records = {path.name: FileRecord(path.stat().st_size, sha256_of(path)) for path in folder.iterdir()}
    write_manifest(folder, records, {"repo": "org/small", "repo_type": "model", "revision": "a" * 40})


def flip(seed: int, folders: Folders) -> Result:
    """Carry out one case."""
    kind, file = folders.files[seed % len(folders.files)]
    draw, place = random.Random(seed), folders.places[kind]
    path = place / file
    data = path.read_bytes()
    damaged, at, auto = bytearray(data), draw.randrange(len(data)), draw.random() < 0.5
    damaged[at] ^= 1 << draw.randrange(8)
    path.write_bytes(damaged)
    try:
        verified, ending = command("verify", place), folders.used(kind, place, auto)
    finally:
        path.write_bytes(data)
    outcome = "refused" if ending.status else "passed over" if "passed over" in ending.said else "same"
    outcome = "passed over" if "going on with an older checkpoint" in ending.said else outcome
    complaint = complaint_about(file, place, verified, ending, folders.whole[kind, auto])
    return Result(seed, kind, file, outcome, ending.said[-600:] if complaint else "", complaint)


def complaint_about(file: str, place: Path, verified: Ending, ending: Ending, whole: str) -> str:
    """What is wrong with how a case ended, "" when nothing is."""
    if verified.status != cli.BAD_INPUT or not (f"{file}: " in verified.said or f"{file} " in verified.said):
        return f"verify did not name it: {verified.said[-200:]}"
    if ending.status == 0:
        return "" if ending.result == whole else "silent: other losses or weights"
    named = file in ending.said or FOLDER_MANIFEST in ending.said
    if ending.status != cli.BAD_INPUT or not named or place.name not in ending.said:
        return f"status {ending.status}, and no message that names the file"
    return ""


def run_flips(seeds: Sequence[int]) -> list[Result]:
    """Carry out cases on folders of their own."""
    with tempfile.TemporaryDirectory() as scratch, known_machine():
        folders = Folders(Path(scratch))
        return [flip(seed, folders) for seed in seeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=1, help="processes that carry out cases at the same time")
    parser.add_argument("--json", default=None, metavar="FILE")
    arguments = parser.parse_args()
    seeds, workers = range(arguments.first, arguments.first + arguments.flips), arguments.workers
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = list(chain(*pool.map(run_flips, [seeds[start::workers] for start in range(workers)])))
    complaints = [result._asdict() for result in results if result.complaint]
    files = sorted({(result.kind, result.file) for result in results})
    outcomes = {": ".join(of): Counter(result.outcome for result in results if result[1:3] == of) for of in files}
    summary = {"flips": len(results), **Counter(result.outcome for result in results), "complaints": complaints}
    print(json.dumps({**summary, "outcomes": outcomes}, indent=1))
    write_json(arguments.json, {**summary, "outcomes": outcomes})
    raise SystemExit(bool(complaints))


if __name__ == "__main__":
    main()
