"""Ranks that cut rounds: where they cut, programs proven together, the planner's choice, and what is refused.

`test_several_ranks` holds them to the bits of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, Literal

import pytest
from rank_cases import projector

from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.freezing import with_frozen
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Numerics, Plan, PlanError, Request
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Command, FinishGradient
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import ChunkShape, RoundShape
from flexengine.schedule.ranks.checker import check_runs
from flexengine.schedule.ranks.chunk_shares import shares_of
from flexengine.schedule.ranks.context_semaphores import ContextSemaphores, HandedOn
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import runs_of_ranks
from flexengine.schedule.ranks.transports import layout_of
from tests.parallel.test_ranks_checker import awaiting, is_rejected, signalling, without_awaits, without_signals
from tests.parallel.test_split_transport import changed
from tests.schedule.small_plans import homes_of, random_plan, small_model

SLICES = 6


def cut(plan: Plan, model: ModelSpec, size: int, update: Literal["cpu", "gpu"] = "cpu") -> Plan:
    """The plan for ranks that cut rounds, of sequences of six slices and two chunks more."""
    request = replace(plan.request, ranks=size, max_seq_len=64 * SLICES, max_global_batch_tokens=4096)
    groups = homes_of(model, [GroupPlan(update=update)] * len(model.groups))
    rounds = {"chunks_per_round": SLICES + 2, "window_slots": 1 + size % 2}
    return replace(plan, request=request, transport="context", groups=groups, **rounds)


def round_of(slices: int, before: int = 0, after: int = 0) -> RoundShape:
    """A long sequence between chunks of whole ones."""
    whole = ChunkShape(64, 32)
    long = [ChunkShape(64, 128 * i + 64, before, before + slices - 1, 64 * i) for i in range(slices)]
    return RoundShape((*[whole] * before, *long, *[whole] * after))


ROUNDS = (round_of(6), round_of(5, 1, 1), round_of(2, 0, 2), round_of(2))
"""A rank may have no part of the long sequence, or no chunk at all."""


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_are_proven(seed):
    random, size = Random(seed), 2 + seed % 3
    frozen = [with_frozen(small_model(), names) for names in (["embed", "block.1"], ["embed", "block.0", "head"])]
    model = [small_model(), small_model(tied=True), *frozen][seed]
    plan = cut(random_plan(random, model, sliced=True, segments=False), model, size, random.choice(["cpu", "gpu"]))
    layout = layout_of(model, plan)
    assert layout.kept_chunks < plan.num_chunks
    for shape, num_rounds in zip(ROUNDS, (3, 2, 1, 3), strict=True):
        runs = runs_of_ranks(layout, shape, num_rounds)
        check_runs(layout, runs, num_rounds)
        for program in {run.program for rank in runs for run in rank}:
            check_program(program, layout.gpu_bytes, layout.host_bytes, layout.node_bytes)


def small_runs() -> tuple[Layout, list[list[RankRun]]]:
    """Two rounds of a sequence that three ranks share. Of three blocks the second is frozen."""
    model = with_frozen(small_model(), ["block.1"])
    plan = cut(random_plan(Random(1), model, sliced=True, segments=False), model, 3)
    layout = layout_of(model, plan)
    return layout, runs_of_ranks(layout, round_of(6), 2)


def test_semaphores_that_change_are_noticed():
    """Each signal dropped, raised late or in another semaphore; each wait dropped, or for another row or value."""
    layout, runs = small_runs()
    check_runs(layout, runs, 2)
    found = ContextSemaphores(layout)
    handed = HandedOn("window", 2, 0, False), HandedOn("grads", 2, 0, False), HandedOn("sums", 3, 0, False)
    semaphores = [found.norm().semaphore]  # and where sums follow, grads need not be awaited
    semaphores += [found.handed(what).semaphore for what in handed]
    for semaphore in semaphores:
        changes = [without_signals(semaphore), without_awaits(semaphore), signalling(semaphore, lag=1)]
        changes += [awaiting(semaphore, semaphore=9999), awaiting(semaphore, lag=2)]
        for number, change in enumerate(changes):
            assert is_rejected(layout, changed(runs, change)), (number, semaphore)


def without(kind: str, layer: int) -> Sequence[object]:
    return [lambda c: None if c.kind == kind and (c.args.layer, c.args.chunk) == (layer, 1) else c]


def forgetting(command: Command) -> Command:
    """Gradients of the second round are not added to those of the first."""
    stored = isinstance(command.args, FinishGradient)
    return replace(command, args=command.args._replace(has_previous=False)) if stored else command


def beginning(command: Command) -> Command:
    """The second rank's accumulators hold nothing yet."""
    begins = command.kind == "backward" and command.args.accumulators and command.args.layer == 3
    return replace(command, args=replace(command.args, first=True)) if begins else command


def test_what_is_added_up_otherwise_is_noticed():
    layout, runs = small_runs()
    changes = {
        "a layer less forward": without("forward", 2)[0],
        "a layer less backward": without("backward", 2)[0],
        "gradients that forget": forgetting,
        "sums that begin again": beginning,
        "a gradient less": lambda c: None if c.kind == "finish_gradient" and c.args.group == 3 else c,
    }
    for what, change in changes.items():
        assert is_rejected(layout, changed(runs, change)), what
    swapped = [runs[0], [run if run.updates else run._replace(program=runs[0][0].program) for run in runs[1]], runs[2]]
    assert is_rejected(layout, swapped), "chunks of another rank"


def test_ranks_with_late_slices_take_fewer():
    """Where attention is most of the work; together ranks run every chunk once, in order."""
    model = small_model(hidden=32)
    plan = cut(random_plan(Random(2), model, sliced=True, segments=False), model, 3)
    request = replace(plan.request, max_seq_len=64 * 64, max_global_batch_tokens=64 * 64)
    layout = layout_of(model, replace(plan, request=request, chunks_per_round=64))
    shares = shares_of(layout, round_of(64).chunks)
    assert [c for share in shares for c in share] == list(range(64))
    assert len(shares[0]) > len(shares[1]) > len(shares[2]) > 0
    assert layout.kept_chunks == len(shares[0])


def request(gpus: int, tokens: int, **more: Any) -> Request:
    numerics = Numerics(state="bfloat16")
    return Request(tokens, tokens, 20 * GIB, gpus * 40 * GIB, numerics=numerics, ranks=gpus, **more)


def test_one_long_sequence_is_cut():
    """By itself, as any other way leaves all GPUs but one idle."""
    spec, node = open_model("preset:llama-3.2-1b").spec, with_gpus(preset("rtx4090"), 2)
    asked = request(2, 32768, chunk_tokens=4096)
    plan = plan_for_ranks(spec, asked, node)
    assert plan.transport == "context"
    assert Plan.from_json(plan.to_json()) == plan
    relayed = plan_for_ranks(spec, replace(asked, transport="relay"), node)
    assert plan.predicted.step_s < 0.7 * relayed.predicted.step_s
    assert plan.predicted.gpu_bytes <= 20 * GIB
    assert plan.predicted.host_bytes <= 80 * GIB


def test_short_sequences_are_not_cut():
    spec = open_model("preset:llama-3.2-1b").spec
    asked = replace(request(2, 8192), max_seq_len=2048)
    assert plan_for_ranks(spec, asked, with_gpus(preset("rtx4090"), 2)).transport != "context"


REFUSED = {
    "images": (projector().source.spec, {}, "it has a tower, whose rows come with the embedding"),
    "nodes": (small_model(), {"nodes": 2}, "there are several nodes"),
    "one GPU": (small_model(), {"nodes": 2, "ranks": 1}, "each node has one GPU"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_cut_is_refused(what):
    model, more, reason = REFUSED[what]
    asked = replace(request(2, 4096, transport="context"), **more)
    with pytest.raises(PlanError, match=f"cannot be trained with --transport context: {reason}\n  works with"):
        plan_for_ranks(model, asked, with_gpus(preset("rtx4090"), 2))


def test_nothing_of_it_lies_on_one_gpu_alone():
    model = small_model()
    plan = cut(random_plan(Random(1), model, sliced=True, segments=False), model, 2)
    with pytest.raises(ValueError, match="trained by several ranks"):
        layout_of(model, replace(plan, groups=(GroupPlan("gpu", "gpu", "gpu"), *plan.groups[1:])))
