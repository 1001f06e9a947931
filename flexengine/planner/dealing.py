"""Which block does what: a mix dealt out to the blocks in a few orders, and placements near a given one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

import numpy as np

from flexengine.planner.drafts import Drafting, Drafts, Mix
from flexengine.planner.mixes import FEW_BLOCKS
from flexengine.planner.tables import NUM_LEVELS

MAX_SLOTS = 4
MAX_SWAPS = 8


def deal(drafting: Drafting, mix: Mix) -> Drafts:
    """The mix's options and levels dealt out: those first that send most, or last, or evenly spread; each order of
    options with each of levels. Few blocks get every order there is."""
    sent = drafting.problem.option_host.mean
    options = _orders(mix.options, sent)
    levels = _orders(mix.levels, drafting.problem.level_host.mean)
    rows = np.array([o * NUM_LEVELS + v for o, v in product(options, levels)])
    return Drafts(rows, np.full(len(rows), mix.structure), np.tile(mix.slots, (len(rows), 1)))


def _orders(counts: np.ndarray, weight: np.ndarray) -> list[np.ndarray]:
    """Members [L] as often as they are counted, in a few orders."""
    members = sorted(np.flatnonzero(counts), key=lambda m: (-int(weight[m]), m))
    first = np.repeat(members, counts[members])
    if len(members) == 1:
        return [first]
    if len(first) <= FEW_BLOCKS:
        return [np.array(order) for order in sorted(set(permutations(first.tolist())))]
    return [first, first[::-1], spread(counts)]


def spread(counts: np.ndarray) -> np.ndarray:
    """Members dealt out evenly: each position goes to the one that is furthest behind its share."""
    members = np.flatnonzero(counts)
    share, given = counts[members] / counts.sum(), np.zeros(len(members))
    order = []
    for position in range(int(counts.sum())):
        furthest = int((share * (position + 1) - given).argmax())
        given[furthest] += 1
        order.append(members[furthest])
    return np.array(order)


def shifted(members: np.ndarray, counts: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """Members [L], counted by `counts`, changed to `target` at the first, the last or evenly spread places."""
    added = np.repeat(np.arange(len(target)), np.maximum(target - counts, 0))
    if not len(added):
        return [members]
    results = []
    for style in range(3):
        result, start = members.copy(), 0
        for member in np.flatnonzero(target < counts):
            places, count = np.flatnonzero(members == member), int(counts[member] - target[member])
            if style == 2:
                chosen = places[(np.arange(count) * 2 + 1) * len(places) // (2 * count)]
            else:
                chosen = places[:count] if style == 0 else places[len(places) - count :]
            result[chosen] = added[start : start + count]
            start += count
        results.append(result)
    return results if len(added) < len(members) else results[:1]


def moved(drafts: Drafts, index: int, mixes: list[Mix]) -> Drafts:
    """One placement changed to other mixes, at first, last or spread blocks."""
    options, levels = drafts.rows[index] // NUM_LEVELS, drafts.rows[index] % NUM_LEVELS
    rows, structures = [], []
    for mix in mixes:
        new_options = shifted(options, np.bincount(options, minlength=len(mix.options)), mix.options)
        new_levels = shifted(levels, np.bincount(levels, minlength=NUM_LEVELS), mix.levels)
        pairs = product(new_options, new_levels) if len(new_options) == 1 or len(new_levels) == 1 else ()
        for o, v in (*pairs, *(zip(new_options, new_levels, strict=True) if not pairs else ())):
            rows.append(o * NUM_LEVELS + v)
            structures.append(mix.structure)
    return Drafts(np.array(rows), np.array(structures), np.tile(drafts.slots[index], (len(rows), 1)))


def changed(drafting: Drafting, drafts: Drafts, index: int) -> Drafts:
    """One placement with any one block changed to any row that the machine has."""
    rows, problem = drafts.rows[index], drafting.problem
    others = np.flatnonzero(np.isin(problem.row_level, problem.templates.levels))
    found = np.tile(rows, (len(rows) * len(others), 1))
    found[np.arange(len(found)), np.repeat(np.arange(len(rows)), len(others))] = np.tile(others, len(rows))
    return Drafts(found, np.full(len(found), drafts.structures[index]), np.tile(drafts.slots[index], (len(found), 1)))


def alike(drafting: Drafting, drafts: Drafts, index: int) -> Drafts:
    """One placement with all blocks changed to any one option, their levels kept, under every structure."""
    options, structures = np.arange(drafting.problem.num_options), np.arange(len(drafting.structures))
    rows = options[:, None] * NUM_LEVELS + drafts.rows[index] % NUM_LEVELS
    count = len(rows) * len(structures)
    return Drafts(
        np.repeat(rows, len(structures), axis=0),
        np.tile(structures, len(rows)),
        np.tile(drafts.slots[index], (count, 1)),
    )


def all_but_one(drafting: Drafting, drafts: Drafts, index: int) -> Drafts:
    """One placement with all blocks changed to any one option and one of them to any other, their levels kept."""
    levels, count = drafts.rows[index] % NUM_LEVELS, drafting.problem.num_options
    blocks = np.arange(len(levels))
    most, other, place = (axis.ravel() for axis in np.meshgrid(range(count), range(count), blocks, indexing="ij"))
    options = np.where(blocks[None, :] == place[:, None], other[:, None], most[:, None])
    return Drafts(
        options * NUM_LEVELS + levels,
        np.full(len(options), drafts.structures[index]),
        np.tile(drafts.slots[index], (len(options), 1)),
    )


def varied(drafting: Drafting, drafts: Drafts, index: int) -> Drafts:
    """One placement with one slot more or less, another structure around it, or two blocks swapped."""
    rows, structure, slots = drafts.rows[index], drafts.structures[index], drafts.slots[index]
    found = [(rows, structure, changed) for changed in _other_slots(slots)]
    found += [(rows, other, slots) for other in range(len(drafting.structures)) if other != structure]
    borders = np.flatnonzero(rows[1:] != rows[:-1])
    for i in borders[np.unique(np.linspace(0, len(borders) - 1, MAX_SWAPS).astype(int))] if len(borders) else ():
        swapped = rows.copy()
        swapped[[i, i + 1]] = rows[[i + 1, i]]
        found.append((swapped, structure, slots))
    columns = zip(*found, strict=True)
    return Drafts(*(np.array(column) for column in columns))


def _other_slots(slots: np.ndarray) -> Iterator[np.ndarray]:
    for i, change in product(range(len(slots)), (1, -1)):
        changed = slots.copy()
        changed[i] += change
        if 1 <= changed[i] <= MAX_SLOTS:
            yield changed
