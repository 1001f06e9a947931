"""A plan for programs to read: the JSON of `plan --json`, and simulated and measured steps as Chrome traces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from flexengine.plan import Plan, Prediction
from flexengine.planner.feasibility.remedies import budget_notes
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.reports.bits import bits_digest
from flexengine.reports.memory_over_time import MemorySeries
from flexengine.reports.picture import Picture
from flexengine.reports.plan_decisions import GROUP_DATA, host_bytes_of_gpu, input_place, output_place
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.timeline import (
    MEASURED,
    PROCESS,
    SIMULATED,
    Event,
    TimedRun,
    command_events,
    counter_event,
    drawn_streams,
    part_about,
    run_events,
    trace_json,
    trace_pieces,
    track_events,
)


def as_json(picture: Picture) -> dict[str, Any]:
    """Give everything about a plan as JSON values; sizes in bytes, times in seconds."""
    plan, p, request = picture.plan, picture.plan.predicted, picture.plan.request
    return {
        "fits": True,
        "model": plan.model,
        "bits": bits_digest(picture.model, plan),
        "parameters": picture.model.num_parameters,
        "request": asdict(request),
        "hardware": picture.profile.to_dict(),
        "notes": budget_notes(request, picture.profile),
        "predicted": {
            "step_s": p.step_s,
            "after_clipping_s": p.after_clipping_s or p.step_s,
            "free_step_s": p.free_step_s or p.step_s,
            "tokens_per_s": picture.tokens_per_s,
            "effective_flops_per_s": picture.effective_flops_per_s,
            "recompute_share": p.recompute_share,
            "busy_s": p.busy_s,
            "seconds_by_cause": picture.seconds_by_cause,
            "limited_by": p.limiter,
        },
        # The plan's figure comes last and wins: a corrected profile may have changed it since.
        "speed_of_light": None
        if picture.bound is None
        else {**asdict(picture.bound), "seconds": p.speed_of_light_s, "share_reached": picture.light_share},
        "sizes": {
            "chunk_tokens": plan.chunk_tokens,
            "chunks_per_round": plan.chunks_per_round,
            "rounds": plan.num_rounds,
            "weight_slots": plan.weight_slots,
            "grad_slots": plan.grad_slots,
            "save_slots": plan.save_slots,
            "optimizer_slots": plan.optimizer_slots,
            "optimizer_tile": plan.optimizer_tile,
        },
        "memory": {
            "gpu": _memory(picture, picture.gpu, p.gpu_bytes, request.max_gpu_bytes, p.gpu_categories),
            "host": _memory(picture, picture.host, p.host_bytes, request.max_host_bytes, p.host_categories),
        },
        **({"drive_bytes": p.drive_bytes} if p.drive_bytes else {}),
        "layers": layer_rows(picture),
        "groups": group_rows(picture),
        **_several_gpus(picture),
    }


def _several_gpus(picture: Picture) -> dict[str, Any]:
    """Give what each of several GPUs has and does; nothing for one."""
    request, p = picture.plan.request, picture.plan.predicted
    gpus = request.ranks * request.nodes
    if gpus == 1:
        return {}
    return {
        "several_gpus": {
            "gpus_per_node": request.ranks,
            "nodes": request.nodes,
            "transport": picture.plan.transport,
            "tokens_per_s_per_gpu": picture.tokens_per_s / gpus,
            "tokens_per_s_per_node": picture.tokens_per_s / request.nodes,
            "node_host_bytes": p.host_bytes,
            "shared_host_bytes": p.shared_host_bytes,
            "host_bytes_per_gpu": host_bytes_of_gpu(picture.plan),
            "exchange_s": p.exchange_s,
            "exchange_wait_s": p.exchange_wait_s,
            "faster_with": {"gpus": p.fewer_gpus, "step_s": p.fewer_gpus_step_s} if p.fewer_gpus else None,
        }
    }


def _memory(
    picture: Picture, series: MemorySeries, used: int, budget: int, categories: dict[str, int]
) -> dict[str, Any]:
    step = picture.step
    return {
        "budget_bytes": budget,
        "bytes": used,
        "categories": categories,
        "over_time": {
            "parts": [
                {"name": part.name, "repeats": part.repeats, "start_s": start_s, "seconds": part.timing.total_s}
                for part, start_s in zip(step.parts, step.starts_s, strict=True)
            ],
            "times_s": list(series.times_s),
            "end_s": series.end_s,
            "bytes": {name: series.num_bytes[:, i].tolist() for i, name in enumerate(series.categories)},
        },
    }


def layer_rows(picture: Picture) -> list[dict[str, Any]]:
    """Give what every layer keeps from forward to backward, and where; layers without a backward pass keep nothing."""
    rows = []
    for layer, kept in zip(picture.model.layers, picture.plan.layers, strict=True):
        row: dict[str, Any] = {"name": layer.name, "kind": layer.kind}
        if layer.kind == "block":
            places = {op.name: output_place(op.name, kept) for op in layer.ops if layer.keeps}
            home = input_place(kept) if layer.keeps else None
            away = "drive" if kept.on_drive else "host"
            row |= {"input": home, "gpu": list(kept.keep_gpu), "host": [], away: list(kept.keep_host)}
            row["recomputed"] = [name for name, place in places.items() if place == "recomputed"]
        rows.append(row)
    return rows


def group_rows(picture: Picture) -> list[dict[str, Any]]:
    """Give where every parameter group's weights, gradients and optimizer states live, with their bytes.

    A home is null for what a frozen group does not have.
    """
    rows = []
    for group, planned in zip(picture.model.groups, picture.plan.groups, strict=True):
        layout = group_storage(group, picture.plan.request.numerics)
        names = [(data.name.removeprefix("optimizer "), data) for data in GROUP_DATA]
        homes = {name: data.home(planned) for name, data in names} | {"update": planned.update}
        sizes = {f"{name}_bytes": data.num_bytes(layout) for name, data in names}
        rows.append({"name": group.name, "parameters": group.numel, **homes, **sizes})
    return rows


def shortage_json(error: ShortageError) -> dict[str, Any]:
    """Give why nothing fits, and the requests that would, as JSON values."""
    needs, request = error.needs, error.request
    drive = {"drive": _missing(needs.drive_bytes, request.max_drive_bytes, {})} if request.max_drive_bytes else {}
    return {
        "fits": False,
        "reason": error.reason.value,
        "message": str(error),
        "request": asdict(request),
        "smallest_plan": {
            "gpu": _missing(needs.gpu_bytes, request.max_gpu_bytes, needs.gpu_categories),
            "host": _missing(needs.host_bytes, request.max_host_bytes, needs.host_categories),
            **drive,
        },
        "fits_with": [
            {"flags": remedy.flags, "note": remedy.note, "request": asdict(remedy.request)} for remedy in error.remedies
        ],
    }


def _missing(needed: int, budget: int, categories: dict[str, int]) -> dict[str, Any]:
    missing = max(0, needed - budget)
    return {"bytes": needed, "budget_bytes": budget, "missing_bytes": missing, "categories": categories}


def step_timeline(picture: Picture) -> str:
    """Write the simulated step as Chrome trace JSON (open it in Perfetto): commands by stream, and bytes in use."""
    step, predicted = picture.step, picture.plan.predicted
    streams = drawn_streams(part.program for part in step.parts)
    title = f"{picture.plan.model}, step of {predicted.step_s:.4g} s"
    events = track_events(f"{title}, rank 0" if step.others else title, streams)
    for part, start_s in zip(step.parts, step.starts_s, strict=True):
        events += command_events(part.program, part.timing, start_s)
    for rank, runs in enumerate(step.others, start=1):
        events += track_events(f"rank {rank}", streams, PROCESS + rank)
        for timed in runs:
            events += command_events(timed.run.program, timed.timing, timed.start_s, PROCESS + rank)
    events += _memory_counters("GPU memory (MiB)", picture.gpu) + _memory_counters("host memory (MiB)", picture.host)
    about = {
        "timeline": SIMULATED,
        "what": f"one simulated step: {step.about}",
        "plan": plan_digest(picture.plan),
        "model": picture.plan.model,
        "hardware": f"{picture.profile.name} ({picture.profile.source})",
        "parts": [
            part_about(part.name, part.repeats, part.program, part.timing, start_s)
            for part, start_s in zip(step.parts, step.starts_s, strict=True)
        ],
        "predicted_step_s": predicted.step_s,
    }
    return trace_json(events, about)


def measured_timeline(
    plan: Plan, runs: Sequence[TimedRun], about: Mapping[str, Any], others: Sequence[Sequence[Event]] = ()
) -> Iterator[str]:
    """Write a step that ran as Chrome trace JSON, in the format of the simulated one, with rounds at their real times.

    about: further metadata, such as the number of the step and its wall seconds. others: what further ranks ran, as
    events, drawn below.
    """
    # The text is yielded in pieces because a run may use its whole host budget: there is no room for all of it at once.
    # Rounds of a simulation are named by what they do; those that ran are numbered.
    names = [f"round {n}" if run.program.name == "round" else run.program.name for n, run in enumerate(runs, start=1)]
    parts = [part_about(name, 1, run.program, run.timing, run.start_s) for name, run in zip(names, runs, strict=True)]
    events = chain(run_events(f"{plan.model}, measured step", runs, PROCESS), *others)
    # `parts` stands last: a key of `about` must not replace it.
    about = {"timeline": MEASURED, "plan": plan_digest(plan), "model": plan.model, **about, "parts": parts}
    return trace_pieces(events, about)


def plan_digest(plan: Plan) -> str:
    """Identify a plan by 16 hex digits of its decisions; its prediction does not count."""
    # A corrected prediction must not make a plan another one: traces of both are still of one plan.
    decided = json.dumps(asdict(replace(plan, predicted=Prediction())), sort_keys=True)
    return hashlib.sha256(decided.encode()).hexdigest()[:16]


def _memory_counters(name: str, series: MemorySeries) -> list[Event]:
    return [
        # Whole MiB: counters with all digits would make up most of the file.
        counter_event(name, time_s, {c: int(b) >> 20 for c, b in zip(series.categories, row, strict=True)})
        for time_s, row in zip(series.times_s, series.num_bytes, strict=True)
    ]
