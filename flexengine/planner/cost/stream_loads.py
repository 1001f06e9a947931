"""What layers put on each stream in each phase of a step, as arrays over their options: the terms the search adds up.

Seconds per step, twelve columns: forward, backward and update on compute, host-to-device, device-to-host and the host's
issue of commands. Phases follow each other; within one the streams run side by side, so the largest column of a phase
bounds it from below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import GroupSpec, LayerSpec
from flexengine.ops.base import Work
from flexengine.plan import GroupPlan, Home
from flexengine.planner.cost.cost_model import COPY_ISSUE_CALLS, CostModel, layer_issue_calls, other_issue_calls
from flexengine.schedule.drive import drive_bytes, drive_kinds
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.group_uses import GroupUse
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import LayerProgram, align
from flexengine.schedule.lowering import RoundShape
from flexengine.schedule.simulator import cpu_share

FC, FH, FD, FI, BC, BH, BD, BI, UC, UH, UD, UI = range(12)
NUM_LOADS = 12

RESIDENCIES = (
    GroupPlan(),
    GroupPlan(weights="gpu"),
    GroupPlan(grads="gpu"),
    GroupPlan(weights="gpu", grads="gpu"),
    GroupPlan(weights="gpu", grads="gpu", states="gpu"),
    GroupPlan(update="cpu"),
)
"""Ways to hold a parameter group, from fully streamed to fully resident, and streamed with the CPU to update it."""
STREAMED, RESIDENT_WEIGHTS, _, RESIDENT_BOTH, RESIDENT, UPDATED_BY_CPU = range(len(RESIDENCIES))
ON_DRIVE = GroupPlan(states="drive", update="cpu")
GPU_RESIDENCIES = tuple(range(UPDATED_BY_CPU))
"""Those that the GPU updates."""
UNSTORED_RESIDENCIES = (STREAMED, RESIDENT_WEIGHTS, RESIDENT)
"""Of these, those that differ where gradients are not stored."""
FROZEN_RESIDENCIES = tuple(home.of_frozen() for home in RESIDENCIES)
"""What the same numbers mean for a group that is not trained: the home of its weights."""
FROZEN_ON_DRIVE = GroupPlan(weights="drive", update="none")


def residencies_of(
    group: GroupSpec, unstored: bool = False, on_drive: Mapping[int, GroupPlan] = MappingProxyType({})
) -> tuple[GroupPlan, ...]:
    """What the numbers of homes mean for a group. unstored: its gradient has no home where the GPU updates it.
    on_drive: what numbers mean instead, with planes on a drive."""
    homes = FROZEN_RESIDENCIES if group.frozen else RESIDENCIES
    homes = tuple(on_drive.get(number, home) for number, home in enumerate(homes))
    if not unstored or group.frozen:
        return homes
    return tuple(replace(home, grads="none") if home.update == "gpu" else home for home in homes)


def plane_bytes_in(memory: Home, group: GroupStorage, home: GroupPlan) -> int:
    """Bytes of a group's planes that live in a memory, as slots."""
    return sum(align(num) for kind, num in group.plane_bytes.items() if home.home_of(kind) == memory)


def issue_s(cost: CostModel, kind: str, program: LayerProgram | None = None) -> float:
    """Host seconds to issue a command of some kind: of a layer with its program, a copy, an update or another."""
    if program is not None:
        stages = program.stages(kind)
        calls = sum(len(stage.parts) * layer_issue_calls(program, stage, cost.replays) for stage in stages)
        return cost.profile.host.issue_s * calls
    return cost.profile.host.issue_s * (COPY_ISSUE_CALLS if kind == "copy" else other_issue_calls(kind, cost.replays))


def group_loads(group: GroupStorage, home: GroupPlan, use: GroupUse, rounds: int, cost: CostModel) -> np.ndarray:
    """Loads [12] of a parameter group: weights per round, gradients per round, and the optimizer's update (but for
    its issue, which the size of the tiles decides)."""
    p, planes = cost.profile, group.plane_bytes
    loads, stores = np.zeros(NUM_LOADS), rounds * use.gradients
    copy_s = issue_s(cost, "copy")
    if home.weights != "gpu":
        slowdown = drive_slowdown(home, cost)
        loads[FH] = rounds * use.forward * planes["weights"] * slowdown / p.link.h2d_duplex_bytes_per_s
        loads[BH] = rounds * use.backward * planes["weights"] * slowdown / p.link.h2d_duplex_bytes_per_s
        loads[FI] = rounds * use.forward * copy_s
        loads[BI] = rounds * use.backward * copy_s
    if not home.trained:
        return loads
    in_round = _in_round(group, home, cost)
    if home.streams_grads:
        sent = stores - in_round  # what the last round leaves need not go home
        loads[BH] += (stores - 1) * planes["grad"] / p.link.h2d_duplex_bytes_per_s
        loads[BD] = sent * planes["grad"] / p.link.d2h_duplex_bytes_per_s
        loads[BI] += (stores - 1 + sent) * copy_s
    touched = stores * group.numel * cost.acc_bytes + (2 * stores - 1) * planes["grad"]
    loads[BC] = touched / p.memory.bytes_per_s + 2 * stores * p.host.launch_s
    loads[BI] += stores * issue_s(cost, "finish_gradient")
    if home.update == "cpu":
        if home.grads == "drive":
            loads[BH] += (
                (stores - 1) * planes["grad"] * (grad_slowdowns(home, cost)[0] - 1.0) / p.link.h2d_duplex_bytes_per_s
            )
            loads[BH] += sent * planes["grad"] / p.drive.known.write_bytes_per_s  # a drive does one after the other
        return loads
    back = sum(num for kind, num in planes.items() if kind != "grad" and home.home_of(kind) == "host")
    compute, up, down = (BC, BH, BD) if in_round else (UC, UH, UD)
    fetched = back + (planes["grad"] if home.grads == "host" and not in_round else 0)
    update_s = (2 * sum(planes.values()) - planes["grad"]) / p.memory.bytes_per_s
    update_s += group.update_flops / cost.matmul_rate
    loads[compute] += update_s / cost.ranks
    loads[up] += fetched / p.link.h2d_duplex_bytes_per_s / cost.ranks
    loads[down] += back / p.link.d2h_duplex_bytes_per_s / cost.ranks
    return loads


def drive_slowdown(home: GroupPlan, cost: CostModel) -> float:
    """How many times as long weights take over a busy link that a drive brings, if it is slower than the link."""
    if home.weights != "drive":
        return 1.0
    return max(1.0, cost.profile.link.h2d_duplex_bytes_per_s / cost.profile.drive.known.read_bytes_per_s)


def grad_slowdowns(home: GroupPlan, cost: CostModel) -> tuple[float, float]:
    """The same of stored gradients that a drive brings, and of those that it takes."""
    if home.grads != "drive":
        return 1.0, 1.0
    link, drive = cost.profile.link, cost.profile.drive.known
    up, down = (drive.read_bytes_per_s, drive.write_bytes_per_s)
    return max(1.0, link.h2d_duplex_bytes_per_s / up), max(1.0, link.d2h_duplex_bytes_per_s / down)


def kept_slowdowns(cost: CostModel) -> tuple[float, float]:
    """The same of what a drive brings and takes of activations."""
    return grad_slowdowns(GroupPlan("drive", "drive", "drive", "cpu"), cost)


def _in_round(group: GroupStorage, home: GroupPlan, cost: CostModel) -> bool:
    """Whether the GPU updates a group inside the last round."""
    return cost.updates_in_round and home.update == "gpu" and len(group.parts) == 1


class LayerSeconds(NamedTuple):
    """A layer on one chunk or round: compute seconds with nothing recomputed, and what the host takes to issue it with
    everything recomputed. The head's forward is in its backward."""

    forward_s: float
    backward_s: float
    forward_issue_s: float
    backward_issue_s: float


def chunk_seconds(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> tuple[LayerSeconds, ...]:
    """Seconds of a layer for every chunk of a round."""
    program = compile_layer(layer, (), (), cost.chunk_tokens, cost.compute_bytes)
    adding_s, last = cost.work_s(program.accumulation_work(cost.compute_bytes)), len(shape.chunks) - 1
    issued_s, found = (issue_s(cost, "forward", program), issue_s(cost, "backward", program)), []
    for i, chunk in enumerate(shape.chunks):
        works = _layer_work(program, chunk.tokens, chunk.seq_len, cost.compute_bytes)
        forward_s, backward_s, again_s = (cost.work_s(work) for work in works)
        backward_s += adding_s if i < last else 0.0  # backward begins with the last chunk
        if layer.kind == "head":
            found.append(LayerSeconds(0.0, backward_s, 0.0, issued_s[1]))
        else:
            found.append(LayerSeconds(forward_s, backward_s - again_s, *issued_s))
    return tuple(found)


def with_decoding(
    chunks: tuple[LayerSeconds, ...], group: GroupStorage, use: GroupUse, cost: CostModel
) -> tuple[LayerSeconds, ...]:
    """Seconds of a layer's chunks with the decoding of its weights, before its first chunk in either direction."""
    if group.decoded is None:
        return chunks
    decode_s, decode_issue_s = cost.work_s(group.decoded.decode_work(cost.compute_bytes)), issue_s(cost, "decode")
    found = [list(seconds) for seconds in chunks]
    for column, uses, chunk in ((0, use.forward, 0), (1, use.backward, -1)):  # backward begins with the last chunk
        if uses:
            found[chunk][column] += decode_s
            found[chunk][column + 2] += decode_issue_s
    return tuple(LayerSeconds(*seconds) for seconds in found)


@lru_cache(maxsize=4096)
def _layer_work(program: LayerProgram, tokens: int, seq_len: int, compute_bytes: int) -> tuple[Work, Work, Work]:
    """Forward, backward, and the recomputation in backward."""
    sizes = (tokens, seq_len, compute_bytes)
    return program.forward_work(*sizes), program.backward_work(*sizes), program.recompute_work(*sizes)


def round_seconds(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> LayerSeconds:
    """Seconds of a layer per round."""
    return LayerSeconds(*np.sum(np.array(chunk_seconds(layer, shape, cost)), axis=0).tolist())


# ---- the update ------------------------------------------------------------------------------------------------
# Tiles of host planes are fetched, updated and returned. With enough slots the slowest of the three decides; with few
# of them, a tile's whole way shared by the slots.

NUM_COPIES = 2
"""A streamed tile is fetched and returned."""


class TileTimes(NamedTuple):
    """Seconds of a group's tiles on each stream, with a busy link, and of its first tile's way."""

    h2d_s: float = 0.0
    compute_s: float = 0.0
    d2h_s: float = 0.0
    issue_s: float = 0.0
    first_s: float = 0.0

    def seconds(self, slots: int, cost: CostModel) -> tuple[float, float, float]:
        """What the group adds to an update with so many tile slots: on the link, in compute and in issue."""
        link_s = link_seconds(self.h2d_s, self.d2h_s, cost)
        way_s = self.h2d_s + self.compute_s + self.d2h_s
        return max(link_s, way_s / slots) if self.h2d_s else 0.0, self.compute_s, self.issue_s


def link_seconds(h2d_s: float, d2h_s: float, cost: CostModel) -> float:
    """Seconds that both directions take side by side, from their seconds at the rates of a busy link.

    When the shorter direction has ended, the longer goes on at the rate it has alone.
    """
    p, both = cost.profile, min(h2d_s, d2h_s)
    h2d_share = p.link.h2d_duplex_bytes_per_s / p.link.h2d_bytes_per_s
    d2h_share = p.link.d2h_duplex_bytes_per_s / p.link.d2h_bytes_per_s
    return both + (h2d_s - both) * h2d_share + (d2h_s - both) * d2h_share


def tile_times(group: GroupStorage, home: GroupPlan, tile: int, cost: CostModel) -> TileTimes:
    """Seconds of a group's tiles of at most `tile` elements after the last round; what the CPU updates costs issue
    alone."""
    if not home.trained or _in_round(group, home, cost):
        return TileTimes()
    if home.update == "cpu":
        return TileTimes(issue_s=len(group.segments) * issue_s(cost, "update"))
    fetched = [kind for kind, num in group.plane_bytes.items() if num and home.home_of(kind) == "host"]
    return _times_of(group, fetched, tile, cost)


def tile_times_in_round(group: GroupStorage, home: GroupPlan, tile: int, cost: CostModel) -> TileTimes:
    """Seconds of a group's tiles inside the last round, where their gradient is there."""
    if not _in_round(group, home, cost):
        return TileTimes()
    kinds = (kind for kind, num in group.plane_bytes.items() if num and kind != "grad")
    return _times_of(group, [kind for kind in kinds if home.home_of(kind) == "host"], tile, cost)


def _times_of(group: GroupStorage, fetched: list[str], tile: int, cost: CostModel) -> TileTimes:
    """Seconds of a group's tiles, of which these planes cross the link."""
    p, planes = cost.profile, group.plane_bytes
    returned = [kind for kind in fetched if kind != "grad"]
    count = sum(len(segment.tiles(tile)) for segment in group.segments)
    latency_s = count * p.link.copy_latency_s
    fetch_s = sum(planes[kind] for kind in fetched) + latency_s * len(fetched) * p.link.h2d_bytes_per_s
    return_s = sum(planes[kind] for kind in returned) + latency_s * len(returned) * p.link.d2h_bytes_per_s
    fetch_s, return_s = fetch_s / p.link.h2d_duplex_bytes_per_s, return_s / p.link.d2h_duplex_bytes_per_s
    compute_s = touched_bytes(group) / p.memory.bytes_per_s + count * p.host.launch_s
    compute_s += group.update_flops / cost.matmul_rate
    copies_s = NUM_COPIES * issue_s(cost, "copy") if fetched else 0.0
    issued_s = count * (issue_s(cost, "update") + copies_s)
    first_s = min(1.0, tile / max(1, group.numel)) * (fetch_s + compute_s + return_s)
    fetch_s, compute_s, return_s, issued_s = (s / cost.ranks for s in (fetch_s, compute_s, return_s, issued_s))
    return TileTimes(fetch_s, compute_s, return_s, issued_s, first_s)


def cpu_update_s(group: GroupStorage, home: GroupPlan, cost: CostModel) -> float:
    """Seconds in which the CPU updates a group while the link is idle, or a drive brings and takes its planes if that
    takes longer; 0 where the GPU does."""
    if home.update != "cpu":
        return 0.0
    seconds = touched_bytes(group) / cost.profile.host.adamw_bytes_per_s(cost.state_dtype)
    kinds, drive = drive_kinds(group, home), cost.profile.drive
    read_s = drive_bytes(group, ("grad",)) / cost.ranks / drive.known.read_bytes_per_s if "grad" in kinds else 0.0
    updated = tuple(kind for kind in kinds if kind != "grad")
    return max(seconds, read_s + drive.seconds(drive_bytes(group, updated) / cost.ranks)) if kinds else seconds


def touched_bytes(group: GroupStorage) -> int:
    """Bytes that an update reads and writes; gradients are only read."""
    return 2 * sum(group.plane_bytes.values()) - group.plane_bytes["grad"]


def gpu_update_s(
    parts: np.ndarray, cpu_s: np.ndarray, first_s: float, cost: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [P] of the GPU's updates, and of the CPU's work, of cpu_s [P], that is done meanwhile.

    parts: sums [P, 3] of `TileTimes.seconds`; first_s: the first tile's way. While both are at work, the link and the
    CPU slow each other down, as both use host memory.
    """
    link_s, others_s = parts[:, 0], parts[:, 1:].max(axis=1)
    of_link, of_cpu = _shares_together(cost)
    both_s = np.minimum(link_s / of_link, cpu_s / of_cpu)
    gpu_s = np.maximum(link_s + both_s * (1 - of_link), others_s) + np.where(link_s > 0, first_s, 0.0)
    return gpu_s, np.minimum(cpu_s, both_s * of_cpu + np.maximum(gpu_s - both_s, 0.0))


def _shares_together(cost: CostModel) -> tuple[float, float]:
    """The shares of their rates that a busy link and the CPU each have while the other is at work."""
    p = cost.profile
    up = min(p.link.h2d_duplex_bytes_per_s, p.link.h2d_beside_cpu_bytes_per_s)
    down = min(p.link.d2h_duplex_bytes_per_s, p.link.d2h_beside_cpu_bytes_per_s)
    link_share = min(up / p.link.h2d_duplex_bytes_per_s, down / p.link.d2h_duplex_bytes_per_s)
    return link_share, cpu_share(up + down, p.host_rate(cost.state_dtype))
