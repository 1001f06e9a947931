"""What limits a step, in words, from what compute waits for."""

from __future__ import annotations

from flexengine.planner.cost.cost_model import ISSUE, StepEstimate

LIMIT_WORDS = {
    "h2d": "host-to-device link",
    "d2h": "device-to-host link",
    "compute": "compute",
    "cpu": "CPU",
    ISSUE: "the host, which issues commands,",
}
COMPUTE_BOUND_SHARE = 0.9
"""With compute busy for this share of a step, compute limits it."""


def limiter(estimate: StepEstimate) -> str:
    """What limits a step, in words: compute, or what and in which phase compute waits for longest."""
    busy_share = estimate.busy_s["compute"] / max(estimate.step_s, 1e-30)
    if busy_share >= COMPUTE_BOUND_SHARE or not estimate.stalls_s:
        again = estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30)
        return f"compute (busy {100 * busy_share:.0f}% of the step, {100 * again:.0f}% of it recomputation)"
    (cause, phase), seconds = max(estimate.stalls_s.items(), key=lambda item: item[1])
    share = f"{100 * seconds / estimate.step_s:.0f}% of the step"
    return f"{LIMIT_WORDS[cause]} during {phase} (compute waits for it {share})"
