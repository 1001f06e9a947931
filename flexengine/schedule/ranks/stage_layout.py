"""Where everything lies of one of several ranks that train in stages: see `stages`.

All planes of all groups have their places in the node's memory, the same on every rank: loading, export, checkpoints
and evaluation find them there. What the plan keeps on GPUs lies on that of the block's rank as well, which alone trains
with it and copies it back before anything else reads it.
"""

from __future__ import annotations

from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Plan
from flexengine.schedule.layout import Layout, OwnPlane
from flexengine.schedule.parts import Part
from flexengine.schedule.pieces import Piece, pieces_of, whole_piece
from flexengine.schedule.ranks.stages import Stage, StageSemaphores, head_group, why_no_stages
from flexengine.schedule.shares import ALONE, Share
from flexengine.schedule.slots import PlaneKind

OF_OTHERS = GroupPlan(update="none")
"""The home of a block of another rank: a rank fetches its weights to evaluate."""


class StageLayout(Layout):
    """The slots of rank `rank` under a plan in stages. Raises: ValueError where ranks cannot train the model so."""

    def __init__(self, model: ModelSpec, plan: Plan, rank: int) -> None:
        reason = why_no_stages(model, plan.request.ranks)
        if reason:
            raise ValueError(f"{model.name} cannot be trained in stages: {reason}")
        self.stage = Stage(rank, plan.request.ranks, len(model.layers))
        self._layer_of = {group: index for index, layer in enumerate(model.layers) for group in layer.groups}
        super().__init__(model, plan)
        self.semaphores = StageSemaphores(len(model.layers), plan.num_chunks, len(self.pieces[self.head_group][0]))

    @property
    def edges(self) -> tuple[int, int]:
        """The groups of embedding and head."""
        return self.model.layers[0].groups[0], self.head_group

    @property
    def head_group(self) -> int:
        """The group whose gradient is relayed, unless it is frozen."""
        return head_group(self.given)

    def owns_group(self, group: int) -> bool:
        """Whether all rounds of a group's layer are this rank's."""
        return self.stage.owns(self._layer_of[group])

    def _homes_of(self, plan: Plan) -> tuple[GroupPlan, ...]:
        return tuple(
            home if self.is_edge(group) or self.owns_group(group) else OF_OTHERS
            for group, home in enumerate(plan.groups)
        )

    def is_edge(self, group: int) -> bool:
        """Whether all ranks update a share of a group: of the embedding and the head."""
        return self._layer_of[group] in (0, self.stage.head)

    def trains(self, layer: int) -> bool:
        """As of a layout: the rank's own blocks, the head, and with block 0 the embedding."""
        return self.stage.runs(layer)

    def is_handed(self, layer: int) -> bool:
        """As of a layout: all blocks have their inputs from another rank but the first."""
        return layer > 1 and self.stage.owns(layer)

    def share_of(self, group: int, share: Share) -> Share:
        """As of a layout: all of the rank's own blocks, and of the edges what it is given."""
        return share if self.is_edge(group) else ALONE

    def stored_slot(self, kind: PlaneKind, group: int) -> int:
        """As of a layout: every plane has its place in the node's memory."""
        return self.slot(kind, self.model.groups[group].name, memory="node")

    def own_planes(self, rank: int) -> list[OwnPlane]:
        """As of a layout: whole planes."""
        slots, found = self.slots, list[OwnPlane]()
        for group, stored in enumerate(self.groups):
            for kind in (kind for kind, num_bytes in stored.plane_bytes.items() if num_bytes):
                here, there = slots[self.plane_slot(kind, group)], slots[self.stored_slot(kind, group)]
                if here.memory == "gpu":
                    frozen = self.model.groups[group].frozen
                    found.append(OwnPlane(kind, here, 0, there, 0, here.num_bytes, frozen))
        return found

    def piece_places(self, group: int, piece: Piece) -> list[tuple[int, int]]:
        """As of a layout: gradients that stay on the GPU lie in their plane."""
        if self.homes[group].grads == "gpu":
            return [self.run_place("grad", group, run.run) for run in piece.runs]
        return super().piece_places(group, piece)

    def _pieces_of(self, group: int, part: Part) -> tuple[Piece, ...]:
        if group == self.head_group and self.groups[group].plane_bytes["grad"]:
            return pieces_of(part, self.groups[group].element_bytes("grad"))
        return (whole_piece(part),)
