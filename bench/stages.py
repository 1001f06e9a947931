"""Round-robin stages as a transport: what N ranks would run, SIMULATED together on presets; nothing here can train.

python -m bench.stages --gpu rtx4090 --gpus 4 --tokens 8192

Ranks walk the layers together, N rounds at a time, as in a split plan. But block b belongs to rank b % N, which runs it
for the chunks of all N rounds, so that its weights cross one link once and its state may lie on one GPU. Hidden states
and their gradients are handed over through the node's memory. The head is as heavy as two and a half blocks and would
hold all ranks up, so each round's head runs on a rank of its own and its gradient is relayed from round to round; the
embedding belongs to the rank of block 0. Gradients of blocks are rounded and added up at the ends of rounds, on the
GPU: so the order of sums would be that of relays with the same sizes of chunks and rounds.

Programs come from the package's own lowering, restricted to a rank's layers; the planner plans each rank's blocks as a
model of their own with a small vocabulary, and edges get the room that they need. Several sizes are tried.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bench.stage_programs import Stage, StageEvents, StageLayout, StageRound, update_of
from flexengine.hardware.nodes import rank_profile, with_gpus
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.registry import build_model, open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Numerics, Plan, Request
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.planner import find_plan
from flexengine.schedule.commands import Stream
from flexengine.schedule.packing import full_round
from flexengine.schedule.ranks_order import RankRun
from flexengine.schedule.ranks_simulator import _Simulation
from flexengine.schedule.simulator import Rates

SMALL_VOCABULARY = 1024
"""Of the models that blocks are planned as: their edges take next to nothing."""
CHUNK_TOKENS, CHUNKS_PER_ROUND = (2048, 4096, 8192), (2, 4, 8)
"""Sizes that are tried: one chunk a round leaves ranks idle, and more than eight take minutes to simulate."""
WAVES = (1, 2, 4)
OTHER_CHOICES = ((True, False), (False, True))
"""What the best size is tried with as well: `resident` and `share_edges` of `Stages.priced`."""
SIMULATED_WAVES = 3
"""Further waves of a step take what the last of these does."""
MOST_SEARCHES, SPARE_BYTES = 5, 128 * 2**20
"""Each search leaves the GPU memory free that the edges' slots of the one before lacked, and some bytes more."""


class Priced(NamedTuple):
    """A step of stages as it was simulated."""

    step_s: float
    layouts: Sequence[StageLayout]
    waves: int
    host_bytes: int
    compute_s: float

    @property
    def shown(self) -> dict[str, object]:
        """What a row tells of it. homes: groups of rank 1 by where their weights lie and what updates them."""
        plan = self.layouts[1].plan
        homes = Counter(f"weights {g.weights}, update {g.update}" for g in plan.groups[1:-1])
        return {
            "step_s": round(self.step_s, 3),
            "round": f"{self.layouts[0].stage.chunks_per_round} x {plan.chunk_tokens}",
            "waves": self.waves,
            "compute_s": round(self.compute_s, 3),
            "blocks_of_rank_1": dict(homes),
            "gpu_arena_gib": round(max(layout.gpu_bytes for layout in self.layouts) / GIB, 1),
            "host_gib": round(self.host_bytes / GIB, 1),
        }


class Stages:
    """Prices stages for a step of `tokens` per GPU under budgets in bytes: of each GPU, of the node's host."""

    def __init__(
        self, spec: ModelSpec, profile: HardwareProfile, gpus: int, tokens: int, seq_len: int, budgets: tuple[int, int]
    ) -> None:
        self.spec, self.profile, self.gpus, self.tokens, self.seq_len = spec, profile, gpus, gpus * tokens, seq_len
        if spec.tie_word_embeddings or gpus < 2:
            raise ValueError("stages are priced for several GPUs and a head of its own, not a tied one")
        self.budgets, self.numerics = budgets, Numerics(state="bfloat16")
        small = build_model(spec.name, {**spec.hf_config, "vocab_size": SMALL_VOCABULARY})
        self._small, self._plans = small, dict[tuple, Plan | None]()
        rates = tuple((dtype, rate / gpus) for dtype, rate in profile.cpu_adamw_parameters_per_s)
        self._of_rank = replace(rank_profile(profile, gpus), cpu_adamw_parameters_per_s=rates)

    def best(self) -> Priced | None:
        """The fastest of all sizes that are tried."""
        sizes = [
            (chunk, waves)
            for chunk in CHUNK_TOKENS
            for waves in WAVES
            if any(self.gpus * waves * chunk * number == self.tokens for number in CHUNKS_PER_ROUND)
        ]
        found = [(priced, size) for size in sizes if (priced := self.priced(*size)) is not None]
        found.sort(key=lambda pair: pair[0].step_s)
        others = [self.priced(*size, lies, shares) for _, size in found[:1] for lies, shares in OTHER_CHOICES]
        return min((p for p in (*(p for p, _ in found), *others) if p), key=lambda p: p.step_s, default=None)

    def priced(self, chunk: int, waves: int, resident: bool = True, share_edges: bool = True) -> Priced | None:
        """A step of so many waves; None where no plan is found.

        resident: ranks may keep weights, gradients and states of their blocks on their GPUs. share_edges: slots of
        embedding and head lie over those of blocks.
        """
        reserved = 0
        for _ in range(MOST_SEARCHES):
            layouts = self._layouts(chunk, waves, resident, share_edges, reserved)
            if layouts is None:
                return None
            excess = max(gpu_required_bytes(layout, self._of_rank) for layout in layouts) - self.budgets[0]
            if excess <= 0:
                break
            reserved += excess + SPARE_BYTES
        else:
            return None
        host_bytes = self._host_bytes(layouts)
        return None if host_bytes > self.budgets[1] else self._simulated(layouts, waves, host_bytes)

    @property
    def _edge_state_bytes(self) -> int:
        """Bytes of all planes of embedding and head: two each of weights, remainder, gradient and both moments."""
        return 10 * (self.spec.groups[0].numel + self.spec.groups[-1].numel)

    def _layouts(
        self, chunk: int, waves: int, resident: bool, share_edges: bool, reserved: int
    ) -> list[StageLayout] | None:
        num_layers, num_chunks = len(self.spec.layers), self.tokens // (waves * chunk)
        handed = num_layers * num_chunks * chunk * self.spec.hidden_size * 2
        # a rank's own inputs on the host are counted twice: where they are handed over, and by the search
        host = (self.budgets[1] - self._edge_state_bytes - handed) // self.gpus
        request = Request(
            self.seq_len, self.tokens, self.budgets[0] - reserved, host, numerics=self.numerics, chunk_tokens=chunk,
            round_tokens=num_chunks * chunk,
        )  # fmt: skip
        if min(request.max_gpu_bytes, host) <= 0:
            return None
        found = []
        for rank in range(self.gpus):
            stage = Stage(rank, self.gpus, num_layers, num_chunks // self.gpus)
            plan = self._plan_of_blocks(stage, request, resident)
            if plan is None:
                return None
            edge = GroupPlan(update="cpu")
            homes = (edge, *(replace(home, speculative=False) for home in plan.groups[1:-1]), edge)
            plan = replace(plan, request=replace(plan.request, ranks=1), groups=homes, share_edge_slots=share_edges)
            found.append(StageLayout(self.spec.with_layers(stage.layers), plan, stage))
        return found

    def _plan_of_blocks(self, stage: Stage, request: Request, resident: bool) -> Plan | None:
        """Plan a rank's blocks. Plans of one of several ranks keep no state on the GPU."""
        blocks = len(stage.layers) - 2
        if not resident:  # what is shared then counts by equal parts, and is the rank's own here
            state = 10 * self.spec.groups[1].numel * blocks * (self.gpus - 1) // self.gpus
            request = replace(request, ranks=self.gpus, max_host_bytes=max(1, request.max_host_bytes - state))
        key = blocks, request
        if key not in self._plans:
            model = self._small.with_layers([0, *range(1, 1 + blocks), stage.head])
            self._plans[key] = find_plan(model, request, self._of_rank)
        return self._plans[key]

    def _host_bytes(self, layouts: Sequence[StageLayout]) -> int:
        """Bytes of the host with what is handed over, and the edges' state once."""
        own = sum(host_required_bytes(layout, self._of_rank) - layout.host_input_bytes for layout in layouts)
        return own + layouts[0].handed_bytes - (self.gpus - 1) * self._edge_state_bytes

    def _simulated(self, layouts: Sequence[StageLayout], waves: int, host_bytes: int) -> Priced:
        plan, drawn = layouts[0].plan, min(waves, SIMULATED_WAVES)
        cost = CostModel.of(replace(plan.request, ranks=self.gpus), self.profile, plan.chunk_tokens)
        simulation = simulate_stages(layouts, drawn, cost.rates())
        ends, compute_s = [0.0] * (drawn + 1), 0.0  # when the GPUs have ended the update, and each wave
        for event, start, end in zip(simulation.events.all, simulation.start, simulation.end, strict=True):
            place = 0 if event.run.updates else 1 + event.run.number
            if event.command.stream is not Stream.CPU:
                ends[place] = max(ends[place], end)
            if event.command.stream is Stream.COMPUTE:
                compute_s += (end - start) / len(layouts)
        step_s = ends[-1] + (waves - drawn) * (ends[-1] - ends[-2])
        return Priced(step_s, layouts, waves, host_bytes, compute_s)


def simulate_stages(layouts: Sequence[StageLayout], waves: int, rates: Rates) -> _Simulation:
    """Simulate the update of the step before, for which all ranks are ready, and so many waves of full rounds."""
    plan, runs = layouts[0].plan, []
    shape = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round)
    for layout in layouts:
        first, later = (StageRound(layout, shape, first=first).train() for first in (True, False))
        programs = [first, *[later] * (waves - 1)]
        rounds = [RankRun(program, 1, number, updates=False) for number, program in enumerate(programs)]
        runs.append([RankRun(update_of(layout), 0, waves - 1, updates=True), *rounds])
    simulation = _Simulation(StageEvents(runs, waves), rates)
    simulation.run()
    return simulation


def main() -> None:
    """Price stages for one card, number of GPUs and size of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3.1-8b")
    parser.add_argument("--gpu", default="rtx4090", help="a preset")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of each GPU and step")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--gpu-gib", type=float, default=23.0, help="memory of each GPU")
    parser.add_argument("--host-gib", type=float, default=110.0, help="host memory for each GPU")
    args = parser.parse_args()
    budgets = int(args.gpu_gib * GIB), int(args.gpus * args.host_gib * GIB)
    profile = with_gpus(preset(args.gpu), args.gpus)
    found = Stages(open_model(args.model).spec, profile, args.gpus, args.tokens, args.seq_len, budgets).best()
    print("found no plan" if found is None else found.shown)


if __name__ == "__main__":
    main()
