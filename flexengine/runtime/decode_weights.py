"""Turns a part's stored bytes into the elements that layers read, piece by piece."""

from __future__ import annotations

import torch

from flexengine.ops.weight_formats import FORMATS
from flexengine.runtime.arena import Arenas
from flexengine.schedule.commands import DecodeWeights
from flexengine.schedule.slots import Slot


def decode_weights(args: DecodeWeights, slots: tuple[Slot, ...], arenas: Arenas, compute: torch.dtype) -> None:
    """Decode all pieces of a command on the current stream; never waits for the device."""
    source, target = slots[args.source], slots[args.target]
    for piece, source_offset, first_element in args.pieces:
        out_offset = first_element * compute.itemsize
        if piece.storage == "compute":
            values = arenas.view(source, source_offset, (piece.numel,), compute)
            arenas.view(target, out_offset, (piece.numel,), compute).copy_(values)
            continue
        stored = arenas.view(source, source_offset, (piece.count, piece.num_bytes), torch.uint8)
        out = arenas.view(target, out_offset, (piece.count, piece.rows * piece.columns), compute)
        FORMATS[piece.storage].decode(stored, piece.layout, out)
