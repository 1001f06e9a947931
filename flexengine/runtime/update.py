"""Runs the optimizer's commands: factors on all gradients or on one group's, and updates of tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.optim import Optimizer
from flexengine.optim.clipping import gradient_scales, unclipped_scale
from flexengine.optim.into import update_into
from flexengine.optim.rule import Update
from flexengine.runtime.arena import DTYPES, Arenas, wide_dtype
from flexengine.schedule.commands import Command, SlotOffset, Stream, UpdateTile
from flexengine.schedule.fixed_slots import HOST_GRAD_NORM, HOST_SCALES
from flexengine.schedule.group_storage import Segment
from flexengine.schedule.layout import Layout
from flexengine.schedule.slots import Memory, Role


class UpdateSettings(NamedTuple):
    """What one optimizer step depends on beside the stored tensors. `step` counts from 1."""

    optimizer: Optimizer
    lr: float
    max_grad_norm: float | None
    loss_weight: float
    step: int
    seed: int


def update_settings(
    optimizer: Optimizer, lr: float | None, max_grad_norm: float | None, loss_weight: float, step: int, seed: int
) -> UpdateSettings:
    """Settings of one step; lr None takes the optimizer's. Raises ValueError when lr is negative or not finite."""
    lr = optimizer.lr if lr is None else lr
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr must be a finite number >= 0, got {lr}")
    return UpdateSettings(optimizer, lr, max_grad_norm, loss_weight, step, seed)


def apart(planes: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """The planes as rules take them, with the masters as weights; and where float16 weights lie beside those."""
    if planes["weights"].dtype != torch.float16:
        return planes, None
    computed, master = planes["weights"], planes["remainder"]
    return {kind: plane for kind, plane in planes.items() if kind != "remainder"} | {"weights": master}, computed


class UpdateRunner:
    """Runs `clip`, `scale` and `update` commands."""

    def __init__(
        self,
        layout: Layout,
        arenas: Arenas,
        lr_factors: tuple[float, ...] = (),
        decay_factors: tuple[float, ...] = (),
    ) -> None:
        self.layout, self.arenas, self.wide = layout, arenas, wide_dtype(layout)
        ones = (1.0,) * len(layout.groups)
        self.lr_factors, self.decay_factors = lr_factors or ones, decay_factors or ones
        self.segments = {(g, s.name): s for g, stored in enumerate(layout.groups) for s in stored.segments}
        self.first_element, total = [], 0
        for stored in layout.groups:
            self.first_element.append(total)
            total += stored.numel
        runs = [self._runs(group) for group in range(len(layout.groups))]
        most = max(r.stop - r.start for r in runs)
        rows = [[min(r.start + i, r.stop - 1) for i in range(most)] for r in runs]
        self.runs_of_groups = torch.tensor(rows, device=arenas.device)
        self.is_run = torch.tensor([[r.start + i < r.stop for i in range(most)] for r in runs], device=arenas.device)
        trained = [not group.frozen for group in layout.model.groups]
        self.trained = None if all(trained) else torch.tensor(trained, device=arenas.device)

    def _scalar(self, role: Role, offset: int, memory: Memory = "gpu") -> Tensor:
        return self.arenas.view(self.layout.place(role, memory=memory), offset, (1,), self.wide)

    def scale(self, group: int) -> Tensor:
        """Factor on a group's gradient, one element."""
        return self._scalar("scales", self.layout.acc_bytes * group)

    def host_scale(self, group: int) -> Tensor:
        """The host's copy of the factor on a group's gradient; it exists only where the CPU updates."""
        return self._scalar("scalars", HOST_SCALES + self.layout.acc_bytes * group, "host")

    def is_unclipped(self, settings: UpdateSettings) -> bool:
        """Whether all factors that the host was told are, bit by bit, the one where nothing is clipped.

        False where a norm is not finite. Order: the host has been told.
        """
        place, count = self.layout.place("scalars", memory="host"), len(self.layout.groups)
        scales = self.arenas.view(place, HOST_SCALES, (count,), self.wide)
        return torch.equal(scales, unclipped_scale(settings.loss_weight, self.wide).expand(count))

    def grad_norm(self) -> Tensor:
        """Global norm of the gradients, one element."""
        return self._scalar("grad_norm", 0)

    def host_grad_norm(self) -> Tensor:
        """The host's copy of the gradients' global norm; it exists only where the CPU updates."""
        return self._scalar("scalars", HOST_GRAD_NORM, "host")

    def norm_squares(self) -> Tensor:
        """Sums of squares of the stored gradients per run of a group, float64 [runs]."""
        slot = self.layout.place("norm_squares")
        return self.arenas.view(slot, 0, (self.layout.first_run(len(self.layout.groups)),), torch.float64)

    def group_squares(self) -> Tensor:
        """Sums of squares of the stored gradients per group, float64 [groups]."""
        squares = self.norm_squares()
        if len(squares) == len(self.layout.groups):
            return squares
        return torch.where(self.is_run, squares[self.runs_of_groups], 0.0).sum(1)

    def _group_square(self, squares: Tensor, group: int) -> Tensor:
        return squares[self._runs(group)].sum()

    def _runs(self, group: int) -> slice:
        return slice(self.layout.first_run(group), self.layout.first_run(group + 1))

    def clip(self, settings: UpdateSettings) -> None:
        """Write the factors on all gradients (clip coefficient / target tokens) and their global norm.

        Nothing writes the sums of squares of frozen groups, so they are left out.
        """
        squares = self.group_squares()
        if self.trained is not None:
            squares = torch.where(self.trained, squares, 0.0)
        scales, norm = gradient_scales(squares, settings.loss_weight, settings.max_grad_norm, self.wide)
        self.arenas.view(self.layout.place("scales"), 0, (len(squares),), self.wide).copy_(scales)
        self.grad_norm().copy_(norm)

    def scale_group(self, group: int, settings: UpdateSettings) -> None:
        """Write the factor on one gradient. Without clipping it depends on no other gradient."""
        assert settings.max_grad_norm is None
        square = self._group_square(self.norm_squares(), group)
        scales, _ = gradient_scales(square[None], settings.loss_weight, None, self.wide)
        self.scale(group).copy_(scales)

    def update(self, command: Command, slots: tuple, settings: UpdateSettings) -> None:
        """Update one tile, or on the CPU a whole segment, by its rule. slots: the program's slot table.

        In place; what is updated speculatively goes to its targets, if it has any, with the factor where nothing is
        clipped.
        """
        tile: UpdateTile = command.args
        segment, s = self.segments[tile.group, tile.segment], settings
        assert segment.rule is not None
        if tile.targets is not None:
            scale = unclipped_scale(s.loss_weight, self.wide)
        else:
            scale = (self.host_scale if command.stream is Stream.CPU else self.scale)(tile.group)
        planes, computed = apart(self._views(segment, tile.count, tile.planes, slots))
        update = Update(
            planes,
            grad_scale=scale,
            settings=s.optimizer,
            lr=s.lr * self.lr_factors[tile.group],
            weight_decay=s.optimizer.weight_decay * self.decay_factors[tile.group] if segment.decays else 0.0,
            step=s.step,
            seed=s.seed,
            element_offset=self.first_element[tile.group] + segment.first_element + tile.start,
            matrices=segment.matrices_in(tile.start, tile.count),
            scratch=self._scratch(tile, slots),
        )
        if not tile.targets:
            segment.rule.update(update)
        else:
            planes, computed = apart(self._views(segment, tile.count, tile.targets, slots))
            update_into(segment.rule, update, planes)
        if computed is not None:
            computed.copy_(planes["weights"])

    def _views(self, segment: Segment, count: int, places: Mapping[str, SlotOffset], slots: tuple) -> dict[str, Tensor]:
        """Views of `count` elements of those planes of a segment that have a place."""
        return {
            plane.kind: self.arenas.view(
                slots[places[plane.kind].slot],
                places[plane.kind].offset,
                (-(-count // plane.block),),
                DTYPES[plane.dtype],
            )
            for plane in segment.planes
            if plane.kind in places
        }

    def _scratch(self, tile: UpdateTile, slots: tuple) -> Tensor | None:
        """The temporaries of a rule of matrices, in bytes."""
        place = tile.planes.get("scratch")
        return (
            None
            if place is None
            else self.arenas.view(slots[place.slot], 0, (slots[place.slot].num_bytes,), torch.uint8)
        )
