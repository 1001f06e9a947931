"""Does a plan ever change a result, or break its promise of memory? Random jobs, each under several plans.

    python -m bench.random_runs --seeds 0 2000 --minutes 30 --json out.json
    python -m bench.random_runs --seeds 17 18          # look into one
    python -m bench.random_runs --seeds 0 25 --nodes 2 --exchange fp8     # all variants on so many nodes

A job (`bench.random_cases`) is trained for two steps with all the memory that it could use, with about as little as it
can do with, and with a share between, on one rank or on two or three that relay, split, have stages or cut rounds. Half
of the later plans go on from the checkpoint that the plan before left after the first step, some take a step by several
calls (`bench.random_steps`), and some are random ones instead of the planner's (`bench.random_plans`). Losses, norms
and all weights have to be equal in every bit, and arenas no larger than promised. What the options forbid of each other
is refused with a message; any other error is a complaint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # ranks end while others ask after them

import torch

from bench.environment import write_json
from bench.random_cases import STEPS, Case, Variant, draw_case
from bench.random_plans import redrawn
from bench.random_steps import Calls, Feed, take_step
from flexengine.api import PlannedRun, build, prepare
from flexengine.models import blocks
from flexengine.models.in_parts import in_parts
from flexengine.optim import OPTIMIZERS
from flexengine.parallel.team import leave
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.problem import Problem
from flexengine.runtime.engine import Engine
from flexengine.schedule import node_states
from tests.parallel.ranks_helper import run_ranks

MIB = 2**20
MOST_BYTES, HOST_GIB = 256 * MIB, 12.0  # a process counts as 1 GiB of the host
OF_ONE_NODE = ("stages", "context")
REFUSALS = ("ValueError", "PlanError", "ShortageError")


class Outcome(NamedTuple):
    """What a variant showed: a digest of all weights, losses and norms of the steps that it took, GPU bytes, and how
    ranks shared it."""

    digest: str
    losses: list[float]
    gpu_bytes: int
    plan: str

    def agrees(self, whole: Outcome) -> bool:
        """Whether it is that of a variant which took all steps, in every bit."""
        return self.digest == whole.digest and repr(self.losses) == repr(whole.losses[-len(self.losses) :])


class Result(NamedTuple):
    """What came of a case. feed: what it was trained on. outcome: same, refused, or a complaint."""

    seed: int
    name: str
    options: dict[str, Any]
    feed: Feed
    outcome: str
    message: str = ""
    variants: tuple[str, ...] = ()
    seconds: float = 0.0


# ---- one variant ------------------------------------------------------------------------------------------------


def planned_run(folder: Path, case: Case, variant: Variant, gpu_bytes: int) -> PlannedRun:
    """Plan a variant. Raises: ValueError for what the options forbid, or where nothing fits."""
    budgets = {"max_gpu_mem_bytes": gpu_bytes, "max_host_mem_gib": HOST_GIB}
    options = {**case.options, **variant.options, **budgets}
    planned = prepare(folder, **options, device="cpu", hardware="cpu-test", init="random")
    return redrawn(planned, Random(f"plan of {case.seed}")) if variant.redrawn else planned


def train(
    case: Case, planned: PlannedRun, calls: Calls = "train_step", left: Path | None = None, found: Path | None = None
) -> Outcome:
    """Take the steps of a case.

    left: where a checkpoint of the first step is left. found: one of another plan, from which to go on. Raises:
    AssertionError where an arena is larger than promised.
    """
    plan, losses, digest = planned.plan, list[float](), hashlib.sha256()
    with build(planned, OPTIMIZERS[case.options["optimizer"]](lr=1e-2)) as engine:
        promised = plan.predicted
        assert engine.layout.gpu_bytes <= promised.gpu_bytes <= plan.request.max_gpu_bytes, "GPU arena above promise"
        assert engine.layout.host_bytes <= promised.host_bytes <= plan.request.max_host_bytes, "host arena above it"
        for step in range(STEPS):
            if step == 0 and found is not None:
                _load(engine, found)
            else:
                random = Random(1000 * case.seed + step)
                ids = [[random.randrange(engine.model.vocab_size) for _ in range(n)] for n in case.lengths[step]]
                losses += take_step(engine, ids, case.feed, calls, random)
            if step == 0 and left is not None:
                engine.save_checkpoint(left)
        for name, tensor in sorted(engine.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return Outcome(digest.hexdigest(), losses, plan.predicted.gpu_bytes, f"{plan.request.ranks} {plan.transport}")


def _load(engine: Engine, found: Path) -> None:
    """Load a checkpoint of the same job. Raises: RuntimeError, as its refusal is a complaint."""
    try:
        engine.load_checkpoint(found)
    except ValueError as error:
        raise RuntimeError(f"a checkpoint of the same job is refused: {error}") from error


def on_ranks(train_one: Callable[[], Outcome], ranks: int, nodes: int = 1) -> Outcome:
    """What ranks of each node found, which has to be one thing; each is a process that is forked. Raises: ValueError
    for what they refuse, RuntimeError for other errors of theirs."""

    def as_rank(_: int) -> Outcome:
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
        try:
            return train_one()
        finally:
            leave()

    found = run_ranks(as_rank, ranks * nodes, nodes=nodes)
    errors = [outcome.error for outcome in found if outcome.error is not None]
    refused = [error for error in errors if error.startswith(REFUSALS)]
    if errors:
        raise ValueError(refused[0]) if refused else RuntimeError(errors[0])
    values = [outcome.value for outcome in found]
    assert len({(value.digest, *value.losses) for value in values}) == 1, "ranks differ from each other"
    return values[0]


# ---- one case ---------------------------------------------------------------------------------------------------


@patch.object(node_states, "PIECE_ELEMENTS", 301)
@patch.object(blocks, "PART_ELEMENTS", 1)
def run_case(case: Case, folder: Path, nodes: int = 1, exchange: str | None = None) -> Result:
    """Train a case in all variants and compare them. Every expert may cross the link by itself, and nodes exchange
    gradients in small pieces."""
    start_s, told = time.perf_counter(), list[str]()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config))

    def result(outcome: str, message: str = "") -> Result:
        seconds = round(time.perf_counter() - start_s, 2)
        return Result(case.seed, case.name, case.options, case.feed, outcome, message, tuple(told), seconds)

    try:
        planned = planned_run(folder, case, case.variants[0], MOST_BYTES)
    except ValueError as error:
        return result("refused", str(error))
    except Exception:
        return result("crash", traceback.format_exc()[-3000:])
    first: Outcome | None = None
    last: Path | None = None
    for index, variant in enumerate(case.variants):
        gpu_bytes, left = budget_of(planned, variant, nodes, exchange), folder / f"checkpoint-{index}"
        train_one = partial(train, case, calls=variant.calls, left=left, found=last if variant.resumed else None)
        try:
            alone = first is None and nodes == 1
            found = (
                train_one(planned)
                if alone
                else _found(train_one, partial(planned_run, folder, case), variant, gpu_bytes, nodes, exchange)
            )
        except ValueError as error:
            if variant.ranks == 1:
                return result("refused a budget", f"{variant}, {gpu_bytes} bytes: {error}")
            told.append(f"refused: {variant.ranks} ranks {variant.options}: {str(error).splitlines()[0]}")
            continue  # ranks that need more than one does
        except Exception:
            return result("crash", f"{variant}, {gpu_bytes} bytes: {traceback.format_exc()[-3000:]}")
        told.append(f"{found.plan}, {found.gpu_bytes} bytes{_told(variant)}")
        first, last = first or found, left
        if not found.agrees(first):
            return result("bits differ", f"{variant}, {gpu_bytes} bytes: {found.losses} instead of {first.losses}")
    return result("same")


def _told(variant: Variant) -> str:
    told = (variant.resumed and "resumed", variant.redrawn and "redrawn", variant.calls)
    return "".join(f", {word}" for word in told if word)


def _found(
    train_one: Callable[[PlannedRun], Outcome], plan: Callable[[Variant, int], PlannedRun], variant: Variant,
    gpu_bytes: int, nodes: int, exchange: str | None,
) -> Outcome:  # fmt: skip
    if nodes > 1:
        transport = {"transport": "relay"} if variant.options.get("transport") in OF_ONE_NODE else {}
        variant = variant._replace(options={**variant.options, **transport, "exchange_dtype": exchange})

    def train_planned() -> Outcome:
        return train_one(plan(variant, gpu_bytes))

    return train_planned() if variant.ranks * nodes == 1 else on_ranks(train_planned, variant.ranks, nodes)


def budget_of(planned: PlannedRun, variant: Variant, nodes: int = 1, exchange: str | None = None) -> int:
    """A budget between the least that a job can do with and what it takes with all; all for ranks that do not relay,
    which have other slots."""
    if variant.share >= 1 or variant.options.get("transport", "relay") != "relay":
        return MOST_BYTES
    options = {**variant.options, "nodes": nodes, "exchange": exchange}
    model, request = in_parts(planned.source.spec), replace(planned.plan.request, **options)
    least = Feasibility(Problem(model, request, planned.profile)).least_gpu().gpu_bytes
    return int(least + variant.share * max(0, planned.plan.predicted.gpu_bytes - least))


def run_cases(
    seeds: Iterable[int], most_ranks: int = 3, until_s: float = float("inf"), nodes: int = 1,
    exchange: str | None = None,
) -> list[Result]:  # fmt: skip
    """The results of cases, until the clock says so."""
    results = []
    with tempfile.TemporaryDirectory() as name:
        for seed in seeds:
            if time.monotonic() > until_s:
                break
            results.append(run_case(draw_case(seed, most_ranks), Path(name) / "model", nodes, exchange))
            if results[-1].outcome not in ("same", "refused"):
                print(results[-1], flush=True)
    return results


def summary(results: list[Result]) -> dict[str, Any]:
    """Counts by outcome, family, optimizer and what else was drawn, and every complaint."""
    passed = [result for result in results if result.outcome == "same"]
    trained = [text for result in passed for text in result.variants if not text.startswith("refused")]
    kinds = ("optimizer", "dtype", "optimizer_state_dtype", "mode", "base_dtype", "matmul_dtype", "keep_dtype")
    return {
        "cases": len(results),
        "outcomes": Counter(result.outcome for result in results),
        "same": {
            "family": Counter(result.name.split(",")[0] for result in passed),
            **{kind: Counter(str(result.options.get(kind, "default")) for result in passed) for kind in kinds},
            "feed": Counter(result.feed for result in passed),
            "way": Counter(word for text in trained for word in text.split(", ")[2:]),
            "ranks and transport": Counter(text.split(",")[0] for result in passed for text in result.variants),
        },
        "refused": Counter(result.message.split(";")[0][:120] for result in results if result.outcome == "refused"),
        "complaints": [result._asdict() for result in results if result.outcome not in ("same", "refused")],
    }


def main() -> None:
    """Run the cases of a range of seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 300), help="first seed, and the one after the last")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--ranks", type=int, default=3, help="most ranks of a case")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that all variants run on")
    parser.add_argument("--exchange", default=None, help="dtype in which nodes exchange gradients")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = run_cases(range(*args.seeds), args.ranks, time.monotonic() + 60 * args.minutes, args.nodes, args.exchange)
    found = summary(results)
    print(json.dumps(found["outcomes"]))
    write_json(args.json, found)


if __name__ == "__main__":
    main()
