"""Does an interrupt at any line leave an engine that goes on right or refuses? Counts what came of each, as JSON.

python -m bench.interrupts --points 6800 --json out.json

A story is a few calls of an engine. A trace function raises KeyboardInterrupt at the n-th line that runs in files of
flexengine. Whoever called then does what the documentation says: gives the batches of the step again, unless the engine
tells that the step counted or that earlier gradients are still there. At the end the weights must have the bits of the
undisturbed story, or every later call must have refused with the same message.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexengine
from bench.environment import write_json
from flexengine.models.registry import ModelSource, build_model
from flexengine.optim import AdamW
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan, Request
from flexengine.runtime.engine import Engine, EngineSettings

PACKAGE = str(Path(flexengine.__file__).parent)
CONFIG = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 31, "tie_word_embeddings": False, "initializer_range": 0.2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
FLOAT32 = Numerics("float32", "full", "float32", "float32")
SIZES = (((11, 5), (7,)), ((12, 9, 3, 10),))
"""Lengths of sequences by batch and step: the first step accumulates two batches, the second takes two rounds."""
STEPS = [
    [[[(7 * i + 3 * j + n) % 31 for j in range(n)] for i, n in enumerate(lengths)] for lengths in step]
    for step in SIZES
]
REFUSAL = "this engine cannot go on: an optimizer step was interrupted"


class Story(NamedTuple):
    """How an engine updates and is called. at_once: the last batch of a step by train_step, else by fwd_bwd and step.
    evaluates: an evaluation between the calls of a step."""

    update: str
    max_grad_norm: float | None
    at_once: bool
    evaluates: bool = False


STORIES = {
    "fwd_bwd, step": Story("gpu", 1.0, at_once=False, evaluates=True),
    "fwd_bwd, step, updates by the CPU": Story("cpu", None, at_once=False),
    "train_step": Story("gpu", None, at_once=True),
    "train_step, updates by the CPU": Story("cpu", None, at_once=True, evaluates=True),
    "train_step, clipped updates by the CPU": Story("cpu", 1.0, at_once=True),
}


class Outcome(NamedTuple):
    """What came of an interrupt at one line: "right", "refused", "wrong" or "no interrupt", and where it struck."""

    story: str
    point: int
    outcome: str
    place: str
    why: str = ""


# ---- one story --------------------------------------------------------------------------------------------------


def new_engine(story: Story) -> Engine:
    """A tiny engine; its initial weights come from a seed."""
    spec = build_model("tiny", CONFIG)
    request = Request(16, 64, 2**30, 2**30, numerics=FLOAT32)
    blocks = [LayerPlan((), (), "host")] * len(spec.blocks)
    groups = tuple(GroupPlan(update=story.update) for _ in spec.groups)
    plan = Plan("tiny", request, 16, 2, (LayerPlan(), *blocks, LayerPlan()), groups, optimizer_tile=1 << 16)
    settings = EngineSettings(max_grad_norm=story.max_grad_norm)
    return Engine(ModelSource(spec, None, None), plan, torch.device("cpu"), AdamW(lr=1e-2), settings)


def calls_of(story: Story, engine: Engine, step: int) -> list[Callable[[], Any]]:
    """The calls of a step. Exactly the last one updates, and each of the others but evaluations adds a batch."""
    *earlier, last = STEPS[step]
    calls: list[Callable[[], Any]] = [lambda batch=batch: engine.fwd_bwd(batch) for batch in earlier]
    if story.evaluates:
        calls.append(lambda: engine.evaluate(last))
    if story.at_once:
        return [*calls, lambda: engine.train_step(last)]
    return [*calls, lambda: engine.fwd_bwd(last), engine.step]


def tell(story: Story, engine: Engine) -> None:
    """Make all calls; after an interrupt, what its caller would."""
    state = engine.state  # read without running a line of flexengine
    while state.step_count < len(STEPS):
        step, done = state.step_count, 0
        calls = calls_of(story, engine, step)
        while state.step_count == step:
            try:
                calls[done]()
                done += 1
            except KeyboardInterrupt:
                done = done if engine.has_gradients else 0


def weights_of(engine: Engine) -> dict[str, Tensor]:
    """The weights; the engine is closed."""
    weights = engine.state_dict()
    engine.close()
    return weights


class InterruptAt:
    """Raises KeyboardInterrupt when the n-th line of flexengine's own files begins in this thread.

    point: n, counted from 1; None lists the places of all lines instead. place: file and line of the interrupt.
    """

    def __init__(self, point: int | None) -> None:
        self.point, self.lines, self.place = point, 0, ""
        self.places: list[str] = []

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.point is None or self.lines == self.point:
                self.place = f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"
                self.places.append(self.place)
            if self.lines == self.point:
                raise KeyboardInterrupt
        return self._line


def undisturbed(story: Story) -> tuple[list[str], dict[str, Tensor]]:
    """The places of all lines of a story in order, and its weights.

    It is told twice: once functions remember what they are asked, each later one takes the same lines.
    """
    for _ in range(2):
        engine = new_engine(story)
        with InterruptAt(None) as lines:
            tell(story, engine)
        weights = weights_of(engine)
    return lines.places, weights


def interrupted(name: str, point: int, expected: dict[str, Tensor]) -> Outcome:
    """Tell a story with an interrupt at one line, and judge its end."""
    story = STORIES[name]
    engine = new_engine(story)
    trace = InterruptAt(point)
    try:
        with trace:
            tell(story, engine)
        found = weights_of(engine)
    except ValueError as error:
        why = str(error) if refuses(engine, str(error)) else f"not refused by all calls: {error}"
        return Outcome(name, point, "refused" if why.startswith(REFUSAL) else "wrong", trace.place, why)
    same = all(torch.equal(found[key], value) for key, value in expected.items())
    outcome = ("right" if trace.place else "no interrupt") if same else "wrong"
    return Outcome(name, point, outcome, trace.place, "" if same else "other weights than without an interrupt")


def refuses(engine: Engine, message: str) -> bool:
    """Whether every call raises the same message. The engine is closed."""
    batch = STEPS[0][0]
    calls = (
        lambda: engine.fwd_bwd(batch), engine.step, lambda: engine.train_step(batch), engine.state_dict,
        engine.gradients, lambda: engine.evaluate(batch),
    )  # fmt: skip
    said = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    engine.close()
    return said == [message] * len(calls)


# ---- many points ------------------------------------------------------------------------------------------------


def choose_points(places: list[str], num_points: int, chosen: random.Random) -> list[int]:
    """Numbers of lines, from 1: of every place one passage, then a second, so that loops do not take all points."""
    passages: dict[str, list[int]] = {}
    for point, place in enumerate(places, start=1):
        passages.setdefault(place, []).append(point)
    for points in passages.values():
        chosen.shuffle(points)
    in_turns = [(turn, chosen.random(), point) for points in passages.values() for turn, point in enumerate(points)]
    return [point for _, _, point in sorted(in_turns)[:num_points]]


def sample(num_points: int, seed: int = 0) -> list[Outcome]:
    """Outcomes at random points of the stories, the same number of each."""
    torch.set_num_threads(1)
    chosen, outcomes = random.Random(seed), []
    for name, story in STORIES.items():
        places, expected = undisturbed(story)
        points = choose_points(places, num_points // len(STORIES), chosen)
        outcomes += [interrupted(name, point, expected) for point in points]
    return outcomes


def sample_in_processes(num_points: int, seed: int, num_workers: int) -> list[Outcome]:
    """The same in so many processes, each with points of its own seed."""
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as pool:
        seeds = range(seed, seed + num_workers)
        parts = pool.map(sample, [num_points // num_workers] * num_workers, seeds)
        return [outcome for part in parts for outcome in part]


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """The figures of a run."""
    wrong = [outcome for outcome in outcomes if outcome.outcome == "wrong"]
    return {
        "points": len(outcomes),
        "outcomes": dict(Counter(o.outcome for o in outcomes)),
        "by_story": {name: dict(Counter(o.outcome for o in outcomes if o.story == name)) for name in STORIES},
        "places": len({o.place for o in outcomes}),
        "wrong": [o._asdict() for o in wrong[:50]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=6800, help="how many interrupts (default: 6800)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the points (default: 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--json", metavar="OUT.json", help="also write the figures to a file")
    arguments = parser.parse_args()
    start = time.perf_counter()
    found = summary(sample_in_processes(arguments.points, arguments.seed, arguments.workers))
    found["seconds"] = round(time.perf_counter() - start, 1)
    for name, value in found.items():
        print(f"{name}: {value}")
    write_json(arguments.json, found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
