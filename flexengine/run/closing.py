"""What a run says after its last step."""

from __future__ import annotations

from collections.abc import Sequence

from flexengine.metrics import StepMetrics, format_bytes, format_seconds, format_tflops, format_tokens_per_s
from flexengine.runtime.engine import Engine

FEW_STEPS = 10
"""Runs of fewer steps are all warm-up: kernels, caches and clocks settle meanwhile."""


def summary(engine: Engine, steps: Sequence[StepMetrics], undisturbed: Sequence[StepMetrics]) -> str:
    """Describe the run in three lines: loss, speed, memory.

    Rates leave out the first step, which warms up, and those that are not among the `undisturbed` ones, as they were
    timed or profiled, as far as there are others.
    """
    if not steps:
        return "no step was taken"
    warm = [step for step in undisturbed if step is not steps[0]] or steps[1:] or steps
    seconds = sum(s.step_s for s in warm)
    flops_per_s = sum(s.effective_tflops * 1e12 * s.step_s for s in warm) / seconds
    share = 100.0 * flops_per_s / engine.matmul_flops_per_s if engine.matmul_flops_per_s else float("nan")
    last = steps[-1]
    few = f"; runs of fewer than {FEW_STEPS} steps are all warm-up" if len(steps) < FEW_STEPS else ""
    return "\n".join(
        (
            f"loss: {steps[0].loss:.4f} at step {steps[0].step}, {last.loss:.4f} at step {last.step}",
            f"speed: {format_tokens_per_s(sum(s.num_tokens for s in warm) / seconds)},"
            f" {format_seconds(seconds / len(warm))} a step, effective {format_tflops(flops_per_s)}"
            f" ({share:.0f}% of this machine's matmul rate){few}",
            f"peak memory: GPU {format_bytes(last.gpu_peak_bytes)}, host {format_bytes(last.host_peak_bytes)}",
        )
    )
