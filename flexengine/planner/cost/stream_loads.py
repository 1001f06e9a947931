"""What layers put on each stream in each phase of a step, as arrays over their options: the terms the search adds up.

Seconds per step, twelve columns: forward, backward and update on compute, host-to-device, device-to-host and the host's
issue of commands. Phases follow each other; within one the streams run side by side, so the largest column of a phase
bounds it from below.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import GroupSpec, LayerSpec, ModelSpec
from flexengine.ops.base import Work
from flexengine.plan import GroupPlan, Home
from flexengine.planner.cost.cost_model import CostModel, stage_calls
from flexengine.schedule.commands import Command, CommandName, CopyRegion, Stream
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import LayerProgram
from flexengine.schedule.lowering import ChunkShape, RoundShape

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
STREAMED, RESIDENT_WEIGHTS, RESIDENT_GRADS, RESIDENT_BOTH, RESIDENT, UPDATED_BY_CPU = range(len(RESIDENCIES))
GPU_RESIDENCIES = tuple(range(UPDATED_BY_CPU))
"""Those that the GPU updates."""
FROZEN_RESIDENCIES = tuple(home.of_frozen() for home in RESIDENCIES)
"""What the same numbers mean for a group that is not trained: the home of its weights."""


class GroupUse(NamedTuple):
    """How often a round reads a group's weights: by layers forward, and by layers backward (the head counts there).

    gradients: how many layers add to its gradient, each of which stores it (2 for a tied embedding; 0 where frozen).
    """

    forward: int
    backward: int
    gradients: int


def group_uses(model: ModelSpec) -> list[GroupUse]:
    """Uses of every parameter group. The embedding's backward does not read its weights; layers below all that is
    trained have none."""
    forward, backward = [0] * len(model.groups), [0] * len(model.groups)
    for layer in model.layers:
        for group in layer.groups:
            forward[group] += layer.kind != "head"
            backward[group] += layer.kind != "embedding" and layer.has_backward
    gradients = [
        0 if spec.frozen else sum(group in layer.groups for layer in model.layers)
        for group, spec in enumerate(model.groups)
    ]
    return [GroupUse(*use) for use in zip(forward, backward, gradients, strict=True)]


def residencies_of(group: GroupSpec) -> tuple[GroupPlan, ...]:
    """What the numbers of homes mean for a group."""
    return FROZEN_RESIDENCIES if group.frozen else RESIDENCIES


def home_of(kind: str, home: GroupPlan) -> Home:
    """The side that a home holds a kind of planes on."""
    if kind == "weights":
        return home.weights
    return home.grads if kind == "grad" else home.states


def issue_s(cost: CostModel, kind: str, program: LayerProgram | None = None) -> float:
    """Host seconds to issue a command of some kind: of a layer with its program, a copy, an update or another."""
    if program is not None:
        return cost.profile.issue_s * sum(len(stage.parts) * stage_calls(stage) for stage in program.stages(kind))
    copies = (CopyRegion(0, 0, 0, 0, 1),) if kind == "copy" else ()
    return cost.issue_s(Command(0, kind, CommandName(""), Stream.COMPUTE, (), (), (), copies=copies))


def group_loads(
    group: GroupStorage, home: GroupPlan, use: GroupUse, rounds: int, acc_bytes: int, cost: CostModel
) -> np.ndarray:
    """Loads [12] of a parameter group: weights per round, gradients per round, and the optimizer's update (but for
    its issue, which the size of the tiles decides)."""
    p, planes = cost.profile, group.plane_bytes
    loads, stores = np.zeros(NUM_LOADS), rounds * use.gradients
    copy_s = issue_s(cost, "copy")
    if home.weights == "host":
        loads[FH] = rounds * use.forward * planes["weights"] / p.h2d_duplex_bytes_per_s
        loads[BH] = rounds * use.backward * planes["weights"] / p.h2d_duplex_bytes_per_s
        loads[FI] = rounds * use.forward * copy_s
        loads[BI] = rounds * use.backward * copy_s
    if not home.trained:
        return loads
    if home.grads == "host":
        loads[BH] += (stores - 1) * planes["grad"] / p.h2d_duplex_bytes_per_s
        loads[BD] = stores * planes["grad"] / p.d2h_duplex_bytes_per_s
        loads[BI] += (2 * stores - 1) * copy_s
    touched = stores * group.numel * acc_bytes + (2 * stores - 1) * planes["grad"]
    loads[BC] = touched / p.memory_bytes_per_s + 2 * stores * p.launch_s
    loads[BI] += stores * issue_s(cost, "finish_gradient")
    if home.update == "cpu":
        return loads
    back = sum(num for kind, num in planes.items() if kind != "grad" and home_of(kind, home) == "host")
    loads[UC] = (2 * sum(planes.values()) - planes["grad"]) / p.memory_bytes_per_s
    loads[UH] = (back + (planes["grad"] if home.grads == "host" else 0)) / p.h2d_duplex_bytes_per_s
    loads[UD] = back / p.d2h_duplex_bytes_per_s
    return loads


class LayerSeconds(NamedTuple):
    """A layer on one chunk or round: compute seconds with nothing recomputed, and what the host takes to issue it with
    everything recomputed."""

    forward_s: float
    backward_s: float
    forward_issue_s: float
    backward_issue_s: float


def layer_seconds(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> LayerSeconds:
    """Seconds of a layer per round; the head's forward is in its backward."""
    program = compile_layer(layer, (), (), cost.chunk_tokens, cost.compute_bytes)
    forward_s = backward_s = 0.0
    for (tokens, seq_len), count in Counter((c.tokens, c.seq_len) for c in shape.chunks).items():
        forward, backward, again = _layer_work(program, tokens, seq_len, cost.compute_bytes)
        backward_s += count * cost.work_s(backward)
        if layer.kind != "head":
            forward_s += count * cost.work_s(forward)
            backward_s -= count * cost.work_s(again)
    chunks = len(shape.chunks)
    forward_issue_s = 0.0 if layer.kind == "head" else chunks * issue_s(cost, "forward", program)
    return LayerSeconds(forward_s, backward_s, forward_issue_s, chunks * issue_s(cost, "backward", program))


@lru_cache(maxsize=4096)
def _layer_work(program: LayerProgram, tokens: int, seq_len: int, compute_bytes: int) -> tuple[Work, Work, Work]:
    """Forward, backward, and the recomputation in backward."""
    sizes = (tokens, seq_len, compute_bytes)
    return program.forward_work(*sizes), program.backward_work(*sizes), program.recompute_work(*sizes)


def chunk_seconds(layer: LayerSpec, shape: RoundShape, cost: CostModel) -> tuple[LayerSeconds, ...]:
    """Seconds of a layer for every chunk of a round."""
    known: dict[ChunkShape, LayerSeconds] = {}
    for chunk in shape.chunks:
        alike = ChunkShape(chunk.tokens, chunk.seq_len)
        if alike not in known:
            known[alike] = layer_seconds(layer, RoundShape((alike,)), cost)
    program = compile_layer(layer, (), (), cost.chunk_tokens, cost.compute_bytes)
    adding_s = cost.work_s(program.accumulation_work(cost.compute_bytes))
    last = len(shape.chunks) - 1  # backward begins with it
    found = [known[ChunkShape(c.tokens, c.seq_len)] for c in shape.chunks]
    return tuple(s if i == last else s._replace(backward_s=s.backward_s + adding_s) for i, s in enumerate(found))
