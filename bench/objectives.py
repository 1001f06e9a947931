"""How long do steps of an objective take beside their predictions, and do they keep to the budgets of their plan?

    python -m bench.objectives dpo --json dpo.json
    python -m bench.objectives grpo --dataset gsm8k_train.jsonl --json grpo.json
    python -m bench.objectives dpo --model preset:demo --mode full --device cpu --max-seq-len 64 --json small.json

Each is one run of `flexengine train` on a model with random weights, and the figures are those of its log. Flags that
are not named here go to `train` and take the place of what stands in RUNS. Presets have no tokenizer, so texts are
tokenized by the bundled one. dpo learns pairs of random words of a length just below --max-seq-len, and their
reference is computed before the first step. grpo answers the first questions of GSM8K; gsm8k_rewards.py judges.

A run corrects its predictions after step 3 (or 4), and of grpo after every step: `plain` are the steps of before, whose
prediction is that of the plan. SIGINT ends a run after its step, and what was measured is written.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.environment import require_native_code, write_json
from flexengine import cli
from flexengine.metrics import TIMED_STEP
from flexengine.models.registry import ASSETS
from flexengine.options.train_config import LOG_FILE
from flexengine.plan import Plan
from flexengine.run.recording import reviewed_step

GIB = 2**30
REWARDS = Path(__file__).with_name("gsm8k_rewards.py")
RUNS: dict[str, dict[str, Any]] = {
    "dpo": {
        "model": "preset:llama-3.1-8b", "mode": "lora", "max-gpu-mem-gib": 24, "max-host-mem-gib": 64,
        "max-global-batch-tokens": 32768, "steps": 6, "lr": 1e-5,
    },
    "grpo": {
        "model": "preset:qwen2.5-0.5b", "mode": "lora", "max-gpu-mem-gib": 12, "max-host-mem-gib": 32,
        "max-global-batch-tokens": 20480, "steps": 20, "lr": 1e-4, "num-generations": 8, "max-completion-length": 32,
        "max-records": 200,
    },
}  # fmt: skip
"""Options of `train` for each objective."""
KEPT = ("step", "loss", "num_tokens", "step_s", "predicted_step_s", "tokens_per_s", "gpu_peak_bytes", "host_peak_bytes")
"""What a row has of every step, beside what the objective tells."""


def write_pairs(path: Path, count: int, max_seq_len: int) -> None:
    """Write records of random words, whose two conversations have 85 to 95% of `max_seq_len` tokens."""
    lines = (ASSETS / "demo" / "demo_instructions.jsonl").read_text(encoding="utf-8").splitlines()
    words = [word for line in lines for word in json.loads(line)["output"].split()]
    tokens = len(Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json")).encode(" ".join(words)).ids)
    draw, most = random.Random(0), 0.95 * max_seq_len * len(words) / tokens

    def answer() -> str:
        return " ".join(draw.choices(words, k=int(most * draw.uniform(0.9, 1.0)) - 8))

    records = [{"prompt": words[i], "chosen": answer(), "rejected": answer()} for i in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def command_of(args: argparse.Namespace, flags: list[str], scratch: Path) -> list[str]:
    """The command line of `train`; flags of a person's own stand last and win."""
    options = {"objective": args.objective, "max-seq-len": args.max_seq_len, **RUNS[args.objective]}
    if args.objective == "dpo":
        options["dataset"] = scratch / "pairs.jsonl"
        write_pairs(options["dataset"], args.pairs, args.max_seq_len)
    options |= {"output-dir": scratch / "run", "data-cache": scratch / "cache"}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    rewards = ["--rewards", f"{REWARDS}:right", f"{REWARDS}:even"] if args.objective == "grpo" else []
    return ["train", *given, *rewards, *flags]


def figures(objective: str, folder: Path) -> dict[str, Any]:
    """What a run's folder says of it: a row of every step, medians, and peaks beside budgets and promises."""
    plan = Plan.from_json((folder / "plan.json").read_text())
    lines = [json.loads(line) for line in (folder / LOG_FILE).read_text().splitlines()]
    rows = [{name: line[name] for name in line if name in KEPT or _is_detail(name)} for line in lines]
    corrected_after = 1 if objective == "grpo" else reviewed_step(plan)
    settled = [row for row in rows if row["step"] > (0 if len(rows) <= TIMED_STEP else TIMED_STEP)]
    plain = [row for row in rows if row["step"] <= corrected_after and (row["step"] != TIMED_STEP)]
    request, predicted, last = plan.request, plan.predicted, lines[-1]
    return {
        "model": plan.model,
        "budgets_gib": {"gpu": in_gib(request.max_gpu_bytes), "host": in_gib(request.max_host_bytes)},
        "promised_gib": {"gpu": in_gib(predicted.gpu_bytes), "host": in_gib(predicted.host_bytes)},
        "peaks_gib": {"gpu": in_gib(last["gpu_peak_bytes"]), "host": in_gib(last["host_peak_bytes"])},
        "plan": {"chunk_tokens": plan.chunk_tokens, "round_tokens": plan.round_tokens, "full_step_s": predicted.step_s},
        "settled": medians(settled),
        "plain": {str(row["step"]): off(row) for row in plain},
        "steps": rows,
    }


def _is_detail(name: str) -> bool:
    return name.startswith(("reward", "generation_s", "predicted_gen", "completion", "ended", "clipped", "kl"))


def in_gib(num_bytes: int | None) -> float | None:
    """Bytes in GiB; None stays None."""
    return None if num_bytes is None else num_bytes / GIB


def off(row: dict[str, Any]) -> float:
    """What a step took beyond its prediction, as a share of it."""
    return row["step_s"] / row["predicted_step_s"] - 1


def medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of seconds, of how far they are off, and of the parts that a step on completions has."""
    found = {name: statistics.median(row[name] for row in rows) for name in ("step_s", "predicted_step_s")}
    found["off_prediction"] = statistics.median(off(row) for row in rows)
    if "generation_s" in rows[0]:
        for row in rows:
            row["training_s"] = row["step_s"] - row["generation_s"] - row["rewarding_s"]
        names = ("generation_s", "predicted_generation_s", "rewarding_s", "training_s")
        found |= {name: statistics.median(row[name] for row in rows) for name in names}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("objective", choices=list(RUNS))
    parser.add_argument("--pairs", type=int, default=96, help="of dpo; they are trained again where steps need more")
    parser.add_argument("--max-seq-len", type=int, default=1024)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args, flags = parser.parse_known_args()
    require_native_code("bench.objectives")
    with tempfile.TemporaryDirectory() as scratch:
        status = cli.main(command_of(args, flags, Path(scratch)))
        folder = Path(scratch) / "run"
        if not (folder / LOG_FILE).is_file():
            sys.exit(status)
        found = figures(args.objective, folder)
    print(json.dumps({name: value for name, value in found.items() if name != "steps"}, indent=1))
    write_json(args.json, found)
    sys.exit(status)


if __name__ == "__main__":
    main()
