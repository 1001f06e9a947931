"""Does it hold on real weights? Trains Gemma 3 270M, as tests/real/gemma3.py joins it, in each way; on the CPU.

    python -m bench.real_weights --json out.json    # half an hour on two cores, up to 8 GB

Loss and norm of all gradients beside transformers in float32; losses of a run in full, of adapters, and of adapters
beside an NF4 base; whether a run that goes on from its middle ends in the same bits; the loss of transformers with what
was exported; what the model answers before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.environment import write_json
from flexengine import cli, from_pretrained
from flexengine.commands.read_run import read_run
from flexengine.models.registry import ASSETS, open_model

DATA = ASSETS / "demo" / "demo_instructions.jsonl"
STEPS, SAVED = 12, 6
QUESTION = "What is 10 plus 42?"
TEXTS = ("The river runs through the old town and into the sea.", "Water boils at one hundred degrees Celsius.")
BUDGETS = ("--device", "cpu", "--max-gpu-mem-gib", "3", "--max-host-mem-gib", "8")
RUN = (
    *("--dataset", f"{DATA}:train[:96]", "--val-dataset", f"{DATA}:train[96:128]", "--eval-steps", "4"),
    *("--max-seq-len", "128", "--max-global-batch-tokens", "512", "--steps", str(STEPS), "--logging", "warning"),
    *("--save", "--save-steps", str(SAVED)),
)
WAYS = {
    "full, bfloat16": "--lr 2e-5 --dtype bfloat16 --optimizer-state-dtype bfloat16",
    "LoRA of rank 8, float32": "--mode lora --lora-rank 8 --lr 5e-4 --dtype float32",
    "LoRA of rank 8, bfloat16": "--mode lora --lora-rank 8 --lr 5e-4 --dtype bfloat16",
    "LoRA of rank 8 beside NF4, bfloat16": "--mode lora --lora-rank 8 --lr 5e-4 --dtype bfloat16 --base-dtype nf4",
}


def said_by(*arguments: str) -> str:
    """What a command of flexengine prints. Raises: RuntimeError where it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main(list(arguments))
    if status != 0:
        raise RuntimeError(f"flexengine {' '.join(arguments)}: exit status {status}")
    return out.getvalue()


def loss_of_transformers(folder: Path, batch: list[list[int]], backward: bool = False) -> tuple[float, float]:
    """Mean loss of all targets and the norm of all gradients, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    targets, total = sum(len(ids) - 1 for ids in batch), 0.0
    with torch.set_grad_enabled(backward):
        for ids in batch:
            loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss * ((len(ids) - 1) / targets)
            total += loss.item()
            if backward:
                loss.backward()
    return total, math.sqrt(
        sum(p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None)
    )


def parity(folder: Path, batch: list[list[int]]) -> dict[str, float]:
    """Loss and norm here and there."""
    sizes = {"max_seq_len": 64, "max_global_batch_tokens": 128, "max_gpu_mem_gib": 5, "max_host_mem_gib": 12}
    there = loss_of_transformers(folder, batch, backward=True)
    with from_pretrained(folder, dtype="float32", device="cpu", **sizes) as engine:
        output, update = engine.train_step(batch)
    return {
        "loss": output.loss, "loss_of_transformers": there[0],
        "grad_norm": update.grad_norm, "grad_norm_of_transformers": there[1],
    }  # fmt: skip


def train(weights: Path, flags: str, folder: Path) -> dict[str, Any]:
    """Train in one way; returns the losses."""
    said_by("train", "--model", str(weights), *flags.split(), *BUDGETS, *RUN, "--output-dir", str(folder))
    run = read_run(folder)
    return {
        "losses": [round(step.loss or math.nan, 4) for step in run.steps],
        "validation": {evaluation.step: round(evaluation.loss or math.nan, 4) for evaluation in run.evaluations},
    }


def digest(folder: Path) -> str:
    """All weights of an export as one number."""
    (file,) = folder.glob("*.safetensors")
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def resumed(weights: Path, flags: str, folder: Path) -> bool:
    """Take away the end of a run, go on from its middle, and tell whether the model has the same bits."""
    whole = digest(folder / "final")
    for place in (folder / "final", folder / "checkpoints" / f"step-{STEPS}"):
        shutil.rmtree(place)
    said_by("train", "--model", str(weights), *flags.split(), *BUDGETS, *RUN, "--output-dir", str(folder),
            "--resume", "auto")  # fmt: skip
    return digest(folder / "final") == whole


def answer(place: str) -> str:
    """What a model says to the question in a conversation."""
    before, sys.stdin = sys.stdin, io.StringIO(QUESTION + "\n")
    try:
        return said_by("chat", "--model", place, *BUDGETS, "--dtype", "bfloat16", "--max-new-tokens", "16").strip()
    finally:
        sys.stdin = before


def exported(folder: Path, batch: list[list[int]]) -> dict[str, Any]:
    """Losses of transformers and of an engine with the merged adapters of a run, and the size of a GGUF file of it."""
    merged, gguf = folder / "merged", folder / "gguf"
    said_by("export", "--run", str(folder), "--format", "merged", "--out", str(merged))
    said_by("export", "--run", str(folder), "--format", "gguf", "--gguf-type", "q8_0", "--out", str(gguf))
    sizes = {"max_seq_len": 64, "max_global_batch_tokens": 128, "max_gpu_mem_gib": 5, "max_host_mem_gib": 12}
    with from_pretrained(merged, dtype="float32", device="cpu", mode="lora", **sizes) as engine:
        own = engine.evaluate(batch).loss
    (file,) = gguf.glob("*.gguf")
    return {
        "loss": own, "loss_of_transformers": loss_of_transformers(merged, batch)[0],
        "gguf_bytes": file.stat().st_size, "answer_of_gguf": answer(str(file)),
    }  # fmt: skip


def main() -> None:
    """Measure, and write the result after each part."""
    from tests.real.gemma3 import joined  # noqa: PLC0415, of the checkout alone

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    path = parser.parse_args().json
    with tempfile.TemporaryDirectory() as place:
        weights = joined(Path(place))
        if weights is None:
            raise SystemExit("the weights are missing: tests/real/gemma3.py tells how to get them")
        folder = open_model(weights).weights_folder
        assert folder is not None
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        batch = [tokenizer(text).input_ids for text in TEXTS]
        found: dict[str, Any] = {"question": QUESTION, "answer_before": answer(str(weights)), "ways": {}}
        found["parity"] = parity(folder, batch)
        for number, (way, flags) in enumerate(WAYS.items()):
            run = Path(place, f"run-{number}")
            found["ways"][way] = train(weights, flags, run)
            found["ways"][way]["answer"] = answer(str(run))
            found["ways"][way]["resume_gives_the_bits"] = resumed(weights, flags, run)
            print(way, json.dumps(found["ways"][way]), flush=True)
            if "bfloat16" in way and "lora" in flags and "nf4" not in flags:
                found["export"] = exported(run, batch)
            write_json(path, found)
            shutil.rmtree(run)


if __name__ == "__main__":
    main()
