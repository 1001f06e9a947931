"""What layers put on each stream in each phase of a step, as arrays over their options: the terms the search adds up.

Seconds per step, nine columns: forward, backward and update on compute, host-to-device and device-to-host. Phases
follow each other; within one the streams run side by side, so the largest column of a phase bounds it from below.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Work
from flexengine.plan import GroupPlan
from flexengine.planner.cost_model import CostModel
from flexengine.planner.frontier import KeepOption
from flexengine.planner.sketch import BlockCosts
from flexengine.schedule.layer_program import LayerProgram, compile_layer
from flexengine.schedule.layout import GroupLayout
from flexengine.schedule.lowering import RoundShape

FC, FH, FD, BC, BH, BD, UC, UH, UD = range(9)
NUM_LOADS = 9

LEVELS = (
    GroupPlan(),
    GroupPlan(weights="gpu"),
    GroupPlan(grads="gpu"),
    GroupPlan(weights="gpu", grads="gpu"),
    GroupPlan(weights="gpu", grads="gpu", states="gpu"),
)
"""Ways to hold a parameter group, from fully streamed to fully resident."""
STREAMED, RESIDENT_WEIGHTS, RESIDENT_GRADS, RESIDENT_BOTH, RESIDENT = range(len(LEVELS))
STATE_KINDS = ("remainder", "exp_avg", "exp_avg_sq")


class GroupUse(NamedTuple):
    """How often a round reads a group's weights: by layers forward, and by layers backward (the head counts there).

    gradients: how many layers add to its gradient, each of which stores it (2 for a tied embedding).
    """

    forward: int
    backward: int
    gradients: int


def group_uses(model: ModelSpec) -> list[GroupUse]:
    """Uses of every parameter group. The embedding's backward does not read its weights."""
    forward, backward = [0] * len(model.groups), [0] * len(model.groups)
    for layer in model.layers:
        for group in layer.groups:
            forward[group] += layer.kind != "head"
            backward[group] += layer.kind != "embedding"
    gradients = [sum(group in layer.groups for layer in model.layers) for group in range(len(model.groups))]
    return [GroupUse(*use) for use in zip(forward, backward, gradients, strict=True)]


def resident_bytes(group: GroupLayout, level: GroupPlan) -> int:
    """GPU bytes of the planes that a level holds there."""
    return sum(num for kind, num in group.plane_bytes.items() if _home(kind, level) == "gpu")


def streamed_bytes(group: GroupLayout, level: GroupPlan) -> int:
    """Host bytes of the planes that a level holds there."""
    return sum(num for kind, num in group.plane_bytes.items() if _home(kind, level) == "host")


def _home(kind: str, level: GroupPlan) -> str:
    return {"weights": level.weights, "grad": level.grads}.get(kind, level.states)


def group_loads(
    group: GroupLayout, level: GroupPlan, use: GroupUse, rounds: int, acc_bytes: int, cost: CostModel
) -> np.ndarray:
    """Loads [9] of a parameter group: weights per round, gradients per round, and the optimizer's update."""
    p, planes = cost.profile, group.plane_bytes
    loads, stores = np.zeros(NUM_LOADS), rounds * use.gradients
    if level.weights == "host":
        loads[FH] = rounds * use.forward * planes["weights"] / p.h2d_duplex_bytes_per_s
        loads[BH] = rounds * use.backward * planes["weights"] / p.h2d_duplex_bytes_per_s
    if level.grads == "host":
        loads[BH] += (stores - 1) * planes["grad"] / p.h2d_duplex_bytes_per_s
        loads[BD] = stores * planes["grad"] / p.d2h_duplex_bytes_per_s
    touched = stores * group.numel * acc_bytes + (2 * stores - 1) * planes["grad"]
    loads[BC] = touched / p.memory_bytes_per_s + 2 * stores * p.launch_s
    back = sum(num for kind, num in planes.items() if kind != "grad" and _home(kind, level) == "host")
    loads[UC] = (2 * sum(planes.values()) - planes["grad"]) / p.memory_bytes_per_s
    loads[UH] = (back + (planes["grad"] if level.grads == "host" else 0)) / p.h2d_duplex_bytes_per_s
    loads[UD] = back / p.d2h_duplex_bytes_per_s
    return loads


def layer_compute_s(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> tuple[float, float]:
    """(forward, backward without recomputation) seconds of a layer per round; the head's forward is in its backward."""
    program = compile_layer(layer, (), (), cost.chunk_tokens, cost.compute_bytes)
    forward_s = backward_s = 0.0
    for (tokens, seq_len), count in Counter((c.tokens, c.seq_len) for c in shape.chunks).items():
        forward, backward, again = _layer_work(program, tokens, seq_len, cost.compute_bytes)
        backward_s += count * cost.work_s(backward)
        if layer.kind != "head":
            forward_s += count * cost.work_s(forward)
            backward_s -= count * cost.work_s(again)
    return forward_s, backward_s


@lru_cache(maxsize=4096)
def _layer_work(program: LayerProgram, tokens: int, seq_len: int, compute_bytes: int) -> tuple[Work, Work, Work]:
    """Forward, backward, and the recomputation in backward."""
    sizes = (tokens, seq_len, compute_bytes)
    return program.forward_work(*sizes), program.backward_work(*sizes), program.recompute_work(*sizes)


def block_costs(block: LayerSpec, group: GroupLayout, shape: RoundShape, acc_bytes: int, cost: CostModel) -> BlockCosts:
    """Seconds of a block per chunk, for the sketch."""
    singles = [layer_compute_s(block, RoundShape((chunk,)), cost) for chunk in shape.chunks]
    touched = group.numel * acc_bytes + 2 * group.plane_bytes["grad"]
    finish_s = touched / cost.profile.memory_bytes_per_s + 2 * cost.profile.launch_s
    return BlockCosts(tuple(f for f, _ in singles), tuple(b for _, b in singles), finish_s, shape.chunks[0].is_slice)


def option_loads(option: KeepOption, num_chunks: int, refills: int, rounds: int, cost: CostModel) -> np.ndarray:
    """Loads [9] of a block's kept activations; `refills` is how often backward fetches each chunk's (2 when sliced)."""
    p = cost.profile
    moved = rounds * num_chunks * option.host_bytes
    loads = np.zeros(NUM_LOADS)
    loads[FD] = moved / p.d2h_duplex_bytes_per_s
    loads[BC] = rounds * option.recompute_s
    loads[BH] = refills * moved / p.h2d_duplex_bytes_per_s
    return loads


def phase_seconds(loads: np.ndarray) -> np.ndarray:
    """Seconds of loads [..., 9] when the streams of each phase overlap perfectly: the sum of each phase's largest."""
    phases = loads.reshape(*loads.shape[:-1], 3, 3)
    return phases.max(axis=-1).sum(axis=-1)
