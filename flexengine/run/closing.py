"""What a run says after its last step, and how its model answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tqdm import tqdm

from flexengine.data import TokenizerProcess
from flexengine.metrics import (
    StepMetrics,
    describe_slow_card,
    format_bytes,
    format_seconds,
    format_tflops,
    format_tokens_per_s,
)
from flexengine.runtime.engine import Engine

FEW_STEPS = 10
"""Runs of fewer steps are all warm-up: kernels, caches and clocks settle meanwhile."""


def summary(engine: Engine, steps: Sequence[StepMetrics], undisturbed: Sequence[StepMetrics]) -> str:
    """Describe the run in three lines: loss, speed, memory; in a fourth one a GPU that ran slowly.

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
            *([slow] if (slow := describe_slow_card(warm)) else []),
        )
    )


def show_samples(
    engine: Engine, tokenizer: TokenizerProcess | None, prompts: Sequence[str], right: Mapping[str, str] | None = None
) -> None:
    """Print the model's answers to prompts. Where the plan leaves no memory for them, the run goes on without.

    right: the right answers to prompts, as far as they are known, which are counted.
    """
    if tokenizer is None or not prompts:
        return
    try:
        answers = answer(engine, tokenizer, prompts)
    except ValueError as error:
        tqdm.write(f"no samples: {error}")
        return
    for prompt, text in zip(prompts, answers, strict=True):
        tqdm.write(f"sample: {prompt!r} -> {text!r}")
    if right:
        found = dict(zip(prompts, answers, strict=True))
        count = sum(found[prompt] == answer for prompt, answer in right.items())
        tqdm.write(f"right: {count} of {len(right)} answers")


def answer(engine: Engine, tokenizer: TokenizerProcess, prompts: Sequence[str], max_new_tokens: int = 32) -> list[str]:
    """Answer user messages greedily, each up to a stop token, max_new_tokens or max_seq_len.

    A message that leaves no room for an answer has an empty one.
    """
    ids = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    fitting = [i for i, row in enumerate(ids) if len(row) < engine.plan.request.max_seq_len]
    answers = [""] * len(ids)
    found = engine.generate([ids[i] for i in fitting], max_new_tokens, stop_ids=tokenizer.stop_ids)
    for i, tokens in zip(fitting, found, strict=True):
        answers[i] = tokenizer.decode(tokens).strip()
    return answers
