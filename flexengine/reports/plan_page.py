"""A plan as one self-contained HTML page: the answer, memory, streams, layers, numbers, request and machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes, format_seconds, format_tflops, format_tokens_per_s
from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.plan import GroupPlan, LayerPlan, Plan
from flexengine.planner.feasibility.remedies import budget_notes
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.reports.charts.layers import layer_chart
from flexengine.reports.charts.memory import memory_chart
from flexengine.reports.charts.page import figure, page, table, tiles
from flexengine.reports.charts.streams import close_up, stream_chart
from flexengine.reports.charts.style import SCRIPT, colour
from flexengine.reports.picture import Picture
from flexengine.reports.plan_decisions import GROUP_DATA, input_place, kept_words, output_place
from flexengine.reports.plan_text import bound_line
from flexengine.reports.text_format import join_words, largest_first, number_ranges, percent, positions_by_value
from flexengine.schedule.save_sets import savable_ops

HOME_WORDS = {
    "gpu": "GPU", "host": "host", "drive": "drive", "dealt": "divided", "shard": "shards", "none": "not stored",
    None: "frozen",
}  # fmt: skip
SOURCE_WORDS = {"preset": "published (preset)", "measured": "measured on this machine"}


def html_page(picture: Picture, command: str = "", objective: str = "") -> str:
    """Draw the page of a plan; command: the line that made it. objective: what steps take beside the plan's own."""
    plan = picture.plan
    title = f"{plan.model} on {picture.profile.name}"
    body = [
        f"<h1>{escape(title)}</h1>",
        _answer(picture),
        *(f'<p class="answer bad">{escape(note)}</p>' for note in budget_notes(plan.request, picture.profile)),
        _tiles(picture),
        *([f"<p>{escape(objective)}</p>"] if objective else []),
        "<h2>Memory and streams over a step</h2>",
        f'<p class="soft">Drawn: {escape(picture.step.about)}. All three share one time axis.</p>',
        figure(
            "GPU memory in use",
            memory_chart("gpu-data", picture.gpu, picture.step, plan.request.max_gpu_bytes),
            "gpu-data",
        ),
        figure("Streams: kernels, and the two directions of the link", stream_chart(picture.step)),
        figure(
            "Host memory in use",
            memory_chart("host-data", picture.host, picture.step, plan.request.max_host_bytes),
            "host-data",
        ),
        figure("Close-up: from forward to backward", close_up(picture.step.last_round)),
        "<h2>Decisions by layer</h2>",
        _layers(picture),
        "<h2>Numbers</h2>",
        _numbers(picture),
        "<h2>Request and machine</h2>",
        _request(picture, command),
    ]
    return page(title, "\n".join(body), SCRIPT)


def shortage_page(error: ShortageError, profile: HardwareProfile, command: str = "") -> str:
    """Draw the page for a request that no plan fits: what is missing, and what would fit."""
    needs, request, model = error.needs, error.request, error.needs.plan.model
    tables, missing = [], []
    for place, needed, budget, categories in (
        ("GPU", needs.gpu_bytes, request.max_gpu_bytes, needs.gpu_categories),
        ("host", needs.host_bytes, request.max_host_bytes, needs.host_categories),
    ):
        if needed > budget:
            missing.append(f"{format_bytes(needed - budget)} of {place} memory")
        tables.append(f"<div>{_bytes_table(f'{place} memory by category', categories, needed, budget)}</div>")
    if lacking := needs.lacks_drive(request):
        missing.append(f"{format_bytes(lacking)} on the drive")
    remedies = "".join(f"<li><code>{escape(r.flags)}</code> {escape(r.note)}</li>" for r in error.remedies)
    advice = f"<p>Each of these changes was tried and fits:</p><ul>{remedies}</ul>"
    body = [
        f"<h1>{escape(model)} on {escape(profile.name)}</h1>",
        f'<p class="answer bad"><b>Does not fit:</b> {escape(join_words(missing))} missing.</p>',
        "<h2>What would fit</h2>",
        advice if remedies else "<p>No change that was tried fits.</p>",
        "<h2>What the smallest plan needs</h2>",
        f'<div class="columns">{"".join(tables)}</div>',
        _command(command),
    ]
    return page(f"{model}: does not fit", "\n".join(body), "")


# ---- sections --------------------------------------------------------------------------------------------------


def _answer(picture: Picture) -> str:
    p, request = picture.plan.predicted, picture.plan.request
    return (
        f'<p class="answer"><b>Fits</b> in {format_bytes(p.gpu_bytes)} of {format_bytes(request.max_gpu_bytes)} GPU'
        f" memory and {format_bytes(p.host_bytes)} of {format_bytes(request.max_host_bytes)} host memory."
        f" Limited by {escape(p.limiter)}.</p>"
    )


def _tiles(picture: Picture) -> str:
    p, request = picture.plan.predicted, picture.plan.request
    share = picture.light_share
    light = () if share is None else ((percent(share), f"of the limit of {format_seconds(p.speed_of_light_s)}", share),)
    shown = (
        (format_seconds(p.step_s), "predicted per step", None),
        (format_tokens_per_s(picture.tokens_per_s), f"effective {format_tflops(picture.effective_flops_per_s)}", None),
        *light,
        (format_bytes(p.gpu_bytes), "GPU memory", p.gpu_bytes / request.max_gpu_bytes),
        (format_bytes(p.host_bytes), "host memory", p.host_bytes / request.max_host_bytes),
    )
    return tiles(shown)


def _layers(picture: Picture) -> str:
    """Draw the chart of all layers, and a table with a row per distinct treatment."""
    plan, model = picture.plan, picture.model
    decided = (_decisions(layer, plan.layers[i], plan.groups) for i, layer in enumerate(model.layers))
    rows = [(_layer_names(model, members), *decisions) for decisions, members in positions_by_value(decided).items()]
    # The chart shows where single layers differ; the table says in words what each treatment is.
    chart = layer_chart([layer.name for layer in model.layers], _layer_places(picture))
    ways = table(("layers", "from forward to backward", "weights", "gradients", "optimizer states"), rows, ())
    return figure("Where parameters live, and what each layer keeps for backward", chart) + ways


def _layer_names(model: ModelSpec, members: Sequence[int]) -> str:
    """Name layers in words, with blocks by their numbers."""
    # People count blocks from 0, as checkpoints name them; layers also count the embedding.
    first = next(i for i, layer in enumerate(model.layers) if layer.kind == "block")
    blocks = [i - first for i in members if model.layers[i].kind == "block"]
    edges = [model.layers[i].name for i in members if model.layers[i].kind != "block"]
    word = "block" if len(blocks) == 1 else "blocks"
    return ", ".join([*edges, *([f"{word} {number_ranges(blocks)}"] if blocks else [])])


def _decisions(layer: LayerSpec, kept: LayerPlan, groups: Sequence[GroupPlan]) -> tuple[str, ...]:
    """Tell what a layer keeps, and where its weights, gradients and optimizer states live."""
    homes = [join_words(dict.fromkeys(HOME_WORDS[data.home(groups[g])] for g in layer.groups)) for data in GROUP_DATA]
    return kept_words(kept, layer) if layer.kind == "block" else "nothing", *homes


def _layer_places(picture: Picture) -> list[tuple[str, list[str | None]]]:
    """Give the rows of the layer chart: data of parameters first, then the input and what ops keep for backward."""
    plan, layers = picture.plan, picture.model.layers
    last = [layer.groups[-1] for layer in layers]
    rows: list[tuple[str, list[str | None]]] = [
        # The last group of a tied head is the embedding's, which holds nearly all of its parameters.
        (data.name, [None if home == "none" else home for home in (data.home(plan.groups[g]) for g in last)])
        for data in GROUP_DATA
    ]
    inputs = [input_place(kept) if layer.keeps else None for layer, kept in zip(layers, plan.layers, strict=True)]
    rows.append(("input", inputs))
    # Blocks of several kinds have different ops: a row per op that any block may keep, in the order of first use.
    names = dict.fromkeys(name for layer in layers if layer.kind == "block" for name in savable_ops(layer.ops))
    for name in names:
        keeps = [layer.keeps and any(op.name == name for op in layer.ops) for layer in layers]
        kept_by_layer = zip(keeps, plan.layers, strict=True)
        rows.append((name, [output_place(name, kept) if has_it else None for has_it, kept in kept_by_layer]))
    return rows


def _numbers(picture: Picture) -> str:
    p, request = picture.plan.predicted, picture.plan.request
    causes = [(name, format_seconds(s), percent(s / p.step_s)) for name, s in picture.seconds_by_cause.items()]
    busy = [(name, format_seconds(s), percent(s / p.step_s)) for name, s in p.busy_s.items()]
    return "".join(
        (
            '<div class="columns"><div>',
            table(("where the time of a step goes", "seconds", "share"), causes),
            "</div><div>",
            table(("stream", "busy", "share"), busy),
            f"<p>Speed of light: {escape(bound_line(picture))}.</p>",
            "</div><div>",
            _bytes_table("GPU memory by category", p.gpu_categories, p.gpu_bytes, request.max_gpu_bytes),
            "</div><div>",
            _bytes_table("host memory by category", p.host_categories, p.host_bytes, request.max_host_bytes),
            "</div></div>",
        )
    )


def _bytes_table(title: str, categories: dict[str, int], total: int, budget: int) -> str:
    rows = [
        (f'<i style="background:{colour(name)}"></i>{escape(name)}', format_bytes(num), percent(num / max(total, 1)))
        for name, num in largest_first(categories)
    ]
    # Cells are HTML here, for the swatches, so names are escaped above.
    rows.append(("<b>all</b>", f"<b>{format_bytes(total)}</b>", f"of {format_bytes(budget)}"))
    return table((title, "bytes", "share"), rows, safe=True)


def _request(picture: Picture, command: str) -> str:
    tables = "".join(
        f'<div class="keys">{table((title, ""), rows, ())}</div>'
        for title, rows in (("request", _request_rows(picture.plan)), ("machine", _machine_rows(picture.profile)))
    )
    return f'<div class="columns">{tables}</div>{_command(command)}'


def _request_rows(plan: Plan) -> list[tuple[str, str]]:
    request = plan.request
    return [
        ("tokens per step", f"{request.max_global_batch_tokens}"),
        ("longest sequence", f"{request.max_seq_len} tokens"),
        ("rounds", f"{plan.num_rounds} of {plan.chunks_per_round} x {plan.chunk_tokens} tokens"),
        ("GPU budget", format_bytes(request.max_gpu_bytes)),
        ("host budget", format_bytes(request.max_host_bytes)),
        ("recompute", request.recompute),
        *((f"{name} type", str(value)) for name, value in asdict(request.numerics).items()),
        (
            "slots",
            f"{plan.weight_slots} weights, {plan.grad_slots} gradients, {plan.save_slots} offload,"
            f" {plan.optimizer_slots} optimizer tiles of {plan.optimizer_tile} elements",
        ),
    ]


def _machine_rows(profile: HardwareProfile) -> list[tuple[str, str]]:
    return [
        ("name", profile.name),
        ("figures", SOURCE_WORDS.get(profile.source, profile.source)),
        ("matrix products", format_tflops(profile.matmul.peak_flops_per_s)),
        ("device memory", f"{profile.memory.bytes_per_s / 1e9:.0f} GB/s"),
        ("link to the GPU", _link_words(profile.link.h2d_bytes_per_s, profile.link.h2d_duplex_bytes_per_s)),
        ("link to the host", _link_words(profile.link.d2h_bytes_per_s, profile.link.d2h_duplex_bytes_per_s)),
        ("GPU memory", format_bytes(profile.memory.gpu_total_bytes)),
        ("host memory", format_bytes(profile.memory.host_total_bytes)),
    ]


def _link_words(alone_bytes_per_s: float, duplex_bytes_per_s: float) -> str:
    return f"{alone_bytes_per_s / 1e9:.1f} GB/s, {duplex_bytes_per_s / 1e9:.1f} in duplex"


def _command(command: str) -> str:
    return f"<p class='soft'>Made by</p><pre>{escape(command)}</pre>" if command else ""
