"""A plan in words: the answer, the decisions, where time and bytes go, the bound; and why no plan fits."""

from __future__ import annotations

from collections.abc import Sequence

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes, format_seconds, format_tflops, format_tokens_per_s
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Prediction
from flexengine.planner.feasibility.remedies import budget_notes
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.reports.bits import bits_line
from flexengine.reports.memory_over_time import MemorySeries
from flexengine.reports.picture import Picture
from flexengine.reports.plan_decisions import decision_lines
from flexengine.reports.text_format import indented_columns, join_words, largest_first, of_each, percent


def describe(plan: Plan, model: ModelSpec | None) -> str:
    """Describe a plan in about a dozen lines: its decisions and its prediction. Simulates nothing."""
    return "\n".join([*decision_lines(plan, model), *_prediction_lines(plan)])


def brief(plan: Plan, model: ModelSpec) -> list[str]:
    """Tell what a plan takes and how fast it would be, in one line; of reproducible plans also what that costs."""
    p, request = plan.predicted, plan.request
    each, node = of_each(request)
    line = (
        f"plan: GPU {format_bytes(p.gpu_bytes)} of {format_bytes(request.max_gpu_bytes)}{each}, host"
        f" {format_bytes(p.host_bytes)} of {format_bytes(request.max_host_bytes)}{node}; predicted"
        f" {format_seconds(p.step_s)} per step, {format_tokens_per_s(request.max_global_batch_tokens / p.step_s)}"
        f"{light_words(p)}; limited by {p.limiter}"
    )
    return [line, *([bits_line(model, plan), *cost_of_rule_lines(plan)] if request.reproducible else [])]


def machine_line(profile: HardwareProfile, device_type: str, budgets: str) -> str:
    """Tell what a machine has, and which budgets were found on it."""
    gpu = f"{format_bytes(profile.memory.gpu_total_bytes)} GPU and " if device_type == "cuda" else ""
    found = f"; {budgets}" if budgets else ""
    return f"machine: {profile.name}, {gpu}{format_bytes(profile.memory.host_total_bytes)} host memory{found}"


def report(picture: Picture) -> str:
    """Everything that `flexengine plan` prints about a plan, in sections that an empty line separates."""
    plan, step_s = picture.plan, picture.plan.predicted.step_s
    notes = [f"note: {note}" for note in budget_notes(plan.request, picture.profile)]
    sections = [
        [*_answer_lines(picture), *notes, f"hardware: {_hardware_line(picture)}"],
        decision_lines(plan, picture.model),
        ["where the time of a step goes", *_seconds_lines(picture.seconds_by_cause, step_s)],
        ["streams, busy", *_seconds_lines(plan.predicted.busy_s, step_s)],
        _memory_lines(picture, "GPU", picture.gpu),
        _memory_lines(picture, "host", picture.host),
        [f"speed of light: {bound_line(picture)}"],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


# ---- sections of the report ------------------------------------------------------------------------------------


def _answer_lines(picture: Picture) -> list[str]:
    """Tell whether the plan fits, how fast it would be, and what limits it."""
    p, request = picture.plan.predicted, picture.plan.request
    gpus = request.ranks * request.nodes
    each, node = of_each(request)
    per_gpu = f" ({format_tokens_per_s(picture.tokens_per_s / gpus)} per GPU)" if gpus > 1 else ""
    return [
        f"fits: {format_bytes(p.gpu_bytes)} of {format_bytes(request.max_gpu_bytes)} GPU memory{each},"
        f" {format_bytes(p.host_bytes)} of {format_bytes(request.max_host_bytes)} host memory{node}",
        f"predicted: {format_seconds(p.step_s)} per step, {format_tokens_per_s(picture.tokens_per_s)}{per_gpu},"
        f" effective {format_tflops(picture.effective_flops_per_s)}{light_words(p)}",
        *fewer_gpus_lines(picture.plan),
        *clipping_lines(picture.plan),
        *cost_of_rule_lines(picture.plan),
        f"limited by: {p.limiter}",
    ]


def _hardware_line(picture: Picture) -> str:
    """Describe the machine that the plan is for."""
    profile, memory, fp8 = picture.profile, picture.profile.memory, ""
    if (matmul := picture.plan.request.numerics.matmul) != "compute":
        ops = [] if picture.model is None else [op for layer in picture.model.blocks for op in layer.ops]
        by_weights = bool(ops) and not any(getattr(op, "gradient_in_fp8", False) for op in ops)
        rate = profile.matmul.fp8_rate(picture.plan.chunk_tokens, matmul, by_weights)
        operands = matmul if (guess := matmul in profile.matmul.blackwell_shares) else "FP8"
        never = ", by its data sheet: never timed" * (guess and profile.source == "preset")
        fp8 = f" ({format_tflops(rate)} with {operands} operands{never})"
    return (
        f"{profile.name} ({profile.source}): {format_tflops(profile.matmul.peak_flops_per_s)} in matrix products{fp8},"
        f" link {profile.link.h2d_bytes_per_s / 1e9:.1f} GB/s in and {profile.link.d2h_bytes_per_s / 1e9:.1f} GB/s out,"
        f" {format_bytes(memory.gpu_total_bytes)} GPU and {format_bytes(memory.host_total_bytes)} host memory"
    )


def _seconds_lines(seconds: dict[str, float], step_s: float) -> list[str]:
    return indented_columns([(name, format_seconds(s), percent(s / step_s)) for name, s in seconds.items()])


def _memory_lines(picture: Picture, place: str, series: MemorySeries) -> list[str]:
    """List the planned bytes of one memory by category, and the peak of each part of the step."""
    p, request = picture.plan.predicted, picture.plan.request
    planned, total, budget = (
        (p.gpu_categories, p.gpu_bytes, request.max_gpu_bytes)
        if place == "GPU"
        else (p.host_categories, p.host_bytes, request.max_host_bytes)
    )
    rows = [(name, format_bytes(size), percent(size / max(total, 1))) for name, size in largest_first(planned)]
    rows.append(("all", format_bytes(total), f"of {format_bytes(budget)}"))
    peaks = [
        f"{part.name} {format_bytes(peak)}"
        for part, peak in zip(picture.step.parts, _part_peaks(picture, series), strict=True)
    ]
    return [f"{place} memory", *indented_columns(rows), f"  most in use at once: {', '.join(peaks)}"]


def _part_peaks(picture: Picture, series: MemorySeries) -> list[int]:
    """Find the most bytes in use in each part of the step."""
    starts, totals = picture.step.starts_s, series.totals.tolist()
    # The last part takes every later moment, also the one at which the step ends.
    ends = [*starts[1:], float("inf")]
    return [
        max(total for t, total in zip(series.times_s, totals, strict=True) if start <= t < end)
        for start, end in zip(starts, ends, strict=True)
    ]


NO_BOUND = (
    "not known of this plan; the bound is of plans that fetch all weights over each GPU's own link and hold optimizer"
    " states once"
)


def light_words(predicted: Prediction) -> str:
    """Tell how near to the speed of light a step is, after a comma; nothing where that is not known."""
    share = predicted.speed_of_light_s / predicted.step_s
    return f", {percent(share)} of the speed of light" if share else ""


def bound_line(picture: Picture) -> str:
    """Tell the lower bound of the step time, how busy its streams would be, and what holds it back."""
    bound, share = picture.bound, picture.light_share
    if bound is None or share is None:
        return NO_BOUND
    recomputation = f" ({format_seconds(bound.recompute_s)} of it recomputation)" if bound.recompute_s > 0 else ""
    ranks = picture.plan.request.ranks
    same = f" on {ranks} GPUs" if ranks > 1 else ""
    return (
        f"{format_seconds(picture.plan.predicted.speed_of_light_s)} per step; within these budgets no plan{same} of the"
        f" sizes considered is faster, and this one reaches {percent(share)}. The ideal step behind this bound has"
        f" {bound.rounds} round(s) in chunks of {bound.chunk_tokens} tokens and keeps compute busy for"
        f" {format_seconds(bound.compute_s)}{recomputation}, the link to the GPU for {format_seconds(bound.h2d_s)} and"
        f" the link to the host for {format_seconds(bound.d2h_s)}; it is held back by {join_words(bound.limits)}"
    )


# ---- the short description -------------------------------------------------------------------------------------


def clipping_lines(plan: Plan) -> list[str]:
    """Tell what clipping takes: of a step after one that was clipped, or to run every round twice for the norm."""
    if plan.request.norm_first and plan.predicted.unclipped_s:
        unclipped_s = plan.predicted.unclipped_s
        speed = format_tokens_per_s(plan.request.max_global_batch_tokens / unclipped_s)
        return [
            "clipping: every step runs twice, first for the norm of its gradients, as none that stores them fits;"
            f" --max-grad-norm 0 takes {format_seconds(unclipped_s)} per step, {speed}"
        ]
    if not plan.speculates:
        return []
    return [f"after a step that was clipped: {format_seconds(plan.predicted.after_clipping_s)} per step"]


def fewer_gpus_lines(plan: Plan) -> list[str]:
    """Tell that fewer GPUs take the same step faster, where that is known."""
    gpus, step_s = plan.predicted.fewer_gpus, plan.predicted.fewer_gpus_step_s
    if not gpus:
        return []
    speed = format_tokens_per_s(plan.request.max_global_batch_tokens / step_s)
    return [f"use {gpus} GPU{'s' if gpus > 1 else ''}: faster, {format_seconds(step_s)} per step, {speed}"]


def cost_of_rule_lines(plan: Plan) -> list[str]:
    """Tell what sizes that any budget gives cost beside free ones, and what the least of these budgets is."""
    p = plan.predicted
    if not p.free_step_s:
        return []
    cost = f"{p.step_s / p.free_step_s - 1:+.1%} beside the {format_seconds(p.free_step_s)} per step of free ones"
    least = f"they fit from {format_bytes(p.least_gpu_bytes)} of GPU memory on"
    return [f"reproducible: sizes by the rule cost {cost}; {least}"]


def _prediction_lines(plan: Plan) -> list[str]:
    """Tell what was predicted of a plan; nothing for a plan that was written by hand and never priced."""
    p, request = plan.predicted, plan.request
    if p.step_s <= 0:
        return []
    speed = format_tokens_per_s(request.max_global_batch_tokens / p.step_s)
    recomputed = f"{percent(p.recompute_share)} of compute is recomputation"
    each, node = of_each(request)
    return [
        f"predicted: {format_seconds(p.step_s)} per step, {speed}{light_words(p)}, {recomputed}",
        *clipping_lines(plan),
        *cost_of_rule_lines(plan),
        f"limited by: {p.limiter}",
        _memory_line(f"GPU memory{each}", p.gpu_bytes, request.max_gpu_bytes, p.gpu_categories),
        _memory_line(f"host memory{node}", p.host_bytes, request.max_host_bytes, p.host_categories),
        *_total_lines(plan),
    ]


def _total_lines(plan: Plan) -> list[str]:
    """Tell what all GPUs of all nodes take and do; nothing for one GPU."""
    p, request = plan.predicted, plan.request
    gpus = request.ranks * request.nodes
    if gpus == 1:
        return []
    per_gpu = format_tokens_per_s(request.max_global_batch_tokens / p.step_s / gpus)
    on_gpus, on_hosts = format_bytes(gpus * p.gpu_bytes), format_bytes(request.nodes * p.host_bytes)
    return [f"all {gpus} GPUs: {on_gpus} of GPU memory, {on_hosts} of host memory; {per_gpu} per GPU"]


def _memory_line(name: str, used: int, budget: int, categories: dict[str, int]) -> str:
    """Tell one memory's bytes, the largest category first; categories below 1% of the total are left out."""
    total = sum(categories.values())
    shown = [f"{category} {format_bytes(size)}" for category, size in largest_first(categories) if 100 * size >= total]
    return f"{name}: {format_bytes(used)} of {format_bytes(budget)}: {', '.join(shown)}"


# ---- no plan fits ----------------------------------------------------------------------------------------------


def shortage_report(error: ShortageError, planned: Sequence[Plan | None]) -> str:
    """Tell why nothing fits, what the smallest plan takes by category, and which changes would fit.

    planned: plans of the first remedies, whose speeds are told beside them.
    """
    needs, request = error.needs, error.request
    lines = [f"{needs.plan.model} does not fit ({error.reason.value})"]
    each, node = of_each(request)
    for place, required, budget, categories in (
        (f"GPU memory{each}", needs.gpu_bytes, request.max_gpu_bytes, needs.gpu_categories),
        (f"host memory{node}", needs.host_bytes, request.max_host_bytes, needs.host_categories),
        *([("on the drive", needs.drive_bytes, request.max_drive_bytes, {})] if request.max_drive_bytes else []),
    ):
        missing = f": {format_bytes(required - budget)} are missing" if required > budget else ""
        lines.append(f"the smallest plan needs {format_bytes(required)} of {format_bytes(budget)} {place}{missing}")
        if missing:  # the categories of a memory that suffices do not help
            lines += indented_columns([(name, format_bytes(size)) for name, size in largest_first(categories) if size])
    if needs.plan.divides_states:
        lines.append(f"it divides the optimizer states over {request.nodes} nodes; more nodes would keep less each")
    lines.append("fits with one of" if error.remedies else "no change that was tried makes it fit")
    speeds = map(_speed, [*planned, *[None] * (len(error.remedies) - len(planned))])
    lines += indented_columns([(str(remedy), speed) for remedy, speed in zip(error.remedies, speeds, strict=True)])
    lines += [needs.advice] if needs.advice else []
    return "\n".join(line.rstrip() for line in lines)


def _speed(plan: Plan | None) -> str:
    if plan is None:
        return ""
    step_s = plan.predicted.step_s
    speed = format_tokens_per_s(plan.request.max_global_batch_tokens / step_s)
    return f"planned: {format_seconds(step_s)} per step, {speed}"
