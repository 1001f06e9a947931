"""The README.md of an export: what a hub shows as its model card. It names no folder of the machine that trained."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from flexengine.checkpoint.layout import RUN_FILE
from flexengine.options.train_config import EVAL_LOG_FILE, LOG_FILE, PLAN_FILE, TrainConfig
from flexengine.plan import Plan
from flexengine.reports.plan_text import describe
from flexengine.run.folder import run_record
from flexengine.wording import without_folders

CARD = "README.md"
MOST_ROWS = 12
"""Rows of the table of losses: of longer runs every so many steps are told, and the last one."""
OPTIONS = (
    *("mode", "steps", "max_seq_len", "max_global_batch_tokens", "lr", "optimizer", "dtype"),
    *("matmul_dtype", "seed", "max_gpu_mem_gib", "max_host_mem_gib"),
)
"""Options that tell most of a run; flexengine_run.json has all of them."""


def beside_export(
    config: TrainConfig, made_from: Mapping[str, Any], num_steps: int, merged: bool | None = None
) -> dict[str, str]:
    """What goes with a model that a run made, as texts by file name: the record of the run and the card."""
    card = model_card(config, made_from, num_steps, adapters=config.mode != "full" and not merged)
    return {RUN_FILE: run_record(config, num_steps), CARD: card}


def model_card(config: TrainConfig, made_from: Mapping[str, Any], num_steps: int, adapters: bool) -> str:
    """Write the card of what a run trained, in Markdown with the fields that a hub reads.

    made_from: as of the engine; num_steps: updates taken; adapters: whether the export is of adapters alone. Losses and
    plan come from the run folder, as far as they are there.
    """
    base = made_from.get("base", {})
    repo = base.get("repo")
    name = without_folders(config.model) or base.get("name", "a model")
    fields = [
        *([f"base_model: {repo}"] if repo else []),
        f"library_name: {'peft' if adapters else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags:\n- flexengine",
    ]
    what = "LoRA adapters of" if adapters else "A fine-tune of"
    data = [without_folders(str(one)) for one in _listed(config.dataset)] or [f"{config.data_source} tokens"]
    parts = [
        "---\n" + "\n".join(fields) + "\n---",
        f"# {name}, trained with flexengine",
        f"{what} {repo or name}{' at ' + base['revision'][:12] if base.get('revision') else ''}: {num_steps} steps on"
        f" {', '.join(data)}.",
        _table(("option", "value"), [(option, _shown(getattr(config, option, None))) for option in OPTIONS]),
        _losses(config, num_steps),
        _plan(config),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _shown(value: Any) -> str:
    return "found by itself" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _losses(config: TrainConfig, num_steps: int) -> str:
    """Tables of the training and validation losses up to a step; empty where there is no log."""
    steps = [line for line in _log(config, LOG_FILE) if line["step"] <= num_steps]
    stride = max(1, -(-len(steps) // MOST_ROWS))
    kept = [line for i, line in enumerate(steps) if (len(steps) - 1 - i) % stride == 0]
    rows = [(str(line["step"]), _number(line["loss"], ".4f"), _number(line.get("grad_norm"), ".4g")) for line in kept]
    evals = [line for line in _log(config, EVAL_LOG_FILE) if line["step"] <= num_steps]
    held = [(str(line["step"]), _number(line["loss"], ".4f")) for line in evals[-MOST_ROWS:]]
    tables = [
        "## Losses\n\n" + _table(("step", "loss", "norm of gradients"), rows) if rows else "",
        "Validation:\n\n" + _table(("step", "loss"), held) if held else "",
    ]
    return "\n\n".join(table for table in tables if table)


def _number(value: float | None, form: str) -> str:
    """A figure of a log, which is null where it was not finite."""
    return "not finite" if value is None else format(value, form)


def _log(config: TrainConfig, name: str) -> list[dict[str, Any]]:
    """The lines of a log; what is not whole is left out."""
    with contextlib.suppress(OSError, ValueError):
        text = (config.run_folder / name).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [line for line in lines if {"step", "loss"} <= line.keys()]
    return []


def _plan(config: TrainConfig) -> str:
    """The plan of the run, in words; empty where it is not there."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # a damaged one must not cost the export
        plan = Plan.from_json((config.run_folder / PLAN_FILE).read_text(encoding="utf-8"))
        return f"## Plan\n\n```\n{describe(plan, None)}\n```"
    return ""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
