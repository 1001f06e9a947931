"""`flexengine plan`: what fits, where everything lives and how fast it would be, without a GPU and without weights."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flexengine.commands.compare import Case, compare, comparison_json, comparison_table
from flexengine.commands.files import write_whole
from flexengine.commands.plan_flags import FILES, budget_of_case, parse
from flexengine.hardware.drive_profile import shared_drive
from flexengine.hardware.nodes import NETWORK_BYTES_PER_S, with_gpus
from flexengine.hardware.presets import PRESETS, named_profile, with_memory
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB, format_bytes
from flexengine.models.keep_dtype import with_coded_inputs
from flexengine.models.registry import ModelSource, open_model
from flexengine.models.spec import ModelSpec
from flexengine.options.job import Job
from flexengine.options.objective import ObjectiveOptions
from flexengine.options.option import flag_of
from flexengine.plan import CacheBytes, Plan, PlanError, Request
from flexengine.planner.feasibility.remedies import Remedy
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.planner.ranks.fewer import beside_fewer_gpus
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.reports.charts.memory_file import memory_svg
from flexengine.reports.picture import Picture
from flexengine.reports.plan_data import as_json, shortage_json, step_timeline
from flexengine.reports.plan_page import html_page, shortage_page
from flexengine.reports.plan_text import report, shortage_report
from flexengine.request import (
    budgets_found,
    described,
    make_request,
    probe_shape,
    with_cache,
    with_new_tokens,
    with_read_adapter,
    without_cache,
)
from flexengine.run.objective_price import CacheRoom, cache_room, price
from flexengine.run.trades import Trade, Trades, trades_report

DOES_NOT_FIT = 2
"""Exit status when nothing fits, as for any request that cannot be carried out."""
NUM_PLANNED = 2
"""Of what would fit, so many are planned, which takes seconds each."""


class Asked(NamedTuple):
    """What is to be planned: the model as the job trains it, the job, the other flags, the command, the objective."""

    model: ModelSpec
    job: Job
    flags: argparse.Namespace
    command: str
    objective: ObjectiveOptions


def main(argv: Sequence[str]) -> int:
    """Plan what `argv` asks for, print it and write the files it names; returns the exit status: 2 if nothing fits.

    Raises: ValueError for what a person can correct.
    """
    flags, job, objective = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    job = with_read_adapter(job)
    source = open_model(flags.model, needs_weights=False, trust_remote_code=job.trust_remote_code)
    model = described(with_new_tokens(source, job).spec, job)
    asked = Asked(model, job, flags, shlex.join(["python", "-m", "flexengine", "plan", *argv]), objective)
    if flags.compare:
        return _compare(asked)
    profile = machine(asked, flags.gpu)
    request = request_of(asked, job, profile)
    if found := budgets_found(job, request, profile, profile.device_type):
        print(found, file=sys.stderr)
    room = CacheRoom(CacheBytes(), fits=True)
    try:
        plan = _plan(asked, request, profile, room.caches)
        room = cache_room(objective, plan, model, profile)
        caches = room.caches
        plan = with_cache(plan, request, caches) if room.fits else _plan(asked, request, profile, caches)
    except ShortageError as error:
        status = _does_not_fit(asked, profile, error)
        print("" if room.fits else f"  {room.missing(job.max_seq_len)}\n", end="", file=sys.stderr)
        return status
    trades = _trades(asked, source, plan, profile) if flags.trades else None
    return _fits(asked, Picture(plan, model, profile), trades)


def _trades(asked: Asked, source: ModelSource, plan: Plan, profile: HardwareProfile) -> list[Trade]:
    """What would be faster, each planned by itself."""

    def case(job: Job) -> tuple[ModelSpec, Request]:
        return described(with_new_tokens(source, job).spec, job), request_of(asked, job, profile)

    network_bytes_per_s = _network_bytes_per_s(asked.flags)
    return Trades(asked.job, plan, profile, case).planned(
        lambda model, request: plan_for_ranks(model, request, profile, network_bytes_per_s)
    )


def _plan(asked: Asked, request: Request, profile: HardwareProfile, caches: CacheBytes) -> Plan:
    """The plan of all GPUs. caches: of the budgets, what it leaves to completions."""
    least = without_cache(request, caches)
    plan = plan_for_ranks(asked.model, least, profile, _network_bytes_per_s(asked.flags))
    return with_cache(beside_fewer_gpus(asked.model, plan, profile), request, caches)


def request_of(asked: Asked, job: Job, profile: HardwareProfile) -> Request:
    """What is asked of the planner for all GPUs together."""
    flags, device_type = asked.flags, profile.device_type
    return make_request(
        job, profile, device_type, flags.gpus, flags.nodes, asked.model.whole_sequences, whole_steps=True
    )


def _network_bytes_per_s(flags: argparse.Namespace) -> float:
    given = flags.network_gbit_per_s
    return NETWORK_BYTES_PER_S if given is None else given * 1e9 / 8


def _fits(asked: Asked, picture: Picture, trades: list[Trade] | None) -> int:
    priced = price(asked.objective, picture.plan, picture.model, picture.profile)
    objective = "" if priced is None else priced.describe()
    if asked.flags.json:
        more = {} if priced is None else {"objective": priced.as_json()}
        more |= {} if trades is None else {"trades": [trade._asdict() for trade in trades]}
        print(json.dumps(as_json(picture) | more, indent=1))
    else:
        traded = [] if trades is None else [trades_report(trades)]
        print("\n\n".join([report(picture), *([objective] if objective else []), *traded]))
    if asked.flags.timeline is not None:
        _write(asked, "timeline", step_timeline(picture))
    if asked.flags.html is not None:
        _write(asked, "html", html_page(picture, asked.command, objective))
    if asked.flags.svg is not None:
        _write(asked, "svg", memory_svg(picture))
    if asked.flags.plan_json is not None:
        _write(asked, "plan_json", picture.plan.to_json() + "\n")
    return 0


def _does_not_fit(asked: Asked, profile: HardwareProfile, error: ShortageError) -> int:
    """Tell what is missing and what would fit; the first remedies are planned in full, so that their speed is known."""
    planned = [_planned(asked, profile, remedy) for remedy in error.remedies[:NUM_PLANNED]]
    if asked.flags.json:
        print(json.dumps(shortage_json(error), indent=1))
    print(f"flexengine plan: {shortage_report(error, planned)}", file=sys.stderr)
    if asked.flags.html is not None:
        _write(asked, "html", shortage_page(error, profile, asked.command))
    paths = {name: getattr(asked.flags, name) for name in FILES if name != "html"}
    named = [f"{flag_of(name)} {path}" for name, path in paths.items() if path is not None]
    if named:
        print(f"not written: nothing fits ({', '.join(named)})", file=sys.stderr)
    return DOES_NOT_FIT


def _planned(asked: Asked, profile: HardwareProfile, remedy: Remedy) -> Plan | None:
    try:
        model = with_coded_inputs(asked.model, remedy.request.numerics.keep)
        return plan_for_ranks(model, remedy.request, profile, _network_bytes_per_s(asked.flags))
    except PlanError:
        return None


def _write(asked: Asked, name: str, text: str) -> None:
    path: Path = getattr(asked.flags, name)
    write_whole(flag_of(name), path, lambda beside: beside.write_text(text, encoding="utf-8"))
    print(f"wrote {path}", file=sys.stderr)


# ---- the machine ------------------------------------------------------------------------------------------------


def machine(asked: Asked, gpu: str | None) -> HardwareProfile:
    """The profile that `gpu` names, or of this machine; with the host memory of --host-mem-gib."""
    profile = named_profile(gpu) if gpu is not None else _this_machine(asked)
    if asked.job.device == "cpu" and profile.device_type != "cpu":
        raise ValueError(f"--device cpu plans for a CPU, but --gpu {gpu} is a GPU; leave one of them out")
    host_gb_per_s = asked.flags.host_gb_per_s
    profile = with_gpus(profile, asked.flags.gpus, None if host_gb_per_s is None else host_gb_per_s * 1e9)
    if asked.flags.drive_gb_per_s is not None:
        profile = profile.changed(**shared_drive(*asked.flags.drive_gb_per_s).values())
    gib = asked.flags.host_mem_gib
    if gib is not None:
        if gib * GIB < profile.memory.host_base_bytes:
            taken = f"the process itself takes {format_bytes(profile.memory.host_base_bytes)}"
            raise ValueError(f"--host-mem-gib {gib:g}: {taken}; give more")
        profile = with_memory(profile, host_total_bytes=int(gib * GIB))
    return profile


def _this_machine(asked: Asked) -> HardwareProfile:
    """The remembered or measured profile of this machine's GPU, or of its CPU where --device cpu asks for that."""
    import torch  # noqa: PLC0415, only for machines that are measured

    if asked.job.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(
            f"this machine has no usable NVIDIA GPU; name the card to plan for with --gpu: {', '.join(PRESETS)},"
            " or a file of `flexengine probe --json`; --device cpu plans for this machine's CPU"
        )
    from flexengine.hardware.devices import choose_device  # noqa: PLC0415
    from flexengine.hardware.probe import probe  # noqa: PLC0415

    return probe(choose_device(asked.job.device), getattr(torch, asked.job.dtype), probe_shape(asked.model))


# ---- several machines ------------------------------------------------------------------------------------------


def _compare(asked: Asked) -> int:
    cases = [_case(asked, text) for text in asked.flags.compare]
    rows = compare(asked.model, cases, _network_bytes_per_s(asked.flags))
    print(json.dumps(comparison_json(rows), indent=1) if asked.flags.json else comparison_table(rows))
    return 0 if any(row.plan is not None for row in rows) else DOES_NOT_FIT


def _case(asked: Asked, text: str) -> Case:
    """ "24": that budget on the card of --gpu; "l40s": a card; "l40s:24": both."""
    budget = budget_of_case(text)
    name, colon, number = text.rpartition(":") if budget is not None else (text, "", "")
    profile = machine(asked, name or asked.flags.gpu)
    job = asked.job if budget is None else replace(asked.job, max_gpu_mem_gib=budget)
    label = f"{number} GiB" if not name else f"{name}:{number}" if colon else name
    return Case(label, profile, request_of(asked, job, profile))
