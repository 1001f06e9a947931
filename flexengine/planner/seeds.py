"""First candidates of one size: relaxed counts rounded, the dynamic programme at their prices, and uniform ones.

Blocks of a kind are alike, so what matters first is how many take which choice. A linear programme over these counts,
with the streams of a phase side by side, gives fractions and the price of everything scarce: seconds of the step per
second of each stream, per second of the CPU and per byte of the host. Rounded fractions are seeds. At these prices a
step's seconds are a sum over blocks, so the dynamic programme finds the best integral counts for any GPU budget; they
are seeds as well. Seeds are assigned to the blocks in three orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from flexengine.planner.bound.linear_program import solved
from flexengine.planner.candidates import Candidates, Slots
from flexengine.planner.cost.stream_loads import BC, BD, BH, BI, FC, FD, FH, FI, NUM_LOADS, UC, UD, UH
from flexengine.planner.dynamic_program import frontier_of
from flexengine.planner.size_tables import COMPUTE_AND_ISSUE, NUM_RESIDENCIES, STREAMS_WEIGHTS
from flexengine.planner.surrogate import Surrogate
from flexengine.schedule.kept_on_drive import staged_kept_bytes

PHASES = ((FC, FH, FD, FI), (BC, BH, BD, BI), (UC, UH, UD))
"""Columns of loads that run side by side; phases follow each other."""
LINKS = [FH, FD, BH, BD, UH, UD]
HIDDEN_COPY_PRICE = 0.02
"""Of a second of compute, for a second of the link within the relaxation, where it only breaks ties."""
BUDGET_SHARES = (1.0, 0.9, 0.75)
"""Parts of the GPU budget that the dynamic programme fills: what a smaller budget has, a larger one tries as well."""
USUAL_SLOTS, LEAST_SLOTS = (2, 2, 2), (1, 1, 1)
SLOT_CHOICES: tuple[Slots, ...] = (USUAL_SLOTS, LEAST_SLOTS, (3, 2, 3))
ALL_RESIDENT = ((False, False), (True, False), (False, True), (True, True))
"""Whether all blocks hold weights, and gradients, on the GPU, so that they need no slots."""
Seed = tuple[np.ndarray, int, Slots]


class Relaxed(NamedTuple):
    """The relaxed counts of one size.

    seconds: of the step; counts [C, K] of blocks by kind and choice; prices [12]: seconds of the step per second of
    load; cpu_price: per second of the CPU's updates; host_price: seconds per host byte.
    """

    seconds: float
    counts: np.ndarray
    prices: np.ndarray
    cpu_price: float
    host_price: float


class Seeder:
    """Makes first candidates of one size."""

    def __init__(self, surrogate: Surrogate) -> None:
        self.tables, self.memory, self.surrogate = surrogate.tables, surrogate.memory, surrogate
        self.buffers, self.request = self.tables.buffers, self.tables.request
        self.choices = np.flatnonzero(np.isin(self.tables.choice_residency, self.buffers.residencies))
        self._places = [np.flatnonzero(self.buffers.kind_of == kind) for kind in range(len(self.buffers.kinds))]
        most = int(self.tables.choice_staged.max())
        self.staged_limits = sorted({0, most // 2, most})

    # -- relaxed counts ----------------------------------------------------------------------------------------------

    def relaxed(self, edge: int, staged_bytes: int) -> Relaxed | None:
        """Relax the counts under an edge choice, with offload slots of at most so many bytes; None if nothing fits."""
        tables, choices = self.tables, self.staging(staged_bytes)
        kinds, columns = len(tables.kinds), len(tables.kinds) * len(choices)
        loads = tables.choice_loads.by_kind[:, choices].reshape(columns, NUM_LOADS)
        rows = [np.append(loads[:, c], -np.eye(3)[phase]) for phase, of in enumerate(PHASES) for c in of]
        edge_loads = self.memory.edge_loads[edge].copy()
        for seconds in tables.edge_seconds:
            edge_loads[COMPUTE_AND_ISSUE] += tables.full_rounds * np.array(seconds)
        limits = [-edge_loads[c] for of in PHASES for c in of]
        budgets = self._budget_rows(edge, choices)
        found = solved(
            np.append(HIDDEN_COPY_PRICE * loads[:, LINKS].sum(axis=1), np.ones(3)),
            (np.array([*rows, *(row for row, _ in budgets)]), np.array([*limits, *(limit for _, limit in budgets)])),
            (np.pad(np.kron(np.eye(kinds), np.ones(len(choices))), ((0, 0), (0, 3))), tables.choice_gpu.counts),
        )
        if found.status != 0:
            return None
        counts = np.zeros((kinds, len(tables.choice_option)))
        counts[:, choices] = found.x[:columns].reshape(kinds, -1)
        prices, duals = np.zeros(NUM_LOADS), -found.ineqlin.marginals
        prices[[c for of in PHASES for c in of]] = duals[: len(rows)]
        cpu_price, _, host_price = duals[len(rows) :]
        per_byte = float(host_price) / self.request.max_host_bytes
        return Relaxed(float(found.fun), counts, prices, float(cpu_price), per_byte)

    def _budget_rows(self, edge: int, choices: np.ndarray) -> list[tuple[np.ndarray, float]]:
        """Rows of the CPU's seconds and of both memories, as shares of the budgets."""
        tables, request = self.tables, self.request
        cpu_s, gpu, host = (table[:, choices].ravel() for table in self._scarce)
        share = tables.limits.hidden_share
        hidden = share / tables.full_rounds
        under = (-hidden, 0.0 if request.waits_for_norm else -hidden, -share)
        gpu_fixed = int(self.memory.fixed_gpu_bytes(USUAL_SLOTS, *self._shared_bytes(choices))[edge])
        host_fixed = tables.activations.host_bytes + int(self.memory.edge_host[edge])
        host_fixed += self.buffers.cpu_update_host_bytes
        host_fixed += staged_kept_bytes(int(tables.option_drive_slot.largest[tables.choice_option[choices]].max()))
        return [
            (np.append(cpu_s, under), 0.0),
            (np.append(gpu / request.max_gpu_bytes, np.zeros(3)), 1 - gpu_fixed / request.max_gpu_bytes),
            (np.append(host / request.max_host_bytes, np.zeros(3)), 1 - host_fixed / request.max_host_bytes),
        ]

    @cached_property
    def _scarce(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a block takes [C, K] of the CPU's seconds and of both memories."""
        cpu_s = self.surrogate.choice_costs["cpu_update_s"].by_kind
        return cpu_s, self.tables.choice_gpu.by_kind, self.tables.choice_host.by_kind

    def staging(self, staged_bytes: int) -> np.ndarray:
        """Choices that need no larger offload slots."""
        return self.choices[self.tables.choice_staged[self.choices] <= staged_bytes]

    def _shared_bytes(self, choices: np.ndarray) -> tuple[int, int]:
        """Bytes of an offload slot and of scratch that do for any of the choices."""
        return int(self.tables.choice_staged[choices].max()), int(self.tables.choice_scratch[choices].max())

    def rounded(self, counts: np.ndarray) -> list[np.ndarray]:
        """Round counts [C, K] by their largest remainders, and assign them to the blocks."""
        whole: dict[int, int] = {}
        for kind, total in enumerate(self.tables.choice_gpu.counts.tolist()):
            used = np.flatnonzero(counts[kind] > 1e-6)
            floor = np.floor(counts[kind, used] + 1e-9).astype(int)
            floor[np.argsort(floor - counts[kind, used], kind="stable")[: total - floor.sum()]] += 1
            whole |= {kind * counts.shape[1] + int(c): int(n) for c, n in zip(used, floor, strict=True) if n}
        return self.assigned(whole)

    # -- the dynamic programme ---------------------------------------------------------------------------------------

    def priced(
        self, prices: np.ndarray, cpu_price: float, host_price: float, choices: np.ndarray, resident=ALL_RESIDENT[0]
    ) -> Iterator[Seed]:
        """Find the counts of the least priced seconds for several slot counts and parts of the GPU budget.

        choices: those that blocks may take; resident: whether all blocks hold weights, and gradients, on the GPU.
        """
        tables, memory, budget = self.tables, self.memory, self.request.max_gpu_bytes
        choices = self._holding(choices, resident)
        if not len(choices):
            return
        shared = self._shared_bytes(choices)
        cpu_s, gpu, host = self._scarce
        cost = tables.choice_loads.by_kind @ prices + cpu_price * cpu_s + host_price * host
        edge_cost = memory.edge_loads @ prices + host_price * memory.edge_host
        limit = budget - int(memory.fixed_gpu_bytes((0, 0, 1), *shared).min())
        frontier = frontier_of(gpu, cost, choices, tables.choice_gpu.counts.tolist(), limit, tables.limits.points)
        if frontier is None:
            return
        weights, grads = (0 if held else 1 for held in resident)
        assigned = cache(lambda point: self.assigned(frontier.counts(point)))
        for slots in SLOT_CHOICES:
            used = (weights * slots[0], grads * slots[1], slots[2])
            fixed = memory.fixed_gpu_bytes(used, *shared)
            for share in BUDGET_SHARES:
                points = frontier.best_within(int(share * budget) - fixed)
                total = np.where(points >= 0, frontier.cost[points] + edge_cost, np.inf)
                edge = int(total.argmin())
                if np.isfinite(total[edge]):
                    yield from ((c, edge, slots) for c in assigned(int(points[edge])))

    def _holding(self, choices: np.ndarray, resident: tuple[bool, bool]) -> np.ndarray:
        """Choices whose weights, and gradients, are resident where asked."""
        homes = choices % NUM_RESIDENCIES
        stages_grads = np.max(self.tables.stages_grads.by_kind, axis=0)[homes]
        return choices[~(resident[0] & STREAMS_WEIGHTS[homes]) & ~(resident[1] & stages_grads)]

    def least_memory(self, options: Iterable[int] = ()) -> Iterator[Seed]:
        """Find what takes the least host memory within the GPU budget, whatever its seconds.

        options: tried one by one as well, for all blocks, which then differ in their residencies alone.
        """
        subsets = [self.staging(staged_bytes) for staged_bytes in self.staged_limits]
        subsets += [option * NUM_RESIDENCIES + self.buffers.residencies for option in options]
        for choices, resident in product(subsets, ALL_RESIDENT):
            yield from self.priced(np.zeros(NUM_LOADS), 0.0, 1.0, choices, resident)

    # -- orders ------------------------------------------------------------------------------------------------------

    def assigned(self, counts: Mapping[int, int]) -> list[np.ndarray]:
        """Assign counts, by kind * K + choice, to blocks: those first that send most, those last, and evenly spread."""
        width = len(self.tables.choice_option)
        sent = self.tables.choice_host.by_kind.ravel()
        orders = [np.zeros(self.tables.num_blocks, dtype=np.int64) for _ in range(3)]
        for kind, places in enumerate(self._places):
            members = sorted((m for m in counts if m // width == kind), key=lambda m: (-int(sent[m]), m))
            numbers = [counts[m] for m in members]
            first = np.repeat([m % width for m in members], numbers)
            at = np.concatenate([(np.arange(n) + 0.5) / n for n in numbers])
            for order, choices in zip(orders, (first, first[::-1], first[np.argsort(at, kind="stable")]), strict=True):
                order[places] = choices
        return orders if len(counts) > len(self._places) else orders[:1]

    # -- uniform candidates ------------------------------------------------------------------------------------------

    def uniform(self, options: Iterable[int]) -> list[Seed]:
        """Treat all blocks alike: every option and residency, under the edges of the least traffic that fit."""
        traffic = self.memory.edge_loads[:, LINKS].sum(axis=1)
        around = [(int(e), s) for s in (USUAL_SLOTS, LEAST_SLOTS) for e in np.argsort(traffic, kind="stable")]
        alike = [option * NUM_RESIDENCIES + int(home) for option in options for home in self.buffers.residencies]
        edges, slots = np.array([e for e, _ in around]), np.array([s for _, s in around])
        choices = np.repeat(np.repeat(alike, len(around))[:, None], self.tables.num_blocks, axis=1)
        made = Candidates(choices, np.tile(edges, len(alike)), np.tile(slots, (len(alike), 1)))
        each = self.memory.totals(Candidates(choices[:: len(around)], edges[:0], slots[:0])).repeated(len(around))
        fits = self.memory.fits(made, each).reshape(len(alike), len(around))
        first = fits.argmax(axis=1)
        return [(choices[i * len(around)], *around[int(first[i])]) for i in np.flatnonzero(fits.any(axis=1)).tolist()]

    @cached_property
    def promising_options(self) -> list[int]:
        """Options that are best at some prices of GPU bytes, host bytes, recomputation and offload slots."""
        tables = self.tables
        staged = tables.option_staged.largest
        alike = tables.chunks_per_round * tables.option_gpu.total + staged + tables.option_scratch.largest
        on_host = tables.of_blocks(lambda kind: kind.options.sent_bytes).total
        again_s = tables.of_blocks(lambda kind: kind.recompute_s).total
        own = (tables.option_gpu.total, on_host, again_s, staged, alike)
        table = np.column_stack(own).astype(float)
        table /= np.maximum(table.max(axis=0), 1e-30)
        octaves = 2.0 ** np.arange(-5, 6)
        gpu_prices = ((0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.3, 0.0), (0.0, 0.0, 1.0))
        prices = [(g, h, r, s, u) for g, s, u in gpu_prices for h in octaves for r in (0.0, *octaves)]
        costs = np.array(prices) @ table.T + 1e-9 * table.sum(axis=1)
        return np.unique(costs.argmin(axis=1)).tolist()
