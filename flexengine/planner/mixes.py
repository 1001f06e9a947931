"""How many blocks do what: mixes of keep options crossed with mixes of levels, all judged at once.

A mix says how many blocks take each option (or level), not which. What it puts on the streams adds up, and a step takes
about the sum over its phases of the busiest stream. Mixes of two options on a coarse grid come first; `improve` then
moves any number of blocks at a time, options and levels together, while the bytes fit.
"""

from __future__ import annotations

from functools import cached_property
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

import numpy as np

from flexengine.planner.cost import loads
from flexengine.planner.cost.updates import exposed_s
from flexengine.planner.drafts import Drafting, Mix, aligned
from flexengine.planner.tables import NUM_LEVELS, STREAMS_WEIGHTS
from flexengine.planner.templates import SlotCounts

FEW_BLOCKS = 3
"""Up to so many blocks, all mixes of the supported options are crossed; beyond, those of two."""
COARSE_SHARES, FINE_SHARES = (0.5,), (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Blocks that take the first of two options, or levels, as a share of all."""
NEAR = 1.04
"""Mixes within this factor of the best are looked at closely."""
LINK_PRICE = 0.01
"""What a second of copies costs beyond being hidden: the busier a link, the more often something waits for it."""
MAX_MOVES = 16
"""Moves that `improve` makes at the most."""
TILE = 1 << 15
"""Numbers in a tile of a crossing: a few such arrays fit in a core's cache."""
NUM_MIXES = 48
"""Mixes kept of one crossing."""
FEW_SLOTS = 1.02
"""What single slots cost, as a factor of the seconds: copies and compute take turns more often."""
Slots = tuple[int, int, int]


class Parameters(NamedTuple):
    """Mixes of levels under structures [Q]: bytes on both sides, loads [Q, 12], and what nothing can hide."""

    gpu_bytes: np.ndarray
    host_bytes: np.ndarray
    loads: np.ndarray
    alone_s: np.ndarray

    def take(self, index: np.ndarray | slice) -> Parameters:
        """Some of them."""
        return Parameters(*(column[index] for column in self))


class Activations(NamedTuple):
    """Mixes of keep options [M]: bytes on both sides and loads [M, 12]."""

    gpu_bytes: np.ndarray
    host_bytes: np.ndarray
    loads: np.ndarray

    def take(self, index: np.ndarray) -> Activations:
        """Some of them."""
        return Activations(*(column[index] for column in self))


class Neighbours(NamedTuple):
    """Mixes near one: seconds [Q, M] of levels [Q, V] under structures [Q] with options [M, O]."""

    seconds: np.ndarray
    levels: np.ndarray
    structures: np.ndarray
    options: np.ndarray


class Mixing:
    """Mixes of one problem."""

    def __init__(self, drafting: Drafting) -> None:
        self.drafting, self.problem = drafting, drafting.problem

    # -- what a mix takes --------------------------------------------------------------------------------------------

    def parameters(self, levels: np.ndarray, structures: np.ndarray, slots: tuple[int, int, int]) -> Parameters:
        """Mixes of levels [Q, V] under structures [Q]."""
        p, d = self.problem, self.drafting
        weights, grads = levels @ STREAMS_WEIGHTS, levels @ p.streams_grads.mean
        slot_bytes, parts = p.templates.largest_slot_bytes, p.templates.parts_of_blocks.mean()
        block = p.templates.accumulator_bytes + sum(
            num_bytes * np.minimum(count, streamed * parts)
            for num_bytes, count, streamed in zip(slot_bytes, slots, (weights, grads), strict=False)
        )
        edges, share = d.edge_slots[0][structures], d.share[structures]
        region = np.where(share, np.maximum(block, edges), block + edges)
        table = levels @ p.level_loads.mean + self._edge_loads[structures]
        return Parameters(
            region + d.edge_gpu[structures] + levels @ p.level_gpu.mean,
            d.edge_host[structures] + levels @ p.level_host.mean,
            table,
            self._update_s(levels, structures) + self._alone_s(weights, grads, structures),
        )

    @cached_property
    def _edge_loads(self) -> np.ndarray:
        """Loads [S, 12] of the edges under every structure."""
        levels = self.drafting.edge_levels
        return self.problem.edge_loads[np.arange(levels.shape[1]), levels].sum(axis=1)

    def _update_s(self, levels: np.ndarray, structures: np.ndarray) -> np.ndarray:
        """Seconds [Q] of the update with tiles as large as is useful."""
        templates = self.problem.templates
        blocks, edges, first_s = self.drafting.update_parts(*templates.tiles(1 << 60, SlotCounts().optimizer))
        parts = levels @ blocks.mean + edges[structures]
        return exposed_s(parts, first_s, self.problem.hidden_update_s, self.problem.cost)

    def _alone_s(self, weights: np.ndarray, grads: np.ndarray, structures: np.ndarray) -> np.ndarray:
        """Seconds [Q] of a step's copies that no compute can hide: the first weights, and the last gradient.

        With shared edge slots the head's weights wait for the blocks, and blocks' for the head's; with gradients over
        weights, those of earlier rounds wait for the edges' backward.
        """
        d = self.drafting
        embedding, head = d.edge_costs
        first = embedding.weights_h2d_s[structures] + np.where(weights > 0, self._block_copy_s[0], 0.0)
        turn = np.where(
            d.share[structures] & (weights > 0), head.weights_h2d_s[structures] + self._block_copy_s[0], 0.0
        )
        last = np.maximum(embedding.grad_d2h_s[structures], np.where(grads > 0, self._block_copy_s[1], 0.0))
        rounds, alone = self.problem.rounds, first + turn + last
        earlier = (rounds - 1) * (head.grad_h2d_s + embedding.grad_h2d_s) + embedding.again_h2d_s
        return rounds * alone + np.where(d.grads_over_weights, earlier, 0.0)[structures]

    @cached_property
    def _block_copy_s(self) -> tuple[float, float]:
        """Seconds to fetch a block's weights, and to send its gradient."""
        costs = self.drafting.row_costs
        weights, grads = costs["weights_h2d_s"].mean, costs["grad_d2h_s"].mean
        return float(weights[loads.STREAMED]), float(grads[loads.STREAMED])

    def activations(self, sums: np.ndarray, staged: np.ndarray, scratch: np.ndarray, save_slots: int) -> Activations:
        """Mixes whose columns of `option_table` add up to sums [M, 14], with their largest staged and scratch bytes."""
        p = self.problem
        shared = save_slots * aligned(staged) + aligned(np.maximum(p.activations.scratch_floor, scratch))
        kept = p.chunks_per_round * sums[:, :2].astype(np.int64)
        return Activations(kept[:, 0] + shared, kept[:, 1], sums[:, 2:])

    @cached_property
    def option_table(self) -> np.ndarray:
        """GPU bytes and host bytes per chunk, and loads: [O, 14]."""
        p = self.problem
        return np.column_stack((p.option_gpu.mean, p.option_host.mean, p.option_loads.mean))

    @cached_property
    def fixed_gpu_bytes(self) -> int:
        """GPU bytes of the process that no mix changes."""
        return self.problem.activations.fixed_gpu_bytes + self.problem.activations.round_gpu_bytes

    # -- crossing ----------------------------------------------------------------------------------------------------

    def seconds(self, p: Parameters, x: Activations) -> np.ndarray:
        """About the seconds [Q, M] of a step, worked out a tile at a time, so that little memory is touched."""
        rows = max(1, TILE // len(x.loads))
        tiles = [self._tile_s(p.take(slice(i, i + rows)), x) for i in range(0, len(p.loads), rows)]
        return tiles[0] if len(tiles) == 1 else np.concatenate(tiles)

    def _tile_s(self, p: Parameters, x: Activations) -> np.ndarray:
        base, cost = self.problem.base_loads, self.problem.cost

        def both(column: int) -> np.ndarray:
            return p.loads[:, None, column] + x.loads[None, :, column]

        forward_link = loads.link_seconds(p.loads[:, None, loads.FH], x.loads[None, :, loads.FD], cost)
        backward_link = loads.link_seconds(both(loads.BH), p.loads[:, None, loads.BD], cost)
        forward = np.maximum(np.maximum(base[loads.FC], base[loads.FI] + both(loads.FI)), forward_link)
        backward = np.maximum(base[loads.BC] + both(loads.BC), base[loads.BI] + both(loads.BI))
        backward = np.maximum(backward, backward_link)
        return forward + backward + p.alone_s[:, None] + LINK_PRICE * (forward_link + backward_link)

    def judged(self, p: Parameters, x: Activations, gpu_bytes: int, host_bytes: int) -> np.ndarray:
        """Seconds [Q, M], infinite where a budget is exceeded."""
        return np.where(self._fits(p, x, gpu_bytes, host_bytes), self.seconds(p, x), np.inf)

    def _fits(self, p: Parameters, x: Activations, gpu_bytes: int, host_bytes: int) -> np.ndarray:
        """Whether both budgets hold [Q, M]."""
        gpu = p.gpu_bytes[:, None] + x.gpu_bytes[None, :] + self.fixed_gpu_bytes <= gpu_bytes
        host = p.host_bytes[:, None] + x.host_bytes[None, :] + self.problem.activations.host_bytes <= host_bytes
        return gpu & host

    def _fastest(self, p: Parameters, x: Activations) -> tuple[np.ndarray, np.ndarray]:
        """The least seconds that each mix of levels [Q], and each mix of options [M], could be part of."""
        free_p = Parameters(*(np.zeros((1, *column.shape[1:])) for column in p))
        free_p.loads[0] = p.loads.min(axis=0)
        free_p.alone_s[0] = p.alone_s.min()
        free_x = Activations(*(np.zeros((1, *column.shape[1:])) for column in x))
        free_x.loads[0] = x.loads.min(axis=0)
        return self.seconds(p, free_x)[:, 0], self.seconds(free_p, x)[0]

    # -- coarse mixes ------------------------------------------------------------------------------------------------

    @cached_property
    def supported(self) -> np.ndarray:
        """Options that are best at some prices of GPU bytes (a block's own, or with what all blocks share), host bytes,
        recomputation and offload slots."""
        p, staged = self.problem, self.problem.option_staged.largest
        uniform = p.chunks_per_round * p.option_gpu.total + staged + p.option_scratch.largest
        own = (*self.option_table[:, :2].T, p.option_recompute_s.mean, staged)
        table = np.column_stack((*own, uniform))
        table = table / np.maximum(table.max(axis=0), 1e-30)
        octaves = 2.0 ** np.arange(-5, 6)
        gpu = ((0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.3, 0.0), (0.0, 0.0, 1.0))
        prices = [(g, h, r, s, u) for g, s, u in gpu for h in octaves for r in (0.0, *octaves)]
        costs = np.array(prices) @ table.T + 1e-9 * table.sum(axis=1)
        return np.unique(costs.argmin(axis=1))

    def option_mixes(self, shares: tuple[float, ...]) -> np.ndarray:
        """Mixes [M, O] of supported options."""
        return _mixes(self.supported, self.problem.num_options, self.problem.num_blocks, shares)

    def level_mixes(self, shares: tuple[float, ...]) -> np.ndarray:
        """Mixes [Q, V] of levels."""
        return _mixes(self.problem.templates.levels, NUM_LEVELS, self.problem.num_blocks, shares)

    def crossed(
        self, shares: tuple[float, ...], slots: tuple[Slots, ...], gpu_bytes: int, host_bytes: int, near_s: float
    ) -> list[tuple[float, Mix]]:
        """The best mixes with each of such slots, within NEAR of the fastest with them; none far above `near_s`."""
        options, levels = self.option_mixes(shares), self.level_mixes(shares)
        structures = np.tile(np.arange(len(self.drafting.structures)), len(levels))
        levels = np.repeat(levels, len(self.drafting.structures), axis=0)
        p, x = self.parameters(levels, structures, slots[0]), self._activations_of(options, slots[0][2])
        fast_p, fast_x = self._fastest(p, x)
        keep_p, keep_x = np.flatnonzero(fast_p <= near_s * NEAR), np.flatnonzero(fast_x <= near_s * NEAR)
        if not len(keep_p) or not len(keep_x):
            return []
        p, x, levels, structures = p.take(keep_p), x.take(keep_x), levels[keep_p], structures[keep_p]
        seconds, options = self.seconds(p, x), options[keep_x]
        result = []
        for choice in slots:
            p, x = self.parameters(levels, structures, choice), self._activations_of(options, choice[2])
            found = np.flatnonzero(self._fits(p, x, gpu_bytes, host_bytes))
            judged = seconds.take(found) * (FEW_SLOTS if min(choice) < 2 else 1)  # fewer slots wait a little more
            near = np.flatnonzero(judged <= NEAR * judged.min(initial=np.inf))
            for k in near[np.argsort(judged[near], kind="stable")][: NUM_MIXES // len(slots)]:
                i, j = divmod(int(found[k]), len(options))
                result.append((float(judged[k]), Mix(options[j], levels[i], int(structures[i]), choice)))
        return sorted(result, key=lambda pair: pair[0])

    # -- moves -------------------------------------------------------------------------------------------------------

    def neighbours(self, mix: Mix, gpu_bytes: int, host_bytes: int) -> Neighbours:
        """Every move of options, crossed with every move of levels and every other structure."""
        option_moves = moves(mix.options, np.union1d(self.supported, np.flatnonzero(mix.options)))
        level_moves = moves(mix.levels, self.problem.templates.levels)
        structures = np.arange(len(self.drafting.structures))
        levels = np.concatenate((level_moves.applied(mix.levels), np.tile(mix.levels, (len(structures), 1))))
        around = np.concatenate((np.full(len(level_moves.source), mix.structure), structures))
        options = option_moves.applied(mix.options)
        p = self.parameters(levels, around, mix.slots)
        x = self._activations_of(options, mix.slots[2])
        return Neighbours(self.judged(p, x, gpu_bytes, host_bytes), levels, around, options)

    def nearest(self, mix: Mix, gpu_bytes: int, host_bytes: int, count: int) -> list[Mix]:
        """The fastest mixes that are one move away."""
        around = self.neighbours(mix, gpu_bytes, host_bytes)
        flat = around.seconds.ravel()
        chosen = [i for i in np.argsort(flat, kind="stable")[:count] if np.isfinite(flat[i])]
        pairs = [np.unravel_index(i, around.seconds.shape) for i in chosen]
        return [Mix(around.options[j], around.levels[i], int(around.structures[i]), mix.slots) for i, j in pairs]

    def improve(self, mix: Mix, gpu_bytes: int, host_bytes: int) -> tuple[float, Mix]:
        """The mix that steepest descent leads to, and about its seconds."""
        best_s = np.inf
        for _ in range(MAX_MOVES):
            around = self.neighbours(mix, gpu_bytes, host_bytes)
            i, j = np.unravel_index(int(around.seconds.argmin()), around.seconds.shape)
            if not around.seconds[i, j] < best_s * (1 - 1e-6):
                break
            best_s = float(around.seconds[i, j])
            mix = Mix(around.options[j], around.levels[i], int(around.structures[i]), mix.slots)
        return best_s, mix

    def _activations_of(self, options: np.ndarray, save_slots: int) -> Activations:
        """Mixes of options [M, O]."""
        used, columns = options > 0, (self.problem.option_staged.largest, self.problem.option_scratch.largest)
        staged, scratch = (np.where(used, column, 0).max(axis=1) for column in columns)
        return self.activations(options @ self.option_table, staged, scratch, save_slots)


class Moves(NamedTuple):
    """Ways to move blocks from one option or level to another: `count` of those that take `source` to `target`."""

    source: np.ndarray
    target: np.ndarray
    count: np.ndarray

    def applied(self, counts: np.ndarray) -> np.ndarray:
        """The counts [N] after each move [M, N]."""
        result = np.tile(counts, (len(self.source), 1))
        rows = np.arange(len(self.source))
        np.subtract.at(result, (rows, self.source), self.count)
        np.add.at(result, (rows, self.target), self.count)
        return result


def moves(counts: np.ndarray, targets: np.ndarray) -> Moves:
    """All moves of 1, 2, 4, ... or all blocks from a member in use to one of `targets`; the first changes nothing."""
    found = [(0, 0, 0)]
    for source in np.flatnonzero(counts):
        steps = sorted({1 << i for i in range(int(counts[source]).bit_length())} | {int(counts[source])})
        found += [(int(source), int(t), step) for t in targets if t != source for step in steps]
    return Moves(*np.array(found).T)


def _mixes(members: np.ndarray, width: int, num_blocks: int, shares: tuple[float, ...]) -> np.ndarray:
    """Counts [M, width] of `num_blocks` blocks: each member alone, and every two in the given shares."""
    if num_blocks <= FEW_BLOCKS:
        found = [np.bincount(chosen, minlength=width) for chosen in combinations_with_replacement(members, num_blocks)]
        return np.array(found)
    rows = [np.bincount([m], minlength=width) * num_blocks for m in members]
    firsts = sorted({round(share * num_blocks) for share in shares} - {0, num_blocks})
    for a, b in combinations(members, 2):
        for first in firsts:
            row = np.zeros(width, dtype=np.int64)
            row[a], row[b] = first, num_blocks - first
            rows.append(row)
    return np.array(rows)
