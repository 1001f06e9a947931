"""Round-robin stages, which `bench/stages.py` prices: what ranks would run is a step, in an order that can be."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from bench.stages import Stages, simulate_stages
from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.planner.cost.cost_model import CostModel

RANKS, CHUNKS = 2, 4


def test_every_layer_runs_once_for_every_chunk_after_what_it_reads():
    spec = open_model("preset:llama-3.2-3b-untied").spec
    profile = with_gpus(preset("rtx4090"), RANKS)
    stages = Stages(spec, profile, RANKS, CHUNKS // RANKS * 2048, 2048, (23 * GIB, RANKS * 110 * GIB))
    priced = stages.priced(2048, 1)
    assert priced is not None
    plan = priced.layouts[0].plan
    simulation = simulate_stages(priced.layouts, 1, CostModel.of(plan.request, profile, plan.chunk_tokens).rates())
    seconds: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    relayed: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event, start, end in zip(simulation.events.all, simulation.start, simulation.end, strict=True):
        command = event.command
        if command.kind in ("forward", "backward"):
            layer = priced.layouts[event.rank].stage.layers[command.args.layer]
            seconds[command.kind, layer, command.args.chunk].append((start, end))
        elif str(command.name).startswith("offload grad head piece"):
            relayed[str(command.name)].append((end, event.rank))
    head = len(spec.layers) - 1
    order = [("forward", layer) for layer in range(head)] + [("backward", layer) for layer in range(head, -1, -1)]
    for chunk in range(CHUNKS):
        times = [seconds.pop((kind, layer, chunk)) for kind, layer in order]
        assert [len(found) for found in times] == [1] * len(order)
        assert all(before[0][1] <= after[0][0] for before, after in pairwise(times))
    assert not seconds
    assert relayed
    assert all([rank for _, rank in sorted(found)] == list(range(RANKS)) for found in relayed.values())
