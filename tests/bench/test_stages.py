"""Round-robin stages, which `bench/stages.py` prices: what ranks would run is a step, in an order that can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise

from bench.stage_programs import StageLayout
from bench.stages import Stages, simulate_stages
from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.planner.cost.cost_model import CostModel
from flexengine.schedule.simulator import Rates
from flexengine.schedule.slots import SlotKey

RANKS, CHUNKS = 2, 4


@cache
def stages_of(gpus: int, waves: int = 2) -> tuple[Sequence[StageLayout], Rates]:
    """A plan of small stages, and the rates that it is priced with."""
    spec, profile = open_model("preset:llama-3.2-3b-untied").spec, with_gpus(preset("rtx4090"), gpus)
    tokens = waves * CHUNKS // gpus * 2048
    priced = Stages(spec, profile, gpus, tokens, 2048, (23 * GIB, gpus * 110 * GIB)).priced(2048, waves)
    assert priced is not None
    return priced.layouts, CostModel.of(priced.layouts[0].plan.request, profile, 2048).rates()


def test_ranks_touch_no_place_of_the_node_before_others_are_done_with_it():
    layouts, rates = stages_of(RANKS)
    events = simulate_stages(layouts, 2, rates).events
    clocks = events.clocks(events.in_order())
    touches: dict[SlotKey, list[tuple[int, bool]]] = defaultdict(list)
    for index, event in enumerate(events.all):
        for region in event.command.copies:
            for slot, writes in ((region.source, False), (region.target, True)):
                key = event.run.program.slots[slot].key
                if key.memory == "node":
                    touches[key].append((index, writes))
    assert len(touches) == CHUNKS * (layouts[0].stage.head - 2) + CHUNKS // RANKS  # that of the head for some of them
    for found in touches.values():
        for (one, writes), (other, overwrites) in combinations(found, 2):
            if writes or overwrites:
                before, after = events.all[one], events.all[other]
                ordered = clocks[other, before.lane] >= before.position or clocks[one, after.lane] >= after.position
                assert ordered, f"{before.label} and {after.label}"


def test_every_layer_runs_once_for_every_chunk_after_what_it_reads():
    layouts, rates = stages_of(RANKS)
    simulation = simulate_stages(layouts, 1, rates)
    seconds: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    relayed: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event, start, end in zip(simulation.events.all, simulation.start, simulation.end, strict=True):
        command = event.command
        if command.kind in ("forward", "backward"):
            layer = layouts[event.rank].stage.layers[command.args.layer]
            seconds[command.kind, layer, command.args.chunk].append((start, end))
        elif str(command.name).startswith("offload grad head piece"):
            relayed[str(command.name)].append((end, event.rank))
    head = layouts[0].stage.head
    order = [("forward", layer) for layer in range(head)] + [("backward", layer) for layer in range(head, -1, -1)]
    for chunk in range(CHUNKS):
        times = [seconds.pop((kind, layer, chunk)) for kind, layer in order]
        assert [len(found) for found in times] == [1] * len(order)
        assert all(before[0][1] <= after[0][0] for before, after in pairwise(times))
    assert not seconds
    assert relayed
    assert all([rank for _, rank in sorted(found)] == list(range(RANKS)) for found in relayed.values())
