"""Weights that a checkpoint holds quantised: which tensors stand for one, and its values out of them.

A decoder works on rows of a weight, counted along dimension 0, so many at a time that what it takes stays small beside
the arenas. It knows shapes as the model has them, and how the checkpoint lays the same weight out.

MXFP4: 32 values along a weight's input share a scale, a power of two (E8M0: 2^(byte - 127), 255 is NaN); values have
one sign, two exponent and one mantissa bit (E2M1), two in a byte, the first in the low half. Source: Open Compute
Project 2023, "OCP Microscaling Formats (MX) Specification", version 1.0.

FP8: values of E4M3, and a float32 factor for every block of 128 rows by 128 columns, cut at the edges. Source:
DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3, and the layout of its published checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.reader import CheckpointReader
from flexengine.checkpoint.safetensors_format import CheckpointError

EXPORT_DTYPE = torch.bfloat16
"""What a weight that was quantised is exported in."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], dtype=torch.bfloat16)
_SPAN = 32
"""Values that share a scale in MXFP4."""
_BLOCK = 128
"""Rows, and columns, that share a scale in FP8."""
_SLAB_ELEMENTS = 1 << 22


class Stored(NamedTuple):
    """A tensor as it must be in the checkpoint: its shape, and the dtypes that it may have."""

    shape: tuple[int, ...]
    dtypes: frozenset[torch.dtype]


class Decoder(ABC):
    """One way to quantise a weight. `name` and `shape` are those of the model's source; all methods may be called from
    several threads."""

    @abstractmethod
    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
        """The tensors of the checkpoint that stand for the weight. Raises CheckpointError for shapes that the format
        does not have."""

    @abstractmethod
    def slab_rows(self, shape: tuple[int, ...]) -> int:
        """Rows that are decoded at a time: the first of a call is a multiple of it."""

    @abstractmethod
    def decode(
        self, reader: CheckpointReader, name: str, shape: tuple[int, ...], first_row: int, num_rows: int
    ) -> Tensor:
        """Rows first_row and on of the weight, [num_rows, *shape[1:]] on the CPU, in bf16 where that is exact, else in
        float32. Raises what reading raises."""


class Mxfp4(Decoder):
    """A stack [E, D, F] of matrices used as x @ weight, each stored transposed: `_blocks` [E, F, D / 32, 16] and
    `_scales` [E, F, D / 32] of bytes. One matrix at a time: 5 bytes for each of its values."""

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
        if len(shape) != 3 or shape[1] % _SPAN:
            raise CheckpointError(
                f"{name}: MXFP4 holds stacks of matrices whose {_SPAN} inputs share a scale, and shape {list(shape)} is"
                " none. Give a checkpoint in 16 or 32 bits"
            )
        count, inner, columns = shape
        scales, byte = (count, columns, inner // _SPAN), frozenset({torch.uint8})
        return {f"{name}_blocks": Stored((*scales, _SPAN // 2), byte), f"{name}_scales": Stored(scales, byte)}

    def slab_rows(self, shape: tuple[int, ...]) -> int:
        return 1

    def decode(
        self, reader: CheckpointReader, name: str, shape: tuple[int, ...], first_row: int, num_rows: int
    ) -> Tensor:
        parts = []
        for part, (stored, _) in self.stored(name, shape).items():
            parts.append(torch.empty((num_rows, *stored[1:]), dtype=torch.uint8))
            reader.read_into(part, parts[-1], first_row, num_rows)
        return mxfp4_values(*parts).transpose(1, 2)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., 32 * B] in bf16, which is exact, from blocks [..., B, 16] and scales [..., B] of bytes."""
    pairs = torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), dim=-1).view(torch.int32)[:, 0]
    values = pairs[blocks.flatten().int()].view(torch.bfloat16).view(-1, _SPAN)
    values.mul_(scales.view(torch.float8_e8m0fnu).to(torch.bfloat16).view(-1, 1))
    return values.view(*scales.shape[:-1], -1)


class Fp8(Decoder):
    """A matrix [F, D] of E4M3, and beside it `_scale_inv`, which despite its name multiplies. 5 bytes for each value of
    a slab of whole blocks."""

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
        if len(shape) != 2:
            raise CheckpointError(f"{name}: blocks of FP8 are those of a matrix, and shape {list(shape)} is none")
        scales = (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK))
        return {
            name: Stored(shape, frozenset({torch.float8_e4m3fn})),
            f"{name}_scale_inv": Stored(scales, frozenset({torch.float32})),
        }

    def slab_rows(self, shape: tuple[int, ...]) -> int:
        return _BLOCK * max(1, _SLAB_ELEMENTS // (_BLOCK * shape[1]))

    def decode(
        self, reader: CheckpointReader, name: str, shape: tuple[int, ...], first_row: int, num_rows: int
    ) -> Tensor:
        assert first_row % _BLOCK == 0, "slabs begin where blocks do"
        values = torch.empty((num_rows, shape[1]), dtype=torch.float8_e4m3fn)
        reader.read_into(name, values, first_row, num_rows)
        scales = torch.empty((-(-num_rows // _BLOCK), -(-shape[1] // _BLOCK)))
        reader.read_into(f"{name}_scale_inv", scales, first_row // _BLOCK, len(scales))
        return fp8_values(values, scales)


def fp8_values(values: Tensor, scales: Tensor) -> Tensor:
    """[F, D] in float32 of E4M3 values [F, D] and the scales [ceil(F / 128), ceil(D / 128)] of their blocks."""
    wide = values.float()
    for rows, row_scales in zip(wide.split(_BLOCK), scales, strict=True):
        rows.mul_(row_scales.repeat_interleave(_BLOCK)[: wide.shape[1]])
    return wide


DECODERS: dict[str, Decoder] = {"mxfp4": Mxfp4(), "fp8": Fp8()}
"""`WeightSource.decode` -> what reads it, by the name that `quant_method` has in configs."""
