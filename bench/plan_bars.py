"""What must hold between plans: a larger budget is never slower, and no pin beats the plan that is free to choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from bench.environment import write_json
from bench.golden_cases import CASES, Case
from flexengine.plan import PlanError

TOLERANCE = 1.01
"""A plan may be slower by this factor than one under a tighter budget, or under a pin."""
SMALL_MODELS = (
    "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-4b", "gemma-3-1b", "gemma-2-2b", "olmoe-1b-7b",
    "deepseek-v2-lite", "gpt-oss-20b",
)  # fmt: skip
CARDS = (("h200", 64.0), ("h100-80", 64.0), ("a100-40", 36.0), ("rtx-4090", 22.0))
"""(card, the largest budget in GiB that is drawn for it)."""
STEP_TOKENS = tuple(4096 << i for i in range(6))
PINNED_CHUNKS = tuple(512 << i for i in range(6))
PINNED_CHUNKS_PER_ROUND = (1, 2, 3, 4, 6, 8, 12, 16, 32)
NUM_PINNED_CASES = 16
"""Requests whose pins are tried where none is named: the last of the list, short steps among them."""


def step_s(case: Case) -> float | None:
    """Predicted seconds of a request's plan; None when nothing fits."""
    try:
        return case.plan().predicted.step_s
    except PlanError:
        return None


# ---- budgets -----------------------------------------------------------------------------------------------------


def drawn_pair(random: Random) -> tuple[Case, Case]:
    """A request, and the same with more memory on one side."""
    card, most_gib = random.choice(CARDS)
    gpu_gib = round(3.0 * (most_gib / 3.0) ** random.random(), 1)
    host_gib = random.choice((60, 110, 200, 400))
    case = Case(
        random.choice(SMALL_MODELS),
        card,
        gpu_gib,
        host_gib,
        random.choice(STEP_TOKENS),
        state=random.choice(("bfloat16", "float32")),
        master=random.choice(("split", "split", "stochastic")),
        clipping=random.random() < 0.5,
    )
    factor = random.choice((1.05, 1.2, 1.5, 2.0))
    if random.random() < 0.75:
        return case, replace(case, gpu_gib=round(min(gpu_gib * factor, most_gib + 1), 1))
    return case, replace(case, host_gib=host_gib * factor)


def feasible_pairs(count: int, seed: int) -> Iterator[tuple[Case, float, Case]]:
    """(request, its seconds, the same with more memory); requests for which nothing fits are drawn again."""
    random, found = Random(seed), 0
    while found < count:
        case, larger = drawn_pair(random)
        seconds = step_s(case)
        if seconds is not None:
            found += 1
            yield case, seconds, larger


def check_budgets(count: int, seed: int, path: str | None) -> list[str]:
    """Plan pairs of budgets and print the worst; returns those in which the larger one is slower."""
    rows, broken = [], []
    for case, seconds, larger in feasible_pairs(count, seed):
        more_s = step_s(larger)
        ratio = float("inf") if more_s is None else more_s / seconds
        rows.append({"id": case.id, "larger": larger.id, "step_s": seconds, "larger_step_s": more_s, "ratio": ratio})
        if ratio > TOLERANCE:
            found = "nothing fits" if more_s is None else f"{more_s:.4f} s"
            budgets = f"{larger.gpu_gib:g}+{larger.host_gib:g} GiB"
            broken.append(f"{case.id}: {seconds:.4f} s, but with {budgets} {found}: {ratio:.4f} times")
            print(broken[-1], flush=True)
    worst = max(rows, key=lambda row: row["ratio"])
    print(f"{len(rows)} pairs: {len(broken)} slower by more than {TOLERANCE - 1:.0%}; worst {worst['ratio']:.4f}")
    write_json(path, {"pairs": rows, "broken": len(broken)})
    return broken


# ---- pins --------------------------------------------------------------------------------------------------------


def pinned(case: Case) -> Iterator[Case]:
    """A request with each of its pins."""
    yield replace(case, recompute="full")
    yield replace(case, recompute="none")
    for chunk in PINNED_CHUNKS:
        for chunks in PINNED_CHUNKS_PER_ROUND:
            if case.seq_len <= chunk * chunks <= case.tokens:
                yield replace(case, pinned_size=(chunk, chunks))


def check_pins(only: str, path: str | None) -> list[str]:
    """Plan requests freely and with each pin; returns the pins that beat the free plan."""
    cases = [case for case in CASES if only in case.id] if only else CASES[-NUM_PINNED_CASES:]
    rows: list[dict[str, Any]] = []
    broken = []
    for case in cases:
        free_s = step_s(case)
        assert free_s is not None, f"{case.id}: nothing fits"
        timed = [(step_s(pin), pin) for pin in pinned(case)]
        found = [(seconds, pin.id) for seconds, pin in timed if seconds is not None]
        best_s, best_id = min(found, default=(free_s, "no pin fits"))
        rows.append({"id": case.id, "step_s": free_s, "pins": len(found), "best_pin_s": best_s, "best_pin": best_id})
        print(f"{free_s:10.4f} s, best of {len(found)} pins {best_s:.4f} s  {case.id}", flush=True)
        for seconds, name in sorted(found):
            if free_s > TOLERANCE * seconds:
                broken.append(f"{name}: {seconds:.4f} s, but {free_s:.4f} s without the pin: {free_s / seconds:.4f}")
    write_json(path, {"cases": rows, "broken": len(broken)})
    return broken
