"""`flexengine plan`: what fits, where everything lives and how fast it would be, without a GPU and without weights."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flexengine.api import (
    COMPUTE_DTYPES,
    block_shape,
    check_sequence_length,
    choose_device,
    described,
    make_request,
)
from flexengine.commands.compare import Case, compare, comparison_json, comparison_table
from flexengine.commands.files import check_target, print_output, write_whole
from flexengine.config import LARGEST, OPTION_HELP, OPTION_TYPES, TrainConfig, choices_of, flag_of, value_type_of
from flexengine.hardware.presets import PRESETS, preset, with_memory
from flexengine.hardware.profile import HardwareProfile, read_profile
from flexengine.metrics import GIB, format_bytes
from flexengine.models.registry import open_model, preset_names
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, PlanError, Request
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.planner.search import make_plan
from flexengine.reports.picture import Picture
from flexengine.reports.plan_data import as_json, shortage_json, step_timeline
from flexengine.reports.plan_page import html_page, shortage_page
from flexengine.reports.plan_text import report, shortage_report
from flexengine.wording import FlagParser

DOES_NOT_FIT = 2
"""Exit status when nothing fits, as for any request that cannot be carried out."""
SAME_AS_TRAIN = (
    "max_seq_len",
    "max_global_batch_tokens",
    "dtype",
    "master_dtype",
    "grad_dtype",
    "optimizer_state_dtype",
    "matmul_dtype",
    "max_grad_norm",
    "chunk_tokens",
    "round_tokens",
    "recompute",
)
"""Options that mean what they mean to `train`."""


class Job(NamedTuple):
    """What is to be planned: a model, the options that `make_request` takes but for budgets, and the command line."""

    model: ModelSpec
    options: dict[str, object]
    command: str


def main(argv: Sequence[str]) -> int:
    """Plan what `argv` asks for, print it and write the files it names; returns the exit status: 2 if nothing fits.

    Raises: ValueError for what a person can correct.
    """
    arguments = _parser().parse_args(argv)
    _check(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    spec = open_model(arguments.model, needs_weights=False).spec
    model = described(spec, arguments.matmul_dtype, arguments.freeze)
    check_sequence_length(model, arguments.max_seq_len)
    options = {name: getattr(arguments, name) for name in SAME_AS_TRAIN}
    options["max_grad_norm"] = arguments.max_grad_norm or None
    job = Job(model, options, shlex.join(["python", "-m", "flexengine", "plan", *argv]))
    if arguments.compare:
        return _compare(arguments, job)
    profile = machine(arguments, model)
    request = _request(arguments, job, profile, arguments.max_gpu_mem_gib)
    try:
        plan = make_plan(model, request, profile)
    except ShortageError as error:
        return _does_not_fit(arguments, job, profile, error)
    return _fits(arguments, job, Picture(plan, model, profile))


def _fits(arguments: argparse.Namespace, job: Job, picture: Picture) -> int:
    print_output(json.dumps(as_json(picture), indent=1) if arguments.json else report(picture))
    if arguments.timeline is not None:
        _write(arguments, "timeline", step_timeline(picture))
    if arguments.html is not None:
        _write(arguments, "html", html_page(picture, job.command))
    if arguments.plan_json is not None:
        _write(arguments, "plan_json", picture.plan.to_json() + "\n")
    return 0


def _does_not_fit(arguments: argparse.Namespace, job: Job, profile: HardwareProfile, error: ShortageError) -> int:
    """Tell what is missing and what would fit; the first remedy is planned in full, so that its speed is known."""
    planned = _first_planned(job.model, profile, error)
    if arguments.json:
        print_output(json.dumps(shortage_json(error), indent=1))
    print(f"flexengine plan: {shortage_report(error, planned)}", file=sys.stderr)
    if arguments.html is not None:
        _write(arguments, "html", shortage_page(error, profile, job.command))
    paths = {f"--{option.replace('_', '-')}": getattr(arguments, option) for option in ("timeline", "plan_json")}
    named = [f"{flag} {path}" for flag, path in paths.items() if path is not None]
    if named:
        print(f"not written: nothing fits ({', '.join(named)})", file=sys.stderr)
    return DOES_NOT_FIT


def _first_planned(model: ModelSpec, profile: HardwareProfile, error: ShortageError) -> Plan | None:
    try:
        return make_plan(model, error.remedies[0].request, profile) if error.remedies else None
    except PlanError:
        return None


def _write(arguments: argparse.Namespace, option: str, text: str) -> None:
    path: Path = getattr(arguments, option)
    write_whole(f"--{option.replace('_', '-')}", path, lambda beside: beside.write_text(text, encoding="utf-8"))
    print(f"wrote {path}", file=sys.stderr)


# ---- machine and request ---------------------------------------------------------------------------------------


def machine(arguments: argparse.Namespace, model: ModelSpec) -> HardwareProfile:
    """The profile that --gpu names, or of this machine; with the host memory of --host-mem-gib."""
    profile = named_profile(arguments.gpu) if arguments.gpu is not None else _this_machine(arguments, model)
    if arguments.device == "cpu" and profile.device_type != "cpu":
        raise ValueError(f"--device cpu plans for a CPU, but --gpu {arguments.gpu} is a GPU; leave one of them out")
    if arguments.host_mem_gib is not None:
        if arguments.host_mem_gib * GIB < profile.host_base_bytes:
            taken = f"the process itself takes {format_bytes(profile.host_base_bytes)}"
            raise ValueError(f"--host-mem-gib {arguments.host_mem_gib:g}: {taken}; give more")
        profile = with_memory(profile, host_total_bytes=int(arguments.host_mem_gib * GIB))
    return profile


def named_profile(name: str) -> HardwareProfile:
    """A profile's JSON file, or a preset. Raises: ValueError."""
    return read_profile(Path(name)) if name.endswith(".json") else preset(name)


def _this_machine(arguments: argparse.Namespace, model: ModelSpec) -> HardwareProfile:
    """The remembered or measured profile of this machine's GPU, or of its CPU where --device cpu asks for that."""
    import torch  # noqa: PLC0415, only for machines that are measured

    if arguments.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(
            f"this machine has no usable NVIDIA GPU; name the card to plan for with --gpu: {', '.join(PRESETS)},"
            " or a file of `flexengine probe --json`; --device cpu plans for this machine's CPU"
        )
    from flexengine.hardware.probe import probe  # noqa: PLC0415

    return probe(choose_device(arguments.device), getattr(torch, arguments.dtype), block_shape(model))


def _request(arguments: argparse.Namespace, job: Job, profile: HardwareProfile, gpu_gib: float | None) -> Request:
    budgets = {"max_gpu_mem_gib": gpu_gib, "max_host_mem_gib": arguments.max_host_mem_gib}
    return make_request(profile, profile.device_type, **budgets, **job.options)  # pyright: ignore[reportArgumentType]


# ---- several machines ------------------------------------------------------------------------------------------


def _compare(arguments: argparse.Namespace, job: Job) -> int:
    cases = [_case(arguments, job, text) for text in arguments.compare]
    rows = compare(job.model, cases)
    print_output(json.dumps(comparison_json(rows), indent=1) if arguments.json else comparison_table(rows))
    return 0 if any(row.plan is not None for row in rows) else DOES_NOT_FIT


def _case(arguments: argparse.Namespace, job: Job, text: str) -> Case:
    """ "24": that budget on the card of --gpu; "l40s": a card; "l40s:24": both."""
    name, colon, budget = text.rpartition(":") if _budget_in(text) is not None else (text, "", "")
    named = argparse.Namespace(**{**vars(arguments), "gpu": name or arguments.gpu})
    profile = machine(named, job.model)
    gpu_gib = float(budget) if budget else arguments.max_gpu_mem_gib
    label = f"{budget} GiB" if not name else f"{name}:{budget}" if colon else name
    return Case(label, profile, _request(arguments, job, profile, gpu_gib))


def _budget_in(case: str) -> float | None:
    """The GiB that a case of --compare ends in; None if it names a card alone."""
    try:
        return float(case.rpartition(":")[2])
    except ValueError:
        return None


# ---- options ---------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="flexengine plan",
        description="Plans a training step and predicts its speed; needs no GPU and no weights, and loads nothing.",
        epilog=f"Presets of models: {', '.join(f'preset:{name}' for name in preset_names())}.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR_OR_PRESET",
        help="Hugging Face model folder (a config.json is enough), or preset:NAME (required)",
    )
    parser.add_argument("--mode", choices=["full"], default="full", help=f"{OPTION_HELP['mode']} (default: full)")
    machine_options = parser.add_argument_group("machine and budgets")
    machine_options.add_argument(
        "--gpu",
        metavar="NAME_OR_FILE",
        help=f"card to plan for: {', '.join(PRESETS)}, or a JSON file of `flexengine probe --json` (default: this"
        " machine, measured once and remembered)",
    )
    machine_options.add_argument(
        "--device",
        choices=["auto", "cpu"],
        default="auto",
        help="cpu = plan for this machine's CPU (default: auto, the GPU)",
    )
    for flag, text in (
        ("--host-mem-gib", "host memory of the machine in GiB, and the host budget (default: what the profile has)"),
        ("--max-gpu-mem-gib", "GPU memory budget of the process in GiB (default: all of the card)"),
        ("--max-host-mem-gib", "host memory budget of the process in GiB (default: all of the machine)"),
    ):
        machine_options.add_argument(flag, type=_positive_number, metavar="X", help=text)
    work = parser.add_argument_group("work and numerics, as in train")
    for name in SAME_AS_TRAIN:
        _add_shared(work, name)
    work.add_argument("--freeze", nargs="+", default=(), metavar="NAME", help=OPTION_HELP["freeze"])
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="print everything as JSON, sizes in bytes, times in seconds"
    )
    for name, text in (
        ("timeline", "write the simulated step as a Chrome trace (open it in Perfetto)"),
        ("html", "write the report as one self-contained page"),
        ("plan-json", "write the plan itself, as a run folder has it"),
    ):
        suffix = "html" if name == "html" else "json"
        output.add_argument(f"--{name}", type=Path, metavar=f"FILE.{suffix}", help=text)
    output.add_argument(
        "--compare",
        nargs="+",
        metavar="CASE",
        help="plan several cases and print one table: budgets in GiB (12 16 24), cards (rtx4090 l40s), or both"
        " (rtx4090:16)",
    )
    return parser


def _add_shared(group: argparse._ArgumentGroup, name: str) -> None:
    """A flag of TrainConfig with its type, choices, help and default."""
    kind, default = OPTION_TYPES[name], TrainConfig.__dataclass_fields__[name].default
    text = OPTION_HELP[name].replace("%", "%%")
    if default is not None:
        text = f"{text.split(' (default:')[0]} (default: {default})"
    choices = COMPUTE_DTYPES if name == "dtype" else choices_of(kind)
    value = _positive_count if value_type_of(kind) is int else value_type_of(kind)
    metavar = None if choices else "N"
    group.add_argument(flag_of(name), type=value, choices=choices, default=default, metavar=metavar, help=text)


def _positive_count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):  # NaN too
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _check(arguments: argparse.Namespace) -> None:
    """Everything that can be known to be wrong before anything is planned."""
    files = {flag: getattr(arguments, flag.replace("-", "_")) for flag in ("timeline", "html", "plan-json")}
    for flag, path in files.items():
        check_target(f"--{flag}", path)
        if path is not None and arguments.compare:
            raise ValueError(f"--compare prints one table of several plans; leave --{flag} out, or plan one of them")
    if not arguments.max_grad_norm >= 0:
        raise ValueError(
            f"--max-grad-norm must not be negative, got {arguments.max_grad_norm}"
        )  # in the words of train
    for name, largest in LARGEST.items():
        _check_largest(flag_of(name), getattr(arguments, name, None), largest)
    _check_largest("--host-mem-gib", arguments.host_mem_gib, LARGEST["max_host_mem_gib"])
    for case in arguments.compare or ():
        budget = _budget_in(case)
        if budget is not None and not budget > 0:
            raise ValueError(f"--compare {case}: a budget must be more than 0 GiB, got {budget:g}")
        _check_largest(f"--compare {case}: a budget", budget, LARGEST["max_gpu_mem_gib"])


def _check_largest(what: str, value: float | None, largest: int) -> None:
    if value is not None and value > largest:
        raise ValueError(f"{what} is at most {largest}, got {value}")  # in the words of train
