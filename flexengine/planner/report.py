"""The plan in words: what lives where, how fast it should be, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes, format_seconds, format_tokens_per_s
from flexengine.models.spec import ModelSpec
from flexengine.plan import LayerPlan, Plan
from flexengine.planner.cost_model import CostModel, StepEstimate, round_shape
from flexengine.schedule.layout import GroupLayout, Layout, group_layout
from flexengine.schedule.lowering import lower_round
from flexengine.schedule.simulator import simulate
from flexengine.schedule.timeline import chrome_trace

GROUP_PARTS = (("weights", ("weights",)), ("grads", ("grad",)), ("states", ("remainder", "exp_avg", "exp_avg_sq")))
PART_WORDS = {"weights": "weights", "grads": "gradients", "states": "optimizer states"}


def describe(plan: Plan, model: ModelSpec | None) -> str:
    """The plan as lines of text for people."""
    size = f", {model.num_parameters / 1e9:.2f} G parameters" if model is not None else ""
    lines = [
        f"model {plan.model}{size}",
        f"step of {plan.request.max_global_batch_tokens} tokens: {plan.num_rounds} round(s) of {plan.chunks_per_round}"
        f" x {plan.chunk_tokens} tokens, sequences up to {plan.request.max_seq_len}",
        *_parameter_lines(plan, model),
        *_activation_lines(plan),
        *_prediction_lines(plan),
    ]
    return "\n".join(lines)


def round_timeline(plan: Plan, model: ModelSpec, profile: HardwareProfile) -> str:
    """A simulated round as Chrome trace JSON: one that adds to stored gradients, or the only one of a step."""
    layout = Layout(model, plan)
    shape = round_shape(plan.request, plan.chunk_tokens, plan.chunks_per_round)
    program = lower_round(layout, shape, first=plan.num_rounds == 1)
    cost = CostModel(profile, layout.compute_bytes, plan.chunk_tokens)
    return chrome_trace(program, simulate(program, cost.rates()))


def _parameter_lines(plan: Plan, model: ModelSpec | None) -> list[str]:
    layouts = [group_layout(g, plan.request.numerics) for g in model.groups] if model is not None else None
    lines = []
    for part, kinds in GROUP_PARTS:
        homes = [getattr(g, part) for g in plan.groups]
        texts = []
        for home, word in (("gpu", "on the GPU"), ("host", "streamed from the host")):
            members = [i for i, h in enumerate(homes) if h == home]
            if members:
                texts.append(f"{len(members)} of {len(homes)} groups {word}{_group_bytes(layouts, members, kinds)}")
        lines.append(f"{PART_WORDS[part]}: {', '.join(texts)}")
    return lines


def _group_bytes(layouts: Sequence[GroupLayout] | None, members: list[int], kinds: tuple[str, ...]) -> str:
    if layouts is None:
        return ""
    return f" ({format_bytes(sum(layouts[i].plane_bytes.get(kind, 0) for i in members for kind in kinds))})"


def _activation_lines(plan: Plan) -> list[str]:
    """One line per run of blocks that keep the same."""
    lines, first = [], 0
    for kept, run in groupby(plan.layers[1:-1]):
        last = first + len(list(run)) - 1
        span = f"block {first}" if first == last else f"blocks {first}-{last}"
        lines.append(f"{span}: {_kept_words(kept)}")
        first = last + 1
    return lines


def _kept_words(kept: LayerPlan) -> str:
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


LINK_WORDS = {"h2d": "host-to-device link", "d2h": "device-to-host link", "compute": "compute"}
COMPUTE_BOUND_SHARE = 0.9
"""With compute busy for this share of a step, compute limits it."""


def limiter(estimate: StepEstimate) -> str:
    """What limits a step, in words: compute, or the stream and phase that compute waits for longest."""
    busy_share = estimate.busy_s["compute"] / max(estimate.step_s, 1e-30)
    if busy_share >= COMPUTE_BOUND_SHARE or not estimate.stalls_s:
        again = estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30)
        return f"compute (busy {100 * busy_share:.0f}% of the step, {100 * again:.0f}% of it recomputation)"
    (stream, phase), seconds = max(estimate.stalls_s.items(), key=lambda item: item[1])
    return (
        f"{LINK_WORDS[stream]} during {phase} (compute waits for it {100 * seconds / estimate.step_s:.0f}% of the step)"
    )
