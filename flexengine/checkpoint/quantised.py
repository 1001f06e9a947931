"""Weights that a checkpoint holds quantised: which tensors stand for one, and its values out of them.

A decoder works on rows of a weight, counted along dimension 0, so many at a time that what it takes stays small beside
the arenas. It knows shapes as the model has them, and how the checkpoint lays the same weight out.

MXFP4: 32 values along a weight's input share a scale, a power of two (E8M0: 2^(byte - 127), 255 is NaN); values have
one sign, two exponent and one mantissa bit (E2M1), two in a byte, the first in the low half. Source: Open Compute
Project 2023, "OCP Microscaling Formats (MX) Specification", version 1.0.

FP8: values of E4M3, and a float32 factor for every block of 128 rows by 128 columns, cut at the edges. Source:
DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3, and the layout of its published checkpoints.

NF4: as bitsandbytes writes it. Beside the codes, two in a byte, the first in the high half, lie the magnitudes of
blocks of 64, the table of numbers, and a JSON text. With double quantisation the magnitudes have 8 bits, with those of
256 blocks in float32, a table of numbers of their own, and their mean in the text; else they are float32. Source:
Dettmers et al. 2023, "QLoRA", section 3; the layout of published checkpoints.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.reader import CheckpointReader
from flexengine.checkpoint.safetensors_format import CheckpointError, parse_json_object
from flexengine.wording import shown

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
    """A tensor as it must be in the checkpoint: its shape and bytes, None for any, and the dtypes that it may have."""

    shape: tuple[int, ...] | None
    dtypes: frozenset[torch.dtype]
    num_bytes: int | None = None


class Decoder(ABC):
    """One way to quantise a weight. `name` and `shape` are those of the model's source; all methods may be called from
    several threads. same_as: the format of fewer bytes that has the same codes and scales."""

    same_as: str

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

    @abstractmethod
    def fields(self, reader: CheckpointReader, name: str, shape: tuple[int, ...], matrix: int) -> dict[str, Tensor]:
        """The codes and scales of a matrix by the names that the format `same_as` gives them, on the CPU.

        matrix: its number, in a stack of them.
        """


class Mxfp4(Decoder):
    """A stack [E, D, F] of matrices used as x @ weight, each stored transposed: `_blocks` [E, F, D / 32, 16] and
    `_scales` [E, F, D / 32] of bytes. One matrix at a time: 5 bytes for each of its values."""

    same_as = "mxfp4"

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
        parts = (_rows(reader, part, first_row, num_rows) for part in self.stored(name, shape))
        return mxfp4_values(*parts).transpose(1, 2)

    def fields(self, reader: CheckpointReader, name: str, shape: tuple[int, ...], matrix: int) -> dict[str, Tensor]:
        codes, scales = (_rows(reader, part, matrix, 1)[0] for part in self.stored(name, shape))
        return {"codes": codes, "scales": scales}


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., 32 * B] in bf16, which is exact, from blocks [..., B, 16] and scales [..., B] of bytes."""
    pairs = torch.stack((_E2M1.repeat(16), _E2M1.repeat_interleave(16)), dim=-1).view(torch.int32)[:, 0]
    values = pairs[blocks.flatten().int()].view(torch.bfloat16).view(-1, _SPAN)
    values.mul_(scales.view(torch.float8_e8m0fnu).to(torch.bfloat16).view(-1, 1))
    return values.view(*scales.shape[:-1], -1)


class Fp8(Decoder):
    """A matrix [F, D] of E4M3, and beside it `_scale_inv`, which despite its name multiplies. 5 bytes for each value of
    a slab of whole blocks."""

    same_as = "fp8"

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

    def fields(self, reader: CheckpointReader, name: str, shape: tuple[int, ...], matrix: int) -> dict[str, Tensor]:
        values, scales = (_whole(reader, part) for part in self.stored(name, shape))
        return {"codes": values, "scales": scales}


def fp8_values(values: Tensor, scales: Tensor) -> Tensor:
    """[F, D] in float32 of E4M3 values [F, D] and the scales [ceil(F / 128), ceil(D / 128)] of their blocks."""
    wide = values.float()
    for rows, row_scales in zip(wide.split(_BLOCK), scales, strict=True):
        rows.mul_(row_scales.repeat_interleave(_BLOCK)[: wide.shape[1]])
    return wide


_NF4_STATE = ".quant_state.bitsandbytes__nf4"
_NF4_BLOCK, _NF4_NESTED = 64, 256


class Nf4(Decoder):
    """A matrix [F, D] as F * D / 2 bytes with a pair of codes each, with its magnitudes in tensors beside it. The bytes
    may be stored as elements of another dtype (bnb_4bit_quant_storage). Values have the dtype that the checkpoint's
    state names: they are what it multiplies."""

    same_as = "nf4"

    def stored(self, name: str, shape: tuple[int, ...]) -> dict[str, Stored]:
        numel, byte, wide = math.prod(shape), frozenset({torch.uint8}), frozenset({torch.float32})
        return {
            name: Stored(None, _CODE_DTYPES, -(-numel // 2)),
            **self._magnitude_tensors(name, -(-numel // _NF4_BLOCK)),
            f"{name}.quant_map": Stored((16,), wide),
            f"{name}{_NF4_STATE}": Stored(None, byte),
        }

    def _magnitude_tensors(self, name: str, blocks: int) -> dict[str, Stored]:
        byte, wide = frozenset({torch.uint8}), frozenset({torch.float32})
        return {
            f"{name}.absmax": Stored((blocks,), byte),
            f"{name}.nested_absmax": Stored((-(-blocks // _NF4_NESTED),), wide),
            f"{name}.nested_quant_map": Stored((256,), wide),
        }

    def slab_rows(self, shape: tuple[int, ...]) -> int:
        step = _NF4_BLOCK * _NF4_NESTED // math.gcd(_NF4_BLOCK * _NF4_NESTED, shape[1])
        return step * max(1, _SLAB_ELEMENTS // (step * shape[1]))

    def decode(
        self, reader: CheckpointReader, name: str, shape: tuple[int, ...], first_row: int, num_rows: int
    ) -> Tensor:
        state = self._state(reader, name, shape)
        first, count = first_row * shape[1], num_rows * shape[1]
        pairs = _bytes(reader, name, first // 2, -(-count // 2)).int()
        codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()[:count]
        scales = self._magnitudes(reader, name, first // _NF4_BLOCK, -(-count // _NF4_BLOCK), state)
        values = _whole(reader, f"{name}.quant_map")[codes] * scales.repeat_interleave(_NF4_BLOCK)[:count]
        return values.view(num_rows, shape[1]).to(getattr(torch, state["dtype"]))

    def _magnitudes(self, reader: CheckpointReader, name: str, first: int, count: int, state: dict[str, Any]) -> Tensor:
        """Those of some blocks, of which the first begins 256 that share one."""
        absmax = _rows(reader, f"{name}.absmax", first, count).int()
        nested = _rows(reader, f"{name}.nested_absmax", first // _NF4_NESTED, -(-count // _NF4_NESTED))
        numbers = _whole(reader, f"{name}.nested_quant_map")[absmax]
        return numbers * nested.repeat_interleave(_NF4_NESTED)[:count] + state["nested_offset"]

    def fields(self, reader: CheckpointReader, name: str, shape: tuple[int, ...], matrix: int) -> dict[str, Tensor]:
        state = self._state(reader, name, shape)
        return {
            "codes": _whole(reader, name).flatten().view(torch.uint8),
            "absmax": _whole(reader, f"{name}.absmax"),
            "nested_absmax": _whole(reader, f"{name}.nested_absmax"),
            "offset": torch.tensor([state["nested_offset"]]),
            "codebook": _whole(reader, f"{name}.quant_map"),
            "dynamic_map": _whole(reader, f"{name}.nested_quant_map"),
        }

    def _wanted(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """What the JSON text beside a matrix must say."""
        return {**_plain_nf4(shape), "nested_blocksize": _NF4_NESTED}

    def _is_told(self, state: dict[str, Any]) -> bool:
        """Whether the JSON text says all that decoding reads."""
        return state.get("dtype") in _NF4_DTYPES and isinstance(state.get("nested_offset"), float)

    def _state(self, reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """What the JSON text beside a matrix says. Raises CheckpointError for what this decoder does not read."""
        state = parse_json_object(bytes(_whole(reader, f"{name}{_NF4_STATE}").tolist()), Path(f"{name}{_NF4_STATE}"))
        for key, value in self._wanted(shape).items():
            if state.get(key) != value:
                raise CheckpointError(
                    f"{name}: stored in 4 bits with {key}={shown(state.get(key))}, and {shown(value)} is read. Give the"
                    " checkpoint in 16 bits that it was made from"
                )
        if not self._is_told(state):
            raise CheckpointError(
                f"{name}: its state in 4 bits lacks dtype or nested_offset; fetch the checkpoint again"
            )
        return state


class PlainNf4(Nf4):
    """The same without double quantisation: magnitudes are float32."""

    same_as = "nf4_float32"

    def _magnitude_tensors(self, name: str, blocks: int) -> dict[str, Stored]:
        return {f"{name}.absmax": Stored((blocks,), frozenset({torch.float32}))}

    def _magnitudes(self, reader: CheckpointReader, name: str, first: int, count: int, state: dict[str, Any]) -> Tensor:
        return _rows(reader, f"{name}.absmax", first, count)

    def fields(self, reader: CheckpointReader, name: str, shape: tuple[int, ...], matrix: int) -> dict[str, Tensor]:
        self._state(reader, name, shape)
        held = {"absmax": f"{name}.absmax", "codebook": f"{name}.quant_map"}
        codes = {"codes": _whole(reader, name).flatten().view(torch.uint8)}
        return codes | {field: _whole(reader, tensor) for field, tensor in held.items()}

    def _wanted(self, shape: tuple[int, ...]) -> dict[str, Any]:
        return _plain_nf4(shape)

    def _is_told(self, state: dict[str, Any]) -> bool:
        return state.get("dtype") in _NF4_DTYPES


def _plain_nf4(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"quant_type": "nf4", "blocksize": _NF4_BLOCK, "shape": list(shape)}


_NF4_DTYPES = ("bfloat16", "float16", "float32")
_CODE_DTYPES = frozenset({torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32})


def _rows(reader: CheckpointReader, name: str, first: int, count: int) -> Tensor:
    """Rows of a tensor as the checkpoint holds them."""
    entry = reader.tensors[name]
    values = torch.empty((count, *entry.shape[1:]), dtype=entry.dtype)
    reader.read_into(name, values, first, count)
    return values


def _bytes(reader: CheckpointReader, name: str, first: int, count: int) -> Tensor:
    """Bytes of a tensor [N, 1] of any dtype, uint8 [count]; both numbers are multiples of its element's bytes."""
    size = reader.tensors[name].dtype.itemsize
    return _rows(reader, name, first // size, count // size).flatten().view(torch.uint8)


def _whole(reader: CheckpointReader, name: str) -> Tensor:
    """A tensor as the checkpoint holds it."""
    entry = reader.tensors[name]
    values = torch.empty(entry.shape, dtype=entry.dtype)
    reader.read_into(name, values)
    return values


DECODERS: dict[str, Decoder] = {"mxfp4": Mxfp4(), "fp8": Fp8(), "nf4": Nf4(), "nf4_float32": PlainNf4()}
"""`WeightSource.decode` -> what reads it."""
