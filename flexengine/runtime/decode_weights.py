"""Turns a part's stored bytes into the elements that layers read, piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.formats.weight_formats import FORMATS
from flexengine.runtime.arena import Arenas
from flexengine.runtime.fetch_experts import bounds_of_experts
from flexengine.schedule.commands import DecodeWeights, Touched
from flexengine.schedule.slots import Slot


def decode_weights(args: DecodeWeights, slots: tuple[Slot, ...], arenas: Arenas, compute: torch.dtype) -> None:
    """Decode all pieces of a command on the current stream; never waits for the device."""
    source, target = slots[args.source], slots[args.target]
    rows = None if args.touched is None else rows_of_experts(args.touched, slots, arenas)
    for piece, source_offset, first_element in args.pieces:
        out_offset = first_element * compute.itemsize
        if piece.storage == "compute":
            values = arenas.view(source, source_offset, (piece.numel,), compute)
            arenas.view(target, out_offset, (piece.numel,), compute).copy_(values)
            continue
        stored = arenas.view(source, source_offset, (piece.count, piece.num_bytes), torch.uint8)
        out = arenas.view(target, out_offset, (piece.count, piece.rows * piece.columns), compute)
        FORMATS[piece.storage].decode(stored, piece.layout, out, None if rows is None else _each(rows, piece.count))


def rows_of_experts(touched: Touched, slots: tuple[Slot, ...], arenas: Arenas) -> Tensor:
    """Rows [experts] of a part's experts in all chunks, int32."""
    bounds = bounds_of_experts(touched.experts, touched.bounds, slots, arenas)
    return bounds.diff(dim=1).sum(dim=0, dtype=torch.int32)


def _each(rows: Tensor, matrices: int) -> Tensor:
    """The rows of the expert of each matrix; every expert has equally many matrices, one behind the other."""
    of_one, left = divmod(matrices, len(rows))
    assert left == 0, "every expert has equally many matrices of a shape"
    return rows.repeat_interleave(of_one, output_size=matrices)
