"""Estimated seconds of a step for many candidates at once: what their choices cost, run by the batched simulator.

A step is an update, a first round, and the rounds that add to its gradients. The CPU's updates go on under the first
round; without clipping they begin inside the last round's backward pass. The estimate is within about 2% of the real
program's simulation where plans are fast; only the simulation of real programs decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexengine.plan import GroupPlan
from flexengine.planner.adapter_groups import AdapterGroup
from flexengine.planner.blocks import PerKind
from flexengine.planner.candidates import CandidateMemory, Candidates
from flexengine.planner.cost.stream_loads import (
    STREAMED,
    TileTimes,
    cpu_update_s,
    drive_slowdown,
    gpu_update_s,
    grad_slowdowns,
    issue_s,
    kept_slowdowns,
    tile_times,
    tile_times_in_round,
)
from flexengine.planner.round_costs import Batch, ChoiceCosts, EdgeCosts, LinkRates, RoundCosts
from flexengine.planner.round_seconds import round_seconds_of
from flexengine.planner.shared_buffers import SlotCounts
from flexengine.planner.size_tables import NUM_RESIDENCIES, STREAMS_WEIGHTS, BlockTables
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.pieces import PIECE_BYTES


class _Copies(NamedTuple):
    """Copies of a block's adapters in a round: seconds of weights and of gradients each way, and how many of these."""

    weights_s: float
    grads_h2d_s: float
    grads_d2h_s: float
    num_grads: int


class Surrogate:
    """Estimates steps of candidates of one size."""

    def __init__(self, memory: CandidateMemory, link_share: float = 1.0) -> None:
        """link_share: part of the seconds of copies of weights and gradients that they take where ranks split them."""
        self.memory, self.tables, self.buffers, self.link_share = memory, memory.tables, memory.buffers, link_share
        self.cost, self.profile = self.tables.cost, self.tables.cost.profile
        self._updates: dict[tuple[int, int], tuple[PerKind, np.ndarray, float]] = {}

    def step_s(self, candidates: Candidates) -> np.ndarray:
        """Estimated seconds [P] of a step."""
        tables, count = self.tables, len(candidates.choices)
        if not count:
            return np.zeros(0)
        cpu_s = self.choice_costs["cpu_update_s"].at(candidates.choices).T
        several, again = tables.rounds > 1, tables.request.norm_first  # whether the round runs for its norm before
        in_backward = (bool(cpu_s.any()) and not tables.request.waits_for_norm) or tables.request.updates_in_round
        last_s = np.zeros(count)
        if in_backward:
            no_updates = np.zeros_like(cpu_s), np.zeros(count)
            last_s, cpu_s = self.round_s(candidates, np.full(count, several), np.ones(count, dtype=bool), *no_updates)
        update_s, done_s = self.update_s(candidates, cpu_s.sum(axis=0))
        later = tables.full_rounds - (2 if in_backward else 1) if several else 0.0  # below 0 where the last is short
        # the first round and one of the later in one batch, as larger batches take less time per candidate
        sorts = 2 if later else 1
        accumulating = np.repeat([False, True][:sorts], count)
        updating = np.full(sorts * count, in_backward and not several and not again)
        pending_s = np.concatenate((cpu_s, np.zeros_like(cpu_s))[:sorts], axis=1)
        rounds = Candidates.joined([candidates] * sorts)
        seconds, _ = self.round_s(rounds, accumulating, updating, pending_s, np.tile(done_s, sorts) * ~accumulating)
        relay_s = self._one_slot_s * (candidates.slots[:, 1] == 1)
        return update_s + seconds[:count] + later * seconds[-count:] + (last_s if several or again else 0.0) + relay_s

    @cached_property
    def _one_slot_s(self) -> float:
        """Seconds that blocks wait where ranks relay gradients in pieces and one slot has none for the last piece."""
        in_pieces = self.tables.request.shares_node and self.buffers.slot_bytes[1].max() > PIECE_BYTES
        piece_s = 2 * PIECE_BYTES / self.profile.link.h2d_duplex_bytes_per_s
        return in_pieces * self.tables.full_rounds * self.tables.num_blocks * piece_s

    # -- rounds ------------------------------------------------------------------------------------------------------

    def round_s(
        self,
        candidates: Candidates,
        accumulating: np.ndarray,
        updating: np.ndarray,
        pending_s: np.ndarray,
        done_s: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Estimated seconds [P] of a round, and seconds [L, P] of the CPU's updates that it leaves.

        accumulating [P]: earlier gradients are added; updating [P]: the CPU updates what has arrived; pending_s [L, P]:
        seconds of updates that the CPU begins with, of which done_s [P] are done.
        """
        memory, edges = self.memory, candidates.edges
        embedding, head = (EdgeCosts(*edge[:5], *(column[edges] for column in edge[5:])) for edge in self.edge_costs)
        share = memory.share[edges]
        refilled = share & STREAMS_WEIGHTS[candidates.choices % NUM_RESIDENCIES].any(axis=1)
        if self.tables.model.tie_word_embeddings:  # what the embedding read is still there for the head
            head = head._replace(weights_h2d_s=np.where(refilled, head.weights_h2d_s, 0.0))
        batch = Batch(
            self._columns,
            self.buffers.kind_of,
            candidates.choices,
            embedding,
            head,
            slots=memory.slot_counts(candidates),
            share_edge_slots=share,
            grads_over_weights=memory.grads_over_weights[edges],
            refilled=refilled,
            grads_share=share & (memory.block_slot_bytes(candidates) > memory.edge_slots[1][edges]),
            accumulating=accumulating,
            updating=updating,
            pending_s=pending_s,
            done_s=done_s,
        )
        return round_seconds_of(self.round_costs, batch, LinkRates.of(self.profile, self.cost.state_dtype))

    @cached_property
    def round_costs(self) -> RoundCosts:
        """Compute of the blocks per chunk."""
        tables = self.tables
        return RoundCosts(
            tables.of_blocks(lambda kind: np.array([s.forward_s for s in kind.seconds])).each(),
            tables.of_blocks(lambda kind: np.array([s.backward_s for s in kind.seconds])).each(),
            tables.of_blocks(lambda kind: np.array(self._finish_of_block_s(kind))).each(),
            tables.sliced,
            np.array([tables.model.groups[layer.groups[0]].num_parts > 1 for layer in tables.model.blocks]),
            sum(not layer.has_backward for layer in tables.model.blocks),
        )

    def _finish_of_block_s(self, kind: BlockTables) -> float:
        beside_s = sum(self._finish_s(one.layout, one.use.gradients) for one in kind.adapters)
        return self._finish_s(kind.group, kind.use.gradients) + beside_s

    def _finish_s(self, group: GroupStorage, gradients: int) -> float:
        """Seconds to round a group's gradient, adding what was stored; 0 where it has none."""
        if not gradients:
            return 0.0
        touched = group.numel * self.cost.acc_bytes + 2 * group.plane_bytes["grad"]
        return touched / self.profile.memory.bytes_per_s + 2 * self.profile.host.launch_s

    def _copy_s(self, num_bytes: np.ndarray, up: bool) -> np.ndarray:
        """Seconds of copies to (`up`) or from the device at the rate of a busy link; 0 for nothing."""
        p = self.profile
        alone, busy = (
            (p.link.h2d_bytes_per_s, p.link.h2d_duplex_bytes_per_s)
            if up
            else (p.link.d2h_bytes_per_s, p.link.d2h_duplex_bytes_per_s)
        )
        return np.where(num_bytes > 0, (num_bytes + p.link.copy_latency_s * alone) / busy, 0.0)

    @cached_property
    def choice_costs(self) -> dict[str, PerKind]:
        """What the choices [K] cost in a round, by field of ChoiceCosts."""
        found = [self._choice_costs(number) for number in range(len(self.tables.kinds))]
        columns = zip(ChoiceCosts._fields, zip(*found, strict=True), strict=True)
        return {name: PerKind(np.stack(column), self.buffers.kind_of) for name, column in columns}

    @cached_property
    def _columns(self) -> np.ndarray:
        """The same as one array [17, C, K]."""
        return np.stack([column.by_kind for column in self.choice_costs.values()]).astype(float)

    def _choice_costs(self, number: int) -> ChoiceCosts:
        tables, kind, cost = self.tables, self.tables.kinds[number], self.cost
        options, option, residency = kind.options, tables.choice_option, tables.choice_residency
        copy_s, chunks, planes = issue_s(cost, "copy"), len(tables.shape.chunks), kind.group.plane_bytes
        staged, sent = options.staged_bytes[option], options.sent_bytes[option]
        gradients = kind.use.gradients + sum(one.use.gradients for one in kind.adapters)
        up, down = np.where(options.drive_bytes[option] > 0, np.array([kept_slowdowns(cost)]).T, 1.0)
        slowdowns = np.array([drive_slowdown(home, cost) for home in kind.residencies])
        weights = STREAMS_WEIGHTS[residency] * slowdowns[residency] * planes["weights"]
        streams = tables.streams_grads.by_kind[number][residency]
        slower = np.array([grad_slowdowns(home, cost) for home in kind.residencies]).T[:, residency]
        copies_s, beside = copy_s * kind.copies[option], self._copies_of_adapters(kind.adapters)
        share = self.link_share
        forward_s = sum(s.forward_issue_s for s in kind.seconds) / chunks
        backward_s = sum(s.backward_issue_s for s in kind.seconds) / chunks + kind.issue_s[option]
        return ChoiceCosts(
            recompute_s=kind.recompute_s[option] / chunks,
            input_d2h_s=self._copy_s((sent - staged) * down, False),
            save_d2h_s=self._copy_s(staged * down, False),
            input_h2d_s=self._copy_s((sent - staged) * up, True),
            save_h2d_s=self._copy_s(staged * up, True),
            weights_h2d_s=share * (self._copy_s(weights, True) + beside.weights_s),
            grad_h2d_s=share * (self._copy_s(streams * slower[0] * planes["grad"], True) + beside.grads_h2d_s),
            grad_d2h_s=share * (self._copy_s(streams * slower[1] * planes["grad"], False) + beside.grads_d2h_s),
            forward_issue_s=forward_s + copies_s,
            backward_issue_s=backward_s + (2 if tables.sliced else 1) * copies_s,
            fetch_issue_s=np.full(len(option), copy_s * (1 + len(kind.adapters))),
            finish_issue_s=gradients * issue_s(cost, "finish_gradient") + 2 * copy_s * (streams + beside.num_grads),
            cpu_update_s=np.array([cpu_update_s(kind.group, home, cost) for home in kind.residencies])[residency],
            **self._update_costs(kind.group, kind.residencies, residency, kind.adapters),
        )

    def _copies_of_adapters(self, adapters: list[AdapterGroup]) -> _Copies:
        """What adapters of a block that stream add to the copies of a round."""
        weights = np.array([a.layout.plane_bytes["weights"] for a in adapters if a.home.weights == "host"])
        grads = np.array([a.layout.plane_bytes["grad"] for a in adapters if a.home.streams_grads])
        seconds = (self._copy_s(weights, True), self._copy_s(grads, True), self._copy_s(grads, False))
        weights_s, h2d_s, d2h_s = (float(each.sum()) for each in seconds)
        return _Copies(weights_s, h2d_s, d2h_s, len(grads))

    def _update_costs(
        self, group: GroupStorage, homes: tuple[GroupPlan, ...], residency: np.ndarray,
        adapters: Sequence[AdapterGroup] = (),
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """What updates by the GPU inside the last round cost under each of some residencies."""
        tile = self.buffers.tiles(0, SlotCounts().optimizer, self.tables.chunks_per_round)[1]
        times = np.array([tile_times_in_round(group, home, tile, self.cost) for home in homes])[residency]
        for one in adapters:
            times = times + np.array(tile_times_in_round(one.layout, one.home, tile, self.cost))
        return dict(zip(("update_h2d_s", "update_s", "update_d2h_s", "update_issue_s"), times.T, strict=False))

    @cached_property
    def edge_costs(self) -> tuple[EdgeCosts, EdgeCosts]:
        """Embedding and head with the groups they read, under every edge choice [S]."""
        return self._edge_costs(0), self._edge_costs(1)

    def _edge_costs(self, edge: int) -> EdgeCosts:
        tables, buffers = self.tables, self.buffers
        layer = tables.model.layers[0 if edge == 0 else -1]
        weights, grads, again = (np.zeros(len(self.memory.edge_choices)) for _ in range(3))
        updates = np.zeros((3, len(weights)))
        finish_s, other = 0.0, set(tables.model.layers[-1 if edge == 0 else 0].groups)
        for i, group in enumerate(buffers.edge_groups):
            if group not in layer.groups:
                continue
            planes, residencies = buffers.edge_layouts[i].plane_bytes, self.memory.edge_residencies[:, i]
            weights += self._copy_s(STREAMS_WEIGHTS[residencies] * planes["weights"], True)
            streams = np.array([home.streams_grads for home in buffers.edge_residencies[i]])[residencies]
            grads += self._copy_s(streams * planes["grad"], True)
            if edge == 0 and group in other:
                again += self._copy_s(streams * planes["grad"], True)
            finish_s += self._finish_s(buffers.edge_layouts[i], buffers.uses[group].gradients)
            if edge == 0 or group not in other:  # the lower layer's gradient ends it
                found = self._update_costs(buffers.edge_layouts[i], buffers.edge_residencies[i], residencies)
                updates += list(found.values())[:3]
        sent = grads * self.profile.link.h2d_duplex_bytes_per_s / self.profile.link.d2h_duplex_bytes_per_s
        seconds = tables.edge_seconds[edge]
        return EdgeCosts(
            seconds.forward_s,
            seconds.backward_s,
            finish_s,
            seconds.forward_issue_s,
            seconds.backward_issue_s + (issue_s(self.cost, "finish_gradient") if finish_s else 0.0),
            *(self.link_share * copies_s for copies_s in (weights, grads, sent, again)),
            *updates,
        )

    # -- update ------------------------------------------------------------------------------------------------------

    def update_s(self, candidates: Candidates, cpu_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Estimated seconds [P] of the GPU's updates, and of the CPU's work, of cpu_s [P], that is done meanwhile."""
        region, least = self.memory.region_bytes(candidates), self.buffers.least_tile_bytes
        found, done = np.zeros(len(region)), np.zeros(len(region))
        regions, which = np.unique(region // least, return_inverse=True)
        most, chunks = SlotCounts().optimizer, self.tables.chunks_per_round
        tiles = [self.buffers.tiles(int(n) * least, most, chunks) for n in regions]
        for tile in set(tiles):
            mine = np.array([t == tile for t in tiles])[which]
            blocks, edges, first_s = self._update_parts(*tile)
            residencies = candidates.choices[mine] % NUM_RESIDENCIES
            parts = blocks.at(residencies).sum(axis=1) + edges[candidates.edges[mine]]
            found[mine], done[mine] = gpu_update_s(parts, cpu_s[mine], first_s, self.cost)
        return found, done

    def _update_parts(self, slots: int, tile: int) -> tuple[PerKind, np.ndarray, float]:
        """`TileTimes.seconds` of blocks by residency [V, 3] and of edges by edge choice [S, 3] with such tiles, and the
        seconds of the first tile's way."""
        key = (slots, tile)
        if key not in self._updates:
            buffers = self.buffers
            groups = [*buffers.kind_layouts, *buffers.edge_layouts]
            homes = [*buffers.kind_residencies, *buffers.edge_residencies]
            found: list[list[TileTimes]] = [
                [tile_times(group, home, tile, self.cost) for home in of_group]
                for group, of_group in zip(groups, homes, strict=True)
            ]
            parts = np.array([[times.seconds(slots, self.cost) for times in of_group] for of_group in found])
            kinds = len(buffers.kinds)
            edges = parts[np.arange(kinds, len(groups)), self.memory.edge_residencies].sum(axis=1)
            for one in buffers.adapters.members:
                edges = edges + np.array(tile_times(one.layout, one.home, tile, self.cost).seconds(slots, self.cost))
            first_s = next((of_group[STREAMED].first_s for of_group in found if of_group[STREAMED].first_s), 0.0)
            self._updates[key] = PerKind(parts[:kinds], buffers.kind_of), edges, first_s
        return self._updates[key]
