"""`flexengine export`: makes a model of a run's checkpoint, as `train --save` does at the end."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.config import CONFIG_FILE, FINAL_FOLDER, TrainConfig
from flexengine.flags import add_flag, from_flags
from flexengine.options import options_of
from flexengine.wording import FlagParser

if TYPE_CHECKING:
    from flexengine.optim import Optimizer

TAKEN = [options_of(TrainConfig)[name] for name in ("max_gpu_mem_gib", "max_host_mem_gib", "device")]
"""Options that may differ from those of the run: no bit depends on them."""


def main(argv: Sequence[str]) -> int:
    """Export the checkpoint that a command line names; returns the exit status.

    Raises: ValueError for what a person can correct, PlanError where the budgets are too small.
    """
    arguments = _parser().parse_args(argv)
    config = _config_of(arguments)
    from flexengine.api import build, prepare_job  # noqa: PLC0415, loads torch
    from flexengine.checkpoint.layout import RUN_FILE  # noqa: PLC0415
    from flexengine.resuming import load_point, resume_points  # noqa: PLC0415
    from flexengine.run_folder import run_record  # noqa: PLC0415

    output = config.run_folder / FINAL_FOLDER if arguments.output is None else arguments.output
    if output.exists():
        raise ValueError(f"{output} exists; choose another --output or remove it")
    points = resume_points(replace(config, resume=str(arguments.checkpoint or config.run_folder)))
    planned = prepare_job(config.model, points[0].pinned(config).as_job())
    with build(planned, _optimizer_of(points[0].engine["optimizer"])) as engine:
        point = load_point(engine, points)
        engine.save_pretrained(output, beside={RUN_FILE: run_record(config, point.step)})
    print(f"model after step {point.step}: {output}")
    return 0


def _config_of(arguments: argparse.Namespace) -> TrainConfig:
    """Read the options of the run, with those of the command line in their place."""
    path = arguments.run / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"--run {arguments.run} is no run folder (no {CONFIG_FILE}); give the --output-dir of a run")
    config = TrainConfig.from_yaml(path.read_text(encoding="utf-8"))
    return replace(config, output_dir=str(arguments.run), **from_flags(TAKEN, vars(arguments)))


def _optimizer_of(saved: dict[str, Any]) -> Optimizer:
    """Make the optimizer that a checkpoint was saved with, as its states are loaded, too."""
    from flexengine.optim import OPTIMIZERS  # noqa: PLC0415, loads torch

    kinds: dict[str, Any] = {kind.__name__: kind for kind in OPTIMIZERS.values()}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return kinds[str(options.pop("name"))](**options)


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="flexengine export",
        description="Makes a Hugging Face folder of a checkpoint, such as that of a run that was stopped. It plans and"
        " loads the model as the run did, so it takes the same memory.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--run", type=Path, required=True, metavar="RUN_FOLDER", help="the --output-dir of a run")
    parser.add_argument(
        "--checkpoint", type=Path, default=None, metavar="FOLDER", help="its checkpoints/step-N (default: the newest)"
    )
    parser.add_argument(
        "--output", type=Path, default=None, metavar="FOLDER", help="where the model goes (default: final/ of the run)"
    )
    for option in TAKEN:
        add_flag(parser, option, help_text=f"{option.help} (default: as in the run)")
    return parser
