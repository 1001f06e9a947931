"""`flexengine evaluate`: benchmarks of lm-eval on a model, a run or an adapter, within memory budgets."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexengine.commands.generate import add_images, add_longest, add_taken, opened, plan_for
from flexengine.commands.places import add_place
from flexengine.options.flags import positive_count
from flexengine.wording import FlagParser

BATCH_TOKENS = 16384
"""Tokens that are scored together; weights beyond the GPU budget stream once for each round of them."""
DEFAULT_ANSWERS = 16
WRITTEN = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
"""What a file of results holds of lm-eval's; the rest has local folders."""


def main(argv: Sequence[str]) -> int:
    """Score the model that a command line names; returns the exit status.

    Raises: ValueError for what a person can correct, PlanError where the budgets are too small,
    ModuleNotFoundError without lm-eval.
    """
    arguments = _parser().parse_args(argv)
    named = arguments.model
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise ValueError(f"--output {arguments.output}: there is no folder {arguments.output.parent}")
    from flexengine.api import build  # noqa: PLC0415, loads torch

    images = arguments.max_image_tokens
    spec, tokenizer = opened(arguments, images > 0)
    lm_eval, lm_eval_tasks = importlib.import_module("lm_eval"), importlib.import_module("lm_eval.tasks")  # an extra
    from flexengine.harness import FlexLM  # noqa: PLC0415

    tasks = _task_names(arguments.tasks)
    manager = lm_eval_tasks.TaskManager(include_defaults=not all(task.endswith(".yaml") for task in tasks))
    answers = DEFAULT_ANSWERS if _generates(manager, tasks, images > 0) else 0
    longest = min(arguments.max_seq_len, spec.longest_sequence or arguments.max_seq_len)
    with build(plan_for(arguments, spec, longest, max(longest, BATCH_TOKENS), answers, images)) as engine:
        model = FlexLM(engine, tokenizer, arguments.seed)
        found = lm_eval.simple_evaluate(
            model, tasks=tasks, task_manager=manager, limit=arguments.limit, num_fewshot=arguments.num_fewshot,
            apply_chat_template=arguments.apply_chat_template, log_samples=False, bootstrap_iters=arguments.bootstrap,
        )  # fmt: skip
    print(importlib.import_module("lm_eval.utils").make_table(found))
    if model.num_cut:
        print(f"{model.num_cut} texts lost their beginning, being longer than --max-seq-len {longest}")
    if arguments.output is not None:
        written = {"model": Path(named).name, **{name: found[name] for name in WRITTEN if name in found}}
        arguments.output.write_text(json.dumps(written, indent=2, default=str) + "\n", encoding="utf-8")
    return 0


def _task_names(tasks: list[str]) -> list[str]:
    """Tasks by name or file, with spaces or commas between them. Raises ValueError for a file that is not there."""
    names = [name for given in tasks for name in given.split(",") if name]
    missing = [name for name in names if name.endswith((".yaml", ".yml")) and not Path(name).is_file()]
    if missing:
        raise ValueError(f"--tasks {missing[0]}: no such file; give a task of lm-eval by name, or its YAML file")
    return names


def _generates(manager: Any, tasks: list[str], images: bool) -> bool:
    """Whether some task has the model answer.

    Raises ValueError for a task that lm-eval does not know, and without `images` for one that asks about some.
    """
    try:
        loaded = manager.load(tasks)["tasks"]
    except KeyError as error:
        raise ValueError(f"--tasks: lm-eval knows no {error}; give a task by name, or its YAML file") from None
    pictured = [name for name, task in loaded.items() if task.get_config("doc_to_image")]
    if pictured and not images:
        raise ValueError(
            f"--tasks: {', '.join(pictured)} asks about images; give --max-image-tokens N, for which the plan then has"
            " room"
        )
    return any(task.get_config("output_type") == "generate_until" for task in loaded.values())


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="flexengine evaluate",
        description="Runs benchmarks of lm-eval (pip install lm-eval) on a model within memory budgets.",
    )
    add_place(parser)
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="TASK",
        help="names of lm-eval's tasks, or YAML files of tasks, whose functions are run",
    )  # fmt: skip
    parser.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each question (default: the task's)"
    )
    parser.add_argument("--limit", type=positive_count, metavar="N", help="first questions of each task alone")
    parser.add_argument("--apply-chat-template", action="store_true", help="ask through the model's chat template")
    add_images(parser, "questions that are answered together")
    parser.add_argument(
        "--bootstrap",
        type=int,
        default=100,
        metavar="N",
        help="draws for standard errors of some metrics (default: 100)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the results to a file")
    add_longest(parser, "longest text, in tokens; longer contexts lose their beginning")
    add_taken(parser)
    return parser
