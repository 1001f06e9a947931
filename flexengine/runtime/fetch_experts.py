"""Copies those experts of a part to the GPU that have rows in some chunk of the round."""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor

from flexengine.ops.base import use_kernel
from flexengine.runtime.arena import Arenas
from flexengine.schedule.commands import BOUND_BYTES, CopyRegion, FetchExperts, SlotOffset
from flexengine.schedule.slots import Slot


def fetch_experts(args: FetchExperts, slots: tuple[Slot, ...], arenas: Arenas) -> None:
    """Copy touched experts from host memory to a weight slot, on the current stream; others stay as they are.

    Order: on CUDA it launches, and never waits for the device.
    """
    bounds = bounds_of_experts(args.experts, args.bounds, slots, arenas)
    for region in args.regions:
        source, target = (end.view(args.experts, -1) for end in _ends(region, args.experts, slots, arenas))
        if use_kernel(target):
            from flexengine.kernels import fetch_experts as kernel  # noqa: PLC0415 (Triton is imported when first used)

            kernel.fetch_experts(source, target, bounds)
            continue
        for expert in bounds.diff(dim=1).sum(dim=0).nonzero().flatten().tolist():
            target[expert].copy_(source[expert])


def _ends(region: CopyRegion, experts: int, slots: tuple[Slot, ...], arenas: Arenas) -> tuple[Tensor, Tensor]:
    """Source and target of a region as integers, in the widest type that divides every expert's share."""
    places = [(slots[region.source], region.source_offset), (slots[region.target], region.target_offset)]
    share = region.num_bytes // experts
    width = gcd(share, *(slot.offset + offset for slot, offset in places))
    dtype = torch.int32 if width % 4 == 0 else torch.int16
    source, target = (
        arenas.view(slot, offset, (region.num_bytes // dtype.itemsize,), dtype) for slot, offset in places
    )
    return source, target


def bounds_of_experts(experts: int, bounds: tuple[SlotOffset, ...], slots: tuple[Slot, ...], arenas: Arenas) -> Tensor:
    """Bounds of rows [chunks, experts + 1] of a part's experts, as one view: chunks' slots lie side by side."""
    starts = [slots[slot].offset + offset for slot, offset in bounds]
    apart = starts[1] - starts[0] if len(starts) > 1 else 0
    assert starts == [starts[0] + apart * i for i in range(len(starts))], "bounds of chunks are equally far apart"
    num_bytes = apart * (len(starts) - 1) + BOUND_BYTES * (experts + 1)
    whole = arenas.bytes_view("gpu", starts[0], num_bytes).view(torch.int32)
    return whole.as_strided((len(starts), experts + 1), (apart // BOUND_BYTES, 1))
