"""The plan in words: what lives where, how fast it should be, and what limits it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from flexengine.metrics import format_bytes, format_seconds, format_tflops, format_tokens_per_s
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Home, LayerPlan, Plan
from flexengine.planner.feasibility.machine_size import budget_notes
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.reports.memory_over_time import MemorySeries
from flexengine.reports.picture import Picture
from flexengine.schedule.group_layout import GroupLayout, group_layout

GROUP_PARTS = (("weights", ("weights",)), ("grads", ("grad",)), ("states", ("remainder", "exp_avg", "exp_avg_sq")))
T = TypeVar("T")
PART_WORDS = {"weights": "weights", "grads": "gradients", "states": "optimizer states"}


def describe(plan: Plan, model: ModelSpec | None) -> str:
    """The plan as lines of text for people."""
    return "\n".join([*_decision_lines(plan, model), *_prediction_lines(plan)])


def report(picture: Picture) -> str:
    """Everything `plan` tells about a plan: the answer, the decisions, where time and bytes go, the bound."""
    plan = picture.plan
    sections = [
        [*answer_lines(picture), *_notes(picture), f"hardware: {hardware_line(picture)}"],
        _decision_lines(plan, picture.model),
        ["where the time of a step goes", *_rows(_seconds_rows(picture.seconds_by_cause, plan.predicted.step_s))],
        ["streams, busy", *_rows(_seconds_rows(plan.predicted.busy_s, plan.predicted.step_s))],
        _memory_lines(picture, "GPU", picture.gpu),
        _memory_lines(picture, "host", picture.host),
        [f"speed of light: {bound_line(picture)}"],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def answer_lines(picture: Picture) -> list[str]:
    """Whether it fits, how fast it would be, and what limits it."""
    p, request = picture.plan.predicted, picture.plan.request
    return [
        f"fits: {format_bytes(p.gpu_bytes)} of {format_bytes(request.max_gpu_bytes)} GPU memory,"
        f" {format_bytes(p.host_bytes)} of {format_bytes(request.max_host_bytes)} host memory",
        f"predicted: {format_seconds(p.step_s)} per step, {format_tokens_per_s(picture.tokens_per_s)},"
        f" effective {format_tflops(picture.effective_flops_per_s)},"
        f" {percent(picture.light_share)} of the speed of light",
        f"limited by: {p.limiter}",
    ]


def _notes(picture: Picture) -> list[str]:
    return [f"note: {note}" for note in budget_notes(picture.plan.request, picture.profile)]


def hardware_line(picture: Picture) -> str:
    """The machine that the plan is for, in a line."""
    p, fp8 = picture.profile, ""
    if picture.plan.request.numerics.matmul == "fp8":
        fp8 = f" ({format_tflops(p.fp8_matmul_rate(picture.plan.chunk_tokens))} with FP8 operands)"
    return (
        f"{p.name} ({p.source}): {format_tflops(p.peak_matmul_flops_per_s)} in matrix products{fp8}, link"
        f" {p.h2d_bytes_per_s / 1e9:.1f} GB/s in and {p.d2h_bytes_per_s / 1e9:.1f} GB/s out,"
        f" {format_bytes(p.gpu_total_bytes)} GPU and {format_bytes(p.host_total_bytes)} host memory"
    )


def bound_line(picture: Picture) -> str:
    """The bound, its streams and what holds it back."""
    bound = picture.bound
    if bound is None:
        return "unknown"
    again = f", {format_seconds(bound.recompute_s)} of it recomputation" if bound.recompute_s > 0 else ""
    return (
        f"{format_seconds(bound.seconds)} per step; within these budgets no plan of the sizes considered is faster,"
        f" and this one reaches {percent(picture.light_share)}. Relaxed, a step would take {bound.rounds}"
        f" round(s) in chunks of {bound.chunk_tokens} tokens, compute busy {format_seconds(bound.compute_s)}{again},"
        f" the link to the GPU {format_seconds(bound.h2d_s)} and to the host {format_seconds(bound.d2h_s)};"
        f" held back by {words(bound.limits)}"
    )


def shortage_report(error: ShortageError, planned: Plan | None) -> str:
    """Why nothing fits, what the smallest plan takes by category, and what would fit; `planned` is the plan of the
    first remedy."""
    needs, request = error.needs, error.request
    lines = [f"{needs.plan.model} does not fit ({error.reason.value})"]
    for place, required, budget, categories in (
        ("GPU", needs.gpu_bytes, request.max_gpu_bytes, needs.gpu_categories),
        ("host", needs.host_bytes, request.max_host_bytes, needs.host_categories),
    ):
        missing = f": {format_bytes(required - budget)} are missing" if required > budget else ""
        lines.append(
            f"the smallest plan needs {format_bytes(required)} of {format_bytes(budget)} {place} memory{missing}"
        )
        if missing:
            largest = sorted(categories.items(), key=lambda item: -item[1])
            lines += _rows([(name, format_bytes(num_bytes)) for name, num_bytes in largest if num_bytes])
    lines.append("fits with one of" if error.remedies else "no change that was tried makes it fit")
    lines += _rows([(str(r), _speed(planned) if i == 0 else "") for i, r in enumerate(error.remedies)])
    return "\n".join(line.rstrip() for line in lines)


def _speed(plan: Plan | None) -> str:
    if plan is None:
        return ""
    tokens = plan.request.max_global_batch_tokens
    step_s = plan.predicted.step_s
    return f"planned: {format_seconds(step_s)} per step, {format_tokens_per_s(tokens / step_s)}"


def percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f}%"


def words(parts: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"; "nothing" for none."""
    *first, last = list(parts) or ["nothing"]
    return f"{', '.join(first)} and {last}" if first else last


def _seconds_rows(seconds: dict[str, float], step_s: float) -> list[tuple[str, str, str]]:
    return [(name, format_seconds(s), percent(s / step_s)) for name, s in seconds.items()]


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Aligned columns: those in `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _rows(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return ["  " + line for line in table(rows)]


def _memory_lines(picture: Picture, place: str, series: MemorySeries) -> list[str]:
    """Bytes of one memory by category, as planned and as in use at the most, and the peak of each part of a step."""
    p, request = picture.plan.predicted, picture.plan.request
    planned, total, budget = (
        (p.gpu_categories, p.gpu_bytes, request.max_gpu_bytes)
        if place == "GPU"
        else (p.host_categories, p.host_bytes, request.max_host_bytes)
    )
    names = sorted(planned, key=lambda name: -planned[name])
    rows = [(name, format_bytes(planned[name]), percent(planned[name] / max(total, 1))) for name in names]
    rows.append(("all", format_bytes(total), f"of {format_bytes(budget)}"))
    peaks = [
        f"{part.name} {format_bytes(peak)}"
        for part, peak in zip(picture.step.parts, part_peaks(picture, series), strict=True)
    ]
    return [f"{place} memory", *_rows(rows), f"  most in use at once: {', '.join(peaks)}"]


def part_peaks(picture: Picture, series: MemorySeries) -> list[int]:
    """The most bytes in use in each part of the step."""
    starts, totals = picture.step.starts_s, series.totals.tolist()
    ends = [*starts[1:], float("inf")]
    return [
        max(total for t, total in zip(series.times_s, totals, strict=True) if start <= t < end)
        for start, end in zip(starts, ends, strict=True)
    ]


def _decision_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    size = f", {model.num_parameters / 1e9:.2f} G parameters" if model is not None else ""
    return [
        f"model {plan.model}{size}",
        f"step of {plan.request.max_global_batch_tokens} tokens: {plan.num_rounds} round(s) of {plan.chunks_per_round}"
        f" x {plan.chunk_tokens} tokens, sequences up to {plan.request.max_seq_len}",
        *_parameter_lines(plan, model),
        *_update_lines(plan),
        *_activation_lines(plan, model),
    ]


def _parameter_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    layouts = [group_layout(g, plan.request.numerics) for g in model.groups] if model is not None else None
    lines = []
    for part, kinds in GROUP_PARTS:
        homes = [home_of_part(g, part) for g in plan.groups]
        some = sum(home is not None for home in homes)
        texts = []
        for home, word in (("gpu", "on the GPU"), ("host", "streamed from the host")):
            members = [i for i, h in enumerate(homes) if h == home]
            if members:
                texts.append(f"{len(members)} of {some} groups {word}{_group_bytes(layouts, members, kinds)}")
        lines.append(f"{PART_WORDS[part]}: {', '.join(texts)}")
    return lines + _lines_of_parts(plan, model) + _frozen_lines(plan, model)


def _lines_of_parts(plan: Plan, model: ModelSpec | None) -> list[str]:
    """How experts are streamed, where not with the rest of their blocks."""
    if not plan.in_parts:
        return []
    which = ", only those that some token of the round goes to" if plan.touched_only else ""
    if model is None:
        return [f"experts: streamed in parts{which}"]
    most = max(model.groups, key=lambda group: group.divisions)
    cut = sum(param.numel for param in most.params if param.name in most.cut)
    size = f"{cut / most.divisions / 1e6:.0f} M parameters"
    return [f"experts: streamed in {most.divisions} parts of {size}, {plan.weight_slots} at once{which}"]


def home_of_part(home: GroupPlan, part: str) -> Home | None:
    """Where a group's weights, grads or states live; None for what a frozen one does not have."""
    return getattr(home, part) if part == "weights" or home.trained else None


def _frozen_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    """What is not trained, if anything."""
    frozen = [i for i, home in enumerate(plan.groups) if not home.trained]
    if not frozen:
        return []
    size = ""
    if model is not None:
        size = f" ({sum(model.groups[i].numel for i in frozen) / 1e9:.2f} G parameters)"
    return [f"frozen: {len(frozen)} of {len(plan.groups)} groups{size}, with weights alone"]


def _update_lines(plan: Plan) -> list[str]:
    trained = sum(home.trained for home in plan.groups)
    by_cpu = sum(home.update == "cpu" for home in plan.groups)
    since = " from the last backward on" if plan.updates_in_backward else ""
    cpu = f"{by_cpu} of {trained} groups on the CPU{since}, the others " if by_cpu else ""
    if not plan.uses_tiles:
        return [f"update: {cpu}on the GPU, in place"]
    tile = f"{plan.optimizer_tile / 1e6:.2g} M" if plan.optimizer_tile >= 1e5 else f"{plan.optimizer_tile}"
    slots = f"{plan.optimizer_slots} tile(s) of {tile} elements"
    return [f"update: {cpu}on the GPU, what lives on the host through {slots}"]


def _group_bytes(layouts: Sequence[GroupLayout] | None, members: list[int], kinds: tuple[str, ...]) -> str:
    if layouts is None:
        return ""
    return f" ({format_bytes(sum(layouts[i].plane_bytes.get(kind, 0) for i in members for kind in kinds))})"


def _activation_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    """One line per way to keep activations, with the blocks that do."""
    blocks: Sequence[LayerPlan | None] = plan.layers[1:-1]
    if model is not None:
        blocks = [kept if block.keeps else None for kept, block in zip(blocks, model.blocks, strict=True)]
    return [
        f"block{'' if len(members) == 1 else 's'} {spans(members)}: {kept_words(kept)}"
        for kept, members in alike(blocks).items()
    ]


def alike(items: Iterable[T]) -> dict[T, list[int]]:
    """Positions by item, in order of first appearance."""
    found: dict[T, list[int]] = {}
    for position, item in enumerate(items):
        found.setdefault(item, []).append(position)
    return found


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: "0-2, 5, 7-9"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def kept_words(kept: LayerPlan | None) -> str:
    """What a block keeps from forward to backward; None: it has none."""
    if kept is None:
        return "forward only, as nothing is trained there or below"
    on_gpu = [*(["input"] if kept.input_home == "gpu" else []), *kept.keep_gpu]
    on_host = [*(["input"] if kept.input_home == "host" else []), *kept.keep_host]
    texts = [f"GPU keeps {', '.join(on_gpu)}"] if on_gpu else []
    texts += [f"host keeps {', '.join(on_host)}"] if on_host else []
    return "; ".join([*texts, "the rest is recomputed"])


def _prediction_lines(plan: Plan) -> list[str]:
    p, request = plan.predicted, plan.request
    if p.step_s <= 0:
        return []
    speed = format_tokens_per_s(request.max_global_batch_tokens / p.step_s)
    light = f"{100 * p.speed_of_light_s / p.step_s:.0f}% of the speed of light"
    again = f"{100 * p.recompute_share:.0f}% of compute is recomputation"
    return [
        f"predicted: {format_seconds(p.step_s)} per step, {speed}, {light}, {again}",
        f"limited by: {p.limiter}",
        _memory_line("GPU memory", p.gpu_bytes, request.max_gpu_bytes, p.gpu_categories),
        _memory_line("host memory", p.host_bytes, request.max_host_bytes, p.host_categories),
    ]


def _memory_line(name: str, used: int, budget: int, categories: dict[str, int]) -> str:
    return f"{name}: {format_bytes(used)} of {format_bytes(budget)}: {_categories(categories)}"


def _categories(categories: dict[str, int]) -> str:
    """Largest first; what is below 1% of the total is left out."""
    total = sum(categories.values())
    shown = sorted(categories.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in shown if size * 100 >= total)
