"""The simulation of several ranks: timelines worked on paper, and the order in which ranks on the CPU really run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from engine_helpers import FLOAT32, build_engine, random_batch, random_weights, streamed_plan, tiny_config
from ranks_helper import run_ranks, values_of

from flexengine.models.registry import ModelSource
from flexengine.ops.base import Work
from flexengine.parallel.control import Control
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import Signals
from flexengine.plan import GroupPlan, Numerics, Plan
from flexengine.runtime.execution.in_order import InOrder
from flexengine.runtime.ranks.context import RankGroup
from flexengine.schedule import node_states
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Program, Signal, Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape
from flexengine.schedule.packing import pack, packed_shape
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.programs import lower_round, lower_update
from flexengine.schedule.ranks.node_exchange import lower_exchange, node_pieces
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import step_of_rank
from flexengine.schedule.ranks.simulator import SIGNAL_S, TimedRankRun, simulate_ranks, simulate_runs
from flexengine.schedule.ranks.split_commands import GatherShares
from flexengine.schedule.ranks.transports import layouts_of
from flexengine.schedule.shares import Share
from flexengine.schedule.simulator import Rates, simulate
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots
from tests.schedule.small_plans import full_round, random_plan, small_model

# -- on paper --------------------------------------------------------------------------------------------------------


def rates(host_bytes_per_s: float = 1e9) -> Rates:
    """1 FLOP a second; 10 bytes a second one way, 8 when both directions are busy; the CPU moves a byte a second."""
    alone, both = ({Stream.H2D: v, Stream.D2H: v} for v in (10.0, 8.0))
    return Rates(
        lambda command: command.work.matmul_flops, alone, both, 0.0,
        cpu_s=lambda command: command.work.memory_bytes, host_bytes_per_s=host_bytes_per_s,
    )  # fmt: skip


def builder() -> ProgramBuilder:
    slots = tuple(Slot(SlotKey(f"{m}{i}", memory=m), 100 * i, 100, "") for m in ("gpu", "node") for i in range(3))
    return ProgramBuilder("paper", slots, overlapping_slots(slots))


def copy(b: ProgramBuilder, stream: Stream, source: int, target: int) -> None:
    b.copy(CommandName("copy"), stream, "c", [CopyRegion(source, 0, target, 0, 100)])


def run_of(program: Program, number: int = 0) -> list[RankRun]:
    return [RankRun(program, 0, number, updates=False)]


def test_copies_of_all_ranks_share_host_memory():
    b = builder()
    copy(b, Stream.H2D, 3, 0)
    for size, seconds in ((1, 10.0), (2, 10.0), (4, 20.0)):
        found = simulate_runs([run_of(b.build(), n) for n in range(size)], size, rates(host_bytes_per_s=20.0))
        assert [rank[0].end_s for rank in found] == pytest.approx([seconds] * size)


def test_gpus_without_a_way_of_their_own_exchange_through_link_and_host():
    """What each of two ranks receives crosses a link and the host's memory twice, beside a fetch on the same link."""
    runs = list[list[RankRun]]()
    for rank in range(2):
        b = builder()
        copy(b, Stream.H2D, 3, 0)
        gather = GatherShares(rank, 1, 100, 2)
        b.add("gather", CommandName("gather"), Stream.COMM, [], [Access(1, "c")], args=gather)
        runs.append(run_of(b.build()))
    for by_host, host_bytes_per_s, seconds in ((False, 1e9, 10.0), (True, 1e9, 30.0), (True, 10.0, 60.0)):
        priced = rates(host_bytes_per_s)._replace(peers_by_host=by_host)
        found = simulate_runs(runs, 2, priced)
        assert [rank[0].end_s for rank in found] == pytest.approx([seconds] * 2)


def test_streams_of_one_direction_share_the_link():
    """A copy that another rank is awaited for holds back none behind it on another stream."""
    b = builder()
    copy(b, Stream.H2D, 3, 0)
    copy(b, Stream.D2H, 4, 1)  # another stream, but to the GPU as well
    [[timed]] = simulate_runs([run_of(b.build())], 1, rates())
    assert timed.timing.end_s == pytest.approx([20.0, 20.0])


def test_a_copy_starts_when_another_rank_has_raised_its_cell():
    writes, reads = builder(), builder()
    writes.add("op", CommandName("op"), Stream.COMPUTE, [], [Access(0, "c")], Work(matmul_flops=5.0))
    copy(writes, Stream.D2H, 0, 3)
    writes.between_ranks(-1, signals=(Signal(7, "own", "round"),))
    copy(reads, Stream.H2D, 3, 0)
    reads.between_ranks(-1, awaits=(Signal(7, "previous", "round", lag=1),))
    copy(reads, Stream.H2D, 4, 1)
    first, second = simulate_runs([run_of(writes.build()), run_of(reads.build(), 1)], 2, rates())
    assert first[0].timing.end_s == pytest.approx([5.0, 15.0])
    assert second[0].timing.start_s == pytest.approx([15.0 + SIGNAL_S, 25.0 + SIGNAL_S])


@pytest.mark.parametrize("seed", range(8))
def test_one_rank_takes_what_its_programs_take_alone(seed):
    """Until the host's memory is the limit, the simulation of ranks is that of one program."""
    random, model = Random(seed), small_model()
    layout = Layout(model, random_plan(random, model, sliced=seed % 2 == 0))
    alone = rates()._replace(copy_latency_s=0.1, issue_s=lambda command: 0.5)
    programs = [lower_round(layout, full_round(layout), first=True), lower_update(layout)]
    for program in programs:
        [[timed]] = simulate_runs([run_of(program)], 1, alone)
        expected = simulate(program, alone)
        assert timed.timing.total_s == pytest.approx(expected.total_s, rel=1e-6)
        assert timed.timing.busy_s == pytest.approx(expected.busy_s, rel=1e-6)


def test_rounds_that_repeat_are_counted():
    """A long step takes as long as all of its rounds, of which only some are simulated."""
    model = small_model()
    plan = random_plan(Random(5), model, sliced=False)
    groups = tuple(GroupPlan() for _ in plan.groups)
    seconds = []
    for rounds in (3, 6, 9):
        request = replace(plan.request, ranks=2, max_global_batch_tokens=2 * rounds * plan.round_tokens)
        found = simulate_ranks(Layout(model, replace(plan, groups=groups, request=request)), rates())
        assert [timed.repeats for timed in found.ranks[0]] == [1, 1, 1, rounds - 2]
        seconds.append(found.step_s)
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])


@pytest.mark.parametrize("transport", ["relay", "split"])
def test_nodes_add_up_gradients_beside_the_last_round(transport, monkeypatch):
    """What the network takes beyond the last round's backward is waited for, at most all of it."""
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 1201)
    model = small_model(blocks=4)
    plan = random_plan(Random(5), model, sliced=False)
    request = replace(plan.request, ranks=2, nodes=4, max_global_batch_tokens=24 * plan.round_tokens)
    groups = tuple(GroupPlan() for _ in plan.groups)
    layout = Layout(model, replace(plan, groups=groups, request=request, transport=transport, touched_only=False))
    alone = simulate_ranks(layout, rates())
    assert alone.exchange_s == 0.0
    assert alone.exchange_wait_s <= 1.01 * SIGNAL_S
    # each of four nodes sends three quarters of all gradients, then as much of the sums, its ranks half of that each
    width = layout.groups[0].element_bytes("grad")
    stored = sum(piece.numel * width for piece in node_pieces(layout))
    sent = [command.args.network_bytes for command in lower_exchange(layout, Share(0, 2)).commands]
    for seconds in (0.01 * alone.step_s, alone.step_s):
        network = 2 * 0.75 * stored / 2 / seconds
        found = simulate_ranks(layout, rates()._replace(network_bytes_per_s=network))
        assert found.exchange_s == pytest.approx(seconds, rel=0.1)
        assert sent[-1] / network <= found.exchange_wait_s < 0.9 * found.exchange_s
        assert found.step_s == pytest.approx(alone.step_s + found.exchange_wait_s)


def test_ranks_that_exchange_nothing_between_nodes_are_priced():
    """More ranks of a node than there are pieces."""
    model = small_model()
    plan = random_plan(Random(5), model, sliced=False)
    request = replace(plan.request, ranks=9, nodes=2, max_global_batch_tokens=18 * plan.round_tokens)
    groups = tuple(GroupPlan() for _ in plan.groups)
    layout = Layout(model, replace(plan, groups=groups, request=request, transport="relay", touched_only=False))
    assert not lower_exchange(layout, Share(8, 9)).commands
    assert simulate_ranks(layout, rates()._replace(network_bytes_per_s=1e6)).exchange_s > 0


@pytest.mark.parametrize("transport", ["relay", "split"])
def test_nodes_give_each_other_weights_under_the_next_forward(transport, monkeypatch):
    """Where they divide states: as many bytes cross, and forward waits for what comes late."""
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 1201)
    model = small_model(blocks=4)
    plan = random_plan(Random(5), model, sliced=False)
    request = replace(plan.request, ranks=2, nodes=4, max_global_batch_tokens=24 * plan.round_tokens)
    homes = [(GroupPlan(update="cpu", states=states),) * len(plan.groups) for states in ("host", "nodes")]
    changes = {"request": request, "transport": transport, "touched_only": False}
    whole, divided = (Layout(model, replace(plan, groups=each, **changes)) for each in homes)
    alone = simulate_ranks(divided, rates()).step_s
    network = sum(c.args.network_bytes for c in lower_exchange(whole, Share(0, 2)).commands) / (0.01 * alone)
    found, others = (simulate_ranks(each, rates()._replace(network_bytes_per_s=network)) for each in (divided, whole))
    assert found.exchange_s == pytest.approx(others.exchange_s, rel=0.05)
    assert found.step_s < 1.01 * alone
    slow = simulate_ranks(divided, rates()._replace(network_bytes_per_s=network / 200))
    assert slow.step_s > alone + 0.9 * slow.exchange_s / 2  # at least the gathered weights of the first group, and sums


# -- as it runs ------------------------------------------------------------------------------------------------------

LENGTHS = [30, 17, 24, 32, 9, 28, 31]
ON_CPU = GroupPlan(update="cpu")


class Ran(NamedTuple):
    """What a rank did: (step, run in it, command) in order, and what it raised as (semaphore, value, when)."""

    commands: list[tuple[int, str]]
    raised: list[tuple[int, int, float]]


def plan_of(source: ModelSource, size: int, homes: tuple[GroupPlan, ...], numerics: Numerics) -> Plan:
    plan = streamed_plan(source.spec, chunks_per_round=1, max_seq_len=32, numerics=numerics)
    groups = tuple(homes[i % len(homes)] for i in range(len(plan.groups)))
    return replace(plan, groups=groups, request=replace(plan.request, ranks=size))


def in_stages(plan: Plan) -> Plan:
    """The plan with blocks that have a rank, the first on its GPU."""
    return replace(plan, transport="stages", groups=(plan.groups[0], GroupPlan("gpu", "gpu", "gpu"), *plan.groups[2:]))


def simulated(source: ModelSource, plan: Plan, steps: int) -> list[list[TimedRankRun]]:
    """All ranks' rounds and updates of some steps of the batch."""
    packed = pack(LENGTHS, plan.chunk_tokens, plan.chunks_per_round, plan.round_multiple)
    shapes: list[RoundShape] = [packed_shape(chunks, plan.chunk_tokens) for chunks in packed]
    of_ranks = [step_of_rank(one, rank, shapes) for rank, one in enumerate(layouts_of(source.spec, plan))]
    runs = [[run._replace(step=step) for step in range(steps) for run in one] for one in of_ranks]
    return simulate_runs(runs, len(shapes), rates())


def order_of(timed: TimedRankRun) -> list[int]:
    """The commands of a run as they start; work of the CPU, which has a thread of its own, last."""
    commands = timed.run.program.commands
    return sorted(range(len(commands)), key=lambda i: (commands[i].stream is Stream.CPU, timed.timing.start_s[i], i))


def run_as_simulated(
    rank: int, size: int, source: ModelSource, plan: Plan, orders: list[list[list[int]]]
) -> Ran:  # fmt: skip
    """Train two steps, each program in its simulated order; returns what ran."""
    torch.set_num_threads(1)
    ran, turn = Ran([], []), iter(orders[rank])
    started, signalled = InOrder.execute, Signals.signal

    def start(self: Any, command: Any, *arguments: Any) -> None:
        ran.commands.append((command.index, command.label))
        started(self, command, *arguments)

    def signal(self: Any, semaphore: int, value: int) -> None:
        ran.raised.append((semaphore, value, time.monotonic()))
        signalled(self, semaphore, value)

    InOrder.execute, Signals.signal = start, signal
    ranks = Ranks.of_environment()
    group = RankGroup(ranks, Control.open(ranks))
    engine = build_engine(source, plan, group=group, order=lambda program: next(turn))
    for step in range(2):
        engine.train_step(random_batch(step, LENGTHS, 67))
    engine.close()
    return ran


def simulated_raises(ranks: list[list[TimedRankRun]]) -> Iterator[tuple[float, int, int]]:
    """(when, semaphore, rank) of all that is raised by each rank, but for updates, which have no order among ranks."""
    for rank, runs in enumerate(ranks):
        for timed in runs:
            for command in timed.run.program.commands:
                for signal in command.signals:
                    if signal.clock == "round":
                        yield timed.start_s + timed.timing.end_s[command.index], signal.semaphore, rank


CASES = {
    "on_gpu": (2, {}, (GroupPlan(),), FLOAT32),
    "on_both": (3, {}, (ON_CPU, GroupPlan()), Numerics("bfloat16", "split", "bfloat16", "float32")),
    "split": (3, {}, (ON_CPU, GroupPlan()), FLOAT32),
    "stages": (2, {"num_hidden_layers": 3}, (ON_CPU, GroupPlan()), FLOAT32),
    "tied_on_cpu": (4, {"tie_word_embeddings": True}, (ON_CPU,), FLOAT32),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_run_in_the_simulated_order(name):
    """Nothing waits for ever, and each gradient is relayed from rank to rank as simulated."""
    size, config, homes, numerics = CASES[name]
    source = random_weights(tiny_config(**config))
    plan = replace(plan_of(source, size, homes, numerics), transport="split" if name == "split" else "relay")
    plan = in_stages(plan) if name == "stages" else plan
    timed = simulated(source, plan, steps=2)
    orders = [[order_of(run) for run in rank] for rank in timed]
    found: list[Ran] = values_of(run_ranks(run_as_simulated, size, size, source, plan, orders))
    for rank, runs, ran in zip(range(size), timed, found, strict=True):
        commands = [run.run.program.commands[i] for run in runs for i in order_of(run)]
        on_device = [(c.index, c.label) for c in commands if c.stream is not Stream.CPU]
        assert ran.commands == on_device, f"rank {rank}"
    expected, actual = defaultdict(list), defaultdict(list)
    for _, semaphore, rank in sorted(simulated_raises(timed)):
        expected[semaphore].append(rank)
    raised = sorted((when, semaphore, rank) for rank, ran in enumerate(found) for semaphore, _, when in ran.raised)
    for _, semaphore, rank in raised:
        actual[semaphore].append(rank)
    assert {semaphore: actual[semaphore] for semaphore in expected} == expected
