"""Does what plans of adapters, small bases and other optimizers promise happen? Predicted against measured.

    python -m bench.adapter_plans --json out.json     # all 12 plans, at most 200 s on one GPU
    python -m bench.adapter_plans --smoke --json out.json     # small models on the CPU: that everything runs

As bench.plan_accuracy, one process per plan: GPU bytes and resident set at their peaks, which must not exceed the
prediction, beside which they may be at most 5% less, and the median of the steps after two to warm up, within 10% of
the prediction. LEAST_STEPS and more steps are timed. Models have the layers of a published one, some fewer of them;
random weights and random tokens. A case that would begin after --limit-s is left out and said to be.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.environment import require_native_code, write_json
from bench.plan_accuracy import measured_row, run_in_own_process, summary, write_config

GIB = 2**30
HOST_GIB = 60.0
TIMED_STEPS = 3
LORA: dict[str, Any] = {"mode": "lora"}
EXPERTS = {**LORA, "lora_targets": ["all-linear", "all-experts"]}
MUON = {"optimizer": "muon", "optimizer_state_dtype": "bfloat16"}
CODES = {"optimizer_state_dtype": "int8"}


class Case(NamedTuple):
    """A model with so many layers (None: all), a GPU cap in GiB, a step, and the options of its job."""

    kind: str
    model: str
    layers: int | None
    cap_gib: float
    seq_len: int
    tokens: int
    options: dict[str, Any]


CASES = (
    Case("LoRA", "llama-3.2-1b", None, 2, 2048, 16384, LORA),
    Case("LoRA", "llama-3.2-1b", None, 4, 1024, 8192, LORA),
    Case("LoRA", "llama-3.2-3b", None, 6, 2048, 16384, LORA),
    Case("LoRA, nf4", "llama-3.2-1b", None, 2, 2048, 16384, {**LORA, "base_dtype": "nf4"}),
    Case("LoRA, nf4", "llama-3.2-3b", None, 4, 2048, 16384, {**LORA, "base_dtype": "nf4"}),
    Case("LoRA, fp8", "llama-3.2-3b", None, 5, 2048, 16384, {**LORA, "base_dtype": "fp8"}),
    Case("DoRA", "llama-3.2-1b", None, 4, 2048, 16384, {**LORA, "use_dora": True}),
    Case("Muon", "llama-3.2-1b", 8, 6, 2048, 32768, MUON),
    Case("AdamW, int8", "llama-3.2-1b", None, 6, 2048, 32768, CODES),
    Case("Muon, int8", "llama-3.2-1b", None, 8, 2048, 32768, {**MUON, **CODES}),
    Case("experts' LoRA", "olmoe-1b-7b", 4, 4, 2048, 16384, EXPERTS),
    Case("experts' LoRA, nf4", "olmoe-1b-7b", 8, 6, 2048, 16384, {**EXPERTS, "base_dtype": "nf4"}),
)
SMALL = {
    "llama-3.2-1b": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "olmoe-1b-7b": {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4},
}
"""Sizes of the models of --smoke, instead of the published ones."""
SMALL["llama-3.2-3b"] = SMALL["llama-3.2-1b"]


def smoke(case: Case) -> Case:
    """Give the same kind of plan for a small model on the CPU."""
    options = {**case.options, "device": "cpu", "lora_rank": 4} if "mode" in case.options else case.options
    return case._replace(layers=2, cap_gib=1, seq_len=32, tokens=128, options={**options, "device": "cpu"})


def write_model(case: Case, folder: Path) -> None:
    """Write the config of a case's model, whose weights are random."""
    changes = {"vocab_size": 256, "head_dim": 16, **SMALL[case.model]} if case.options.get("device") == "cpu" else {}
    write_config(case.model, case.layers, folder, changes)


def run_case(case: Case) -> dict:
    """Plan, load and train a few steps in this process; returns the row."""
    from flexengine.api import prepare  # noqa: PLC0415

    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_model(case, Path(folder))
        prepared = prepare(
            folder,
            init="random",
            max_seq_len=case.seq_len,
            max_global_batch_tokens=case.tokens,
            max_gpu_mem_gib=case.cap_gib,
            max_host_mem_gib=HOST_GIB if case.options.get("device") != "cpu" else 4.0,
            **case.options,
        )
        row = measured_row(prepared, None, TIMED_STEPS)
    return {**case._asdict(), **row, "wall_s": time.perf_counter() - began_s}


def line(row: dict) -> str:
    """One plan as a row of a Markdown table; memory in GiB as measured / predicted."""
    layers = "" if row["layers"] is None else f", {row['layers']} layers"
    case = f"{row['kind']} | {row['model']}{layers} | {row['cap_gib']:g} | {row['tokens']}"
    if "failed" in row:
        return f"| {case} | failed: {row['failed'].splitlines()[-1]} |"
    memory = " | ".join(
        "-" if row[f"{place}_bytes"] is None
        else f"{row[f'{place}_bytes'] / GIB:.2f} / {row[f'predicted_{place}_bytes'] / GIB:.2f}"
        for place in ("gpu", "host")
    )  # fmt: skip
    error = 100 * (row["predicted_step_s"] / row["step_s"] - 1)
    return f"| {case} | {memory} | {row['step_s']:.3f} | {row['predicted_step_s']:.3f} | {error:+.1f}% |"


def main() -> None:
    """Run the cases one after another, print a table, write every row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small models on the CPU, whose figures say nothing")
    parser.add_argument("--limit-s", type=float, default=190.0, help="start no case after so many seconds")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the cases to run, from 0")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_case(Case(*json.loads(args.one)))))
        return
    require_native_code("bench.adapter_plans")
    began_s, rows = time.perf_counter(), []
    print("| kind | model | GPU cap | tokens/step | GPU GiB | host GiB | step s | predicted s | error |")
    print("|" + "---|" * 9)
    for case in [CASES[number] for number in args.only] if args.only else CASES:
        if time.perf_counter() - began_s > args.limit_s:
            rows.append({**case._asdict(), "failed": f"not begun within {args.limit_s:g} s"})
        else:
            rows.append(run_in_own_process(smoke(case) if args.smoke else case, "bench.adapter_plans"))
        print(line(rows[-1]), flush=True)
        write_json(args.json, {"summary": summary(rows), "wall_s": time.perf_counter() - began_s, "rows": rows})
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
