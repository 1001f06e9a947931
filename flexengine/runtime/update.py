"""The optimizer step's compute commands: clip factor and AdamW on tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.optim.adamw import AdamW, adamw_update
from flexengine.optim.clipping import gradient_scale
from flexengine.runtime.arena import DTYPES, Arenas
from flexengine.schedule.commands import Command, Stream, UpdateTile
from flexengine.schedule.layout import HOST_SCALARS, Layout


class UpdateSettings(NamedTuple):
    """What one optimizer step depends on besides the stored tensors. `step` counts from 1."""

    optimizer: AdamW
    lr: float
    max_grad_norm: float | None
    num_target_tokens: int
    step: int
    seed: int


class UpdateRunner:
    """Runs `clip` and `update` commands. Set `settings` before running the program."""

    def __init__(self, layout: Layout, arenas: Arenas) -> None:
        self.layout, self.arenas = layout, arenas
        self.settings: UpdateSettings | None = None
        self.segments = {(g, s.name): s for g, stored in enumerate(layout.groups) for s in stored.segments}
        self.first_element, total = [], 0
        for stored in layout.groups:
            self.first_element.append(total)
            total += stored.numel

    def scalar(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """One-element view of a scalar slot."""
        return self.arenas.view(self.layout.slots[self.layout.slot(name)], 0, (1,), dtype)

    def host_scalar(self, name: str) -> Tensor:
        """What the host has of a scalar, one element; only where the CPU updates."""
        slot = self.layout.slots[self.layout.slot("scalars.host")]
        return self.arenas.view(slot, HOST_SCALARS[name], (1,), torch.float32)

    def norm_squares(self) -> Tensor:
        """Sums of squares of the stored gradients per group, float64 [groups]."""
        slot = self.layout.slots[self.layout.slot("norm_squares")]
        return self.arenas.view(slot, 0, (len(self.layout.groups),), torch.float64)

    def clip(self) -> None:
        """Write the gradient scale (clip coefficient / target tokens) and the global norm."""
        assert self.settings is not None
        scale, norm = gradient_scale(self.norm_squares(), self.settings.num_target_tokens, self.settings.max_grad_norm)
        self.scalar("scale").copy_(scale)
        self.scalar("grad_norm").copy_(norm)

    def update(self, command: Command, slots: tuple) -> None:
        """AdamW on one tile, or by the CPU on what it updates in place; `slots` is the program's slot table."""
        assert self.settings is not None
        tile: UpdateTile = command.args
        segment, s = self.segments[tile.group, tile.segment], self.settings
        planes = {
            plane.kind: self.arenas.view(
                slots[tile.planes[plane.kind].slot], tile.planes[plane.kind].offset, (tile.count,), DTYPES[plane.dtype]
            )
            for plane in segment.planes
        }
        adamw_update(
            weight=planes["weights"],
            remainder=planes.get("remainder"),
            exp_avg=planes["exp_avg"],
            exp_avg_sq=planes["exp_avg_sq"],
            grad=planes["grad"],
            grad_scale=(self.host_scalar if command.stream is Stream.CPU else self.scalar)("scale"),
            lr=s.lr,
            betas=s.optimizer.betas,
            eps=s.optimizer.eps,
            weight_decay=s.optimizer.weight_decay if tile.segment == "matrix" else 0.0,
            step=s.step,
            seed=s.seed,
            element_offset=self.first_element[tile.group] + segment.first_element + tile.start,
        )
