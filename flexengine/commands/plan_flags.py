"""The flags of `flexengine plan`: those of a job, as `train` has them, and what is planned for and written."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from flexengine.commands.files import check_target
from flexengine.hardware.drive_profile import ASSUMED_DRIVE
from flexengine.hardware.nodes import NETWORK_BYTES_PER_S
from flexengine.hardware.presets import PRESETS
from flexengine.models.preset_files import preset_names
from flexengine.options.flags import add_flag, from_flags, positive_count, positive_number
from flexengine.options.job import Job
from flexengine.options.objective import ObjectiveOptions
from flexengine.options.option import FlagWords, Words, check_needs, flag_of, options_of
from flexengine.options.other_names import translated_flags
from flexengine.options.train_config import TrainConfig
from flexengine.wording import FlagParser

DRIVE_RATES = "/".join(f"{rate / 1e9:g}" for rate in ASSUMED_DRIVE)


def drive_rates(text: str) -> tuple[float, float]:
    """Read READ/WRITE in GB/s as bytes per second. Raises: ValueError for anything else."""
    read, _, write = text.partition("/")
    return positive_number(read) * 1e9, positive_number(write or read) * 1e9


FILES = ("timeline", "html", "svg", "plan_json")
"""Flags that name a file to be written."""
BUDGETS = {
    "max_gpu_mem_gib": "GPU memory budget of the process in GiB (default: the card's less a reserve)",
    "max_host_mem_gib": "host memory budget of the process in GiB (default: the machine's less a reserve)",
}
"""Budgets mean what they mean to `train`, but nobody else's memory counts: what is planned for may be elsewhere."""
JOB = [option for option in options_of(Job).values() if option.decides_plan]
WORK = [option for option in JOB if option.name not in (*BUDGETS, "device")]
"""Options that mean exactly what they mean to `train`."""


OBJECTIVE = [
    options_of(ObjectiveOptions)[name]
    for name in ("objective", "num_generations", "max_completion_length", "num_iterations", "beta")
]
"""Options of an objective that say what a step consists of."""


class PlannedJob(Job):
    """A job whose messages speak of flags."""

    words: ClassVar[Words] = FlagWords()


class Parsed(NamedTuple):
    """The flags, the job that they describe, and what it is for."""

    flags: argparse.Namespace
    job: Job
    objective: ObjectiveOptions


def parse(argv: Sequence[str]) -> Parsed:
    """Read the flags. Raises: ValueError for what is wrong whatever the model is."""
    parser = plan_parser()
    known = {action.dest for action in parser._actions}
    argv = translated_flags(argv, known)
    _refuse_options_of_runs(argv, known)
    arguments = parser.parse_args(argv)
    _check_files(arguments)
    if arguments.network_gbit_per_s is not None and arguments.nodes == 1:
        raise ValueError("--network-gbit-per-s is about several nodes, and there is one; give --nodes, or leave it out")
    job = from_flags(JOB, vars(arguments))
    if arguments.offload_dir is not None and arguments.max_disk_gib is None:
        raise ValueError(f"--offload-dir {arguments.offload_dir}: say with --max-disk-gib how much of it may be taken")
    host = options_of(Job)["max_host_mem_gib"]
    _check_largest("--host-mem-gib", arguments.host_mem_gib, host.most)
    for case in arguments.compare or ():
        budget = budget_of_case(case)
        if budget is not None and not budget > 0:
            raise ValueError(f"--compare {case}: a budget must be more than 0 GiB, got {budget:g}")
        _check_largest(f"--compare {case}: a budget", budget, host.most)
    if arguments.compare and arguments.trades:
        raise ValueError("--compare prints one table of several plans; leave --trades out, or plan one of them")
    objective = ObjectiveOptions(**from_flags(OBJECTIVE, vars(arguments)))
    check_needs(objective, FlagWords())
    if arguments.compare and objective.objective != "sft":
        raise ValueError(
            f"--compare prints steps of sft, and --objective is {objective.objective}; plan one case, or leave"
            " --objective out"
        )
    return Parsed(arguments, PlannedJob(**job), objective)


def _refuse_options_of_runs(argv: Sequence[str], known: Collection[str]) -> None:
    """Raise ValueError for an option of `train` that no plan depends on."""
    for argument in argv:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in options_of(TrainConfig) and name not in known:
            raise ValueError(f"{flag_of(name)} is an option of train that no plan depends on; leave it out")


def budget_of_case(case: str) -> float | None:
    """The GiB that a case of --compare ends in; None if it names a card alone."""
    try:
        return float(case.rpartition(":")[2])
    except ValueError:
        return None


def _check_files(arguments: argparse.Namespace) -> None:
    for name in FILES:
        flag, path = flag_of(name), getattr(arguments, name)
        check_target(flag, path)
        if path is not None and arguments.compare:
            raise ValueError(f"--compare prints one table of several plans; leave {flag} out, or plan one of them")


def _check_largest(what: str, value: float | None, largest: float | None) -> None:
    if value is not None and largest is not None and value > largest:
        raise ValueError(f"{what} is at most {largest}, got {value}")  # in the words of train


def plan_parser() -> FlagParser:
    """Make the parser of `flexengine plan`."""
    parser = FlagParser(
        prog="flexengine plan",
        description="Plans a training step and predicts its speed; needs no GPU and no weights, and loads nothing.",
        epilog=f"Presets of models: {', '.join(f'preset:{name}' for name in preset_names())}.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR_OR_PRESET",
        help="Hugging Face model folder (a config.json is enough), an id on the hub (ORG/NAME[@REVISION], of which"
        " config and tokenizer are fetched), or preset:NAME (required)",
    )
    _add_machine(parser.add_argument_group("machine and budgets"))
    work = parser.add_argument_group("work and numerics, as in train")
    for option in WORK:
        add_flag(work, option, option.default, read=positive_count if option.value_type is int else None)
    objective = parser.add_argument_group("what a step is for, as in train")
    for option in OBJECTIVE:
        add_flag(objective, option, option.default)
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--gpu",
        metavar="NAME_OR_FILE",
        help=f"card to plan for: {', '.join(PRESETS)}, or a JSON file of `flexengine probe --json` (default: this"
        " machine, measured once and remembered)",
    )
    group.add_argument(
        "--device",
        choices=["auto", "cpu"],
        default="auto",
        help="cpu = plan for this machine's CPU (default: auto, the GPU)",
    )
    group.add_argument(
        "--host-mem-gib",
        type=positive_number,
        metavar="X",
        help="host memory of the machine in GiB, and the host budget (default: what the profile has)",
    )
    for name, text in BUDGETS.items():
        add_flag(group, options_of(Job)[name], read=positive_number, help_text=text)
    group.add_argument(
        "--offload-dir",
        metavar="DIR",
        help="as in train; planned with the rates of --drive-gb-per-s, so that it takes --max-disk-gib",
    )
    group.add_argument(
        "--drive-gb-per-s",
        type=drive_rates,
        metavar="READ/WRITE",
        help="rates of the drive that --max-disk-gib is about, in GB/s; read and written at once it has half its time"
        f" for each (default: {DRIVE_RATES}, assumed)",
    )
    _add_several(group)


def _add_several(group: argparse._ArgumentGroup) -> None:
    """Add the flags about several GPUs and nodes."""
    for flag, default, text in (
        ("--gpus", 1, "GPUs of each node; --max-gpu-mem-gib is each one's, --max-host-mem-gib all GPUs' of a node"),
        ("--nodes", 1, "nodes that train together"),
    ):
        group.add_argument(flag, type=positive_count, default=default, metavar="N", help=f"{text} (default: {default})")
    group.add_argument(
        "--host-gb-per-s",
        type=positive_number,
        metavar="X",
        help="rate of a node's host memory, which all its GPUs share, in GB/s (default: assumed of a preset, measured"
        " of a profile)",
    )
    group.add_argument(
        "--network-gbit-per-s",
        type=positive_number,
        metavar="X",
        help=f"rate of a node's network, each way, in Gbit/s (default: {NETWORK_BYTES_PER_S * 8 / 1e9:g}, assumed)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="print everything as JSON, sizes in bytes, times in seconds")
    for name, text in (
        ("timeline", "write the simulated step as a Chrome trace (open it in Perfetto)"),
        ("html", "write the report as one self-contained page"),
        ("svg", "write memory over the step as one picture"),
        ("plan_json", "write the plan itself, as a run folder has it"),
    ):
        suffix = "html" if name == "html" else "json"
        group.add_argument(flag_of(name), type=Path, metavar=f"FILE.{suffix}", help=text)
    group.add_argument(
        "--trades",
        action="store_true",
        help="also plan what would be faster (other types, larger budgets), and say what each changes; takes as long as"
        " up to eight plans",
    )
    group.add_argument(
        "--compare",
        nargs="+",
        metavar="CASE",
        help="plan several cases and print one table: budgets in GiB (12 16 24), cards (rtx4090 l40s), or both"
        " (rtx4090:16)",
    )
