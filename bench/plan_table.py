"""Which model trains on which machine? Plans models on cards, host memories and ways to train: docs/plan_table.json.

python -m bench.plan_table [MODEL ...]    # plans these anew and keeps the rest; each has 36 plans of two seconds

docs/plan_table.js shows the file in a browser. A cell is what `flexengine plan` says with the flags shown there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from flexengine.commands.plan import Asked, machine, request_of
from flexengine.commands.plan_flags import parse
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.planner.planner import make_plan
from flexengine.request import described

TABLE = Path(__file__).resolve().parents[1] / "docs/plan_table.json"
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-14b", "qwen3-32b", "llama-3.1-70b")
CARDS = {
    "8 GiB (rates of an RTX 3090)": "--gpu rtx3090 --max-gpu-mem-gib 7.5",
    "24 GiB (RTX 4090)": "--gpu rtx4090",
    "32 GiB (RTX 5090)": "--gpu rtx5090",
    "80 GiB (H100)": "--gpu h100-80",
}
HOSTS_GIB = (32, 64, 128)
WAYS = {
    "all weights": "--optimizer-state-dtype bfloat16",
    "LoRA": "--mode lora",
    "LoRA on an NF4 base (QLoRA)": "--mode lora --base-dtype nf4",
}
STEP = "--max-seq-len 2048 --max-global-batch-tokens 65536"


def flags_of(model: str, card: str, host_gib: int, way: str) -> str:
    """The flags of `flexengine plan` that a cell answers."""
    return f"--model preset:{model} {CARDS[card]} --host-mem-gib {host_gib} {WAYS[way]} {STEP}"


def cell(flags: str) -> dict[str, Any]:
    """What a plan promises, or the flags that would make it fit."""
    namespace, job, objective = parse(flags.split())
    model = described(open_model(namespace.model, needs_weights=False).spec, job)
    asked = Asked(model, job, namespace, flags, objective)
    profile = machine(asked, namespace.gpu)
    try:
        predicted = make_plan(asked.model, request_of(asked, job, profile), profile).predicted
    except ShortageError as error:
        return {"fits_with": [remedy.flags for remedy in error.remedies[:3]]}
    return {
        "tokens_per_s": round(job.max_global_batch_tokens / predicted.step_s),
        "gpu_gib": round(predicted.gpu_bytes / GIB, 1),
        "host_gib": round(predicted.host_bytes / GIB, 1),
        "limited_by": predicted.limiter,
    }


def main() -> None:
    """Plan the models that are named, or all, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", default=MODELS, help="names of model presets")
    before = json.loads(TABLE.read_text(encoding="utf-8"))["cells"] if TABLE.exists() else {}
    for model in parser.parse_args().model:
        before[model] = [
            [[cell(flags_of(model, card, host, way)) for way in WAYS] for host in HOSTS_GIB] for card in CARDS
        ]
        cells = {name: before[name] for name in MODELS if name in before}
        table = {"cards": CARDS, "hosts_gib": HOSTS_GIB, "ways": WAYS, "step": STEP, "cells": cells}
        TABLE.write_text(json.dumps(table, separators=(",", ":")) + "\n", encoding="utf-8")
        print(model, flush=True)


if __name__ == "__main__":
    main()
