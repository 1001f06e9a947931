"""Flags of the commands that take seconds to load, so that their help does not: nothing here imports torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from flexengine.commands.plan_flags import plan_parser
from flexengine.hardware.presets import PRESETS
from flexengine.hardware.profile import DEFAULT_SHAPE
from flexengine.options.flags import add_flag
from flexengine.options.job import Job
from flexengine.options.option import options_of
from flexengine.wording import FlagParser

DEVICE, DTYPE = options_of(Job)["device"], options_of(Job)["dtype"]


def models_parser() -> FlagParser:
    """Make the parser of `flexengine models`."""
    parser = FlagParser(
        prog="flexengine models",
        description="Lists the architectures that can be trained, by model_type in config.json, and the presets.",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser


def check_parser() -> FlagParser:
    """Make the parser of `flexengine check`."""
    parser = FlagParser(
        prog="flexengine check",
        description="Compares a model with transformers, op by op, forward and backward, and over some steps.",
    )
    parser.add_argument("model", metavar="DIR", help="a model folder with weights; a tiny one takes moments")
    parser.add_argument("--steps", type=int, default=1, help="steps of AdamW on both sides (default: 1)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of both (default: float32)")
    parser.add_argument(
        "--ids", type=_ids, default=(), help="tokens of the sequence, as 5,17,3 (default: 24 drawn ones)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python code that the folder brings")
    return parser


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected token ids with commas between them, such as 5,17,3"
        ) from None


def probe_parser() -> FlagParser:
    """Make the parser of `flexengine probe`."""
    parser = FlagParser(
        prog="flexengine probe",
        description="Measures in a few seconds what this machine attains, and remembers it for training and planning.",
    )
    add_flag(parser, DEVICE, help_text=f"{DEVICE.help} (default: {DEVICE.default})")
    parser.add_argument(
        "--model",
        metavar="DIR_OR_PRESET",
        help="time linear layers and attention of this model's sizes (default: those of an 8B model, "
        f"hidden {DEFAULT_SHAPE.hidden_size}, intermediate {DEFAULT_SHAPE.intermediate_size})",
    )
    add_flag(parser, DTYPE, help_text=f"{DTYPE.help} (default: {DTYPE.default})")
    parser.add_argument("--force", action="store_true", help="measure again, whatever is remembered")
    parser.add_argument(
        "--offload-dir",
        metavar="DIR",
        type=Path,
        help="measure the drive of this folder, too: 1 GiB is written there, read, and given back",
    )
    parser.add_argument("--preset", metavar="NAME", help=f"show a shipped profile instead: {', '.join(PRESETS)}")
    parser.add_argument("--json", metavar="FILE.json", type=Path, help="write the profile, for --gpu and hardware=")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the curves (needs matplotlib)")
    return parser


def report_parser() -> FlagParser:
    """Make the parser of `flexengine report`."""
    parser = FlagParser(
        prog="flexengine report",
        description="Draws a run as one self-contained page: the simulated step above the measured one on one time"
        " axis, seconds per stream and per kind of command, predicted and measured, loss and tokens/s step by step."
        " A run has a measured step if flexengine train was given --trace; without one the page shows what there is.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="the --output-dir of flexengine train")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="the page (default: RUN_FOLDER/report.html)")
    return parser


PARSERS: dict[str, Callable[[], FlagParser]] = {
    "plan": plan_parser,
    "models": models_parser,
    "check": check_parser,
    "probe": probe_parser,
    "report": report_parser,
}
"""The parsers that print a command's help before the command is loaded."""
