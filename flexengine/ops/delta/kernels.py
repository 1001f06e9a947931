"""Gated delta rule on CUDA: kernels over tiles, all tiles and many heads per launch.

A chunk is done part by part, some sequences and some heads at a time, so that buffers are bounded; which slot holds
which tile: `delta_segments`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexengine.ops.delta.segments import runs, spans_of
from flexengine.ops.delta.tiles import TILE, Ends, Operands

if TYPE_CHECKING:
    from flexengine.kernels.delta_prepare import Tiles


TOGETHER = {torch.bfloat16}
"""What is stored where states go from tile to tile in the kernel that computes outputs, and are not stored at all."""


class _Kernels(NamedTuple):
    """The modules with the kernels."""

    prepare: ModuleType
    states: ModuleType
    outputs: ModuleType
    backward: ModuleType


@lru_cache(maxsize=1)
def _kernels() -> _Kernels:
    """The modules with the kernels, imported when first used, as Triton is."""
    from flexengine.kernels import delta_backward, delta_outputs, delta_prepare, delta_states  # noqa: PLC0415

    return _Kernels(delta_prepare, delta_states, delta_outputs, delta_backward)


class Prepared(NamedTuple):
    """What `delta_prepare` writes."""

    total: Tensor
    scale: Tensor
    query_scale: Tensor
    u: Tensor
    w: Tensor


def forward(given: Operands, o: Tensor) -> None:
    """The output o [T, N * V] of all tokens."""
    for tiles in _parts(given):
        _part_forward(tiles, given.ends, o)


def _part_forward(tiles: Tiles, ends: Ends, o: Tensor) -> None:
    made = _prepared(tiles)
    if tiles.between in TOGETHER:
        _kernels().states.delta_states(tiles, *made, None, *ends, o)
        return
    states = _buffer(tiles, *tiles.sizes[2:])
    _kernels().states.delta_states(tiles, *made, states, *ends)
    _kernels().outputs.delta_outputs(tiles, *made[:3], states, made.u, o)


def fill_window(given: Operands) -> None:
    """The state after the chunk's sequence."""
    for tiles in _parts(given):
        _kernels().states.delta_states(tiles, *_prepared(tiles), None, *given.ends)


def backward(
    given: Operands, grad_o: Tensor, grad_ends: Ends, grad_qkv: Tensor, grad_gates: tuple[Tensor, Tensor]
) -> None:
    """Gradients of qkv, of log decay and strength, and of the state before; that of the state after is read."""
    for tiles in _parts(given):
        _part_backward(tiles, given.ends.before, grad_o, grad_ends, grad_qkv, grad_gates)


def _part_backward(
    tiles: Tiles, before: Tensor | None, grad_o: Tensor, grad_ends: Ends, grad_qkv: Tensor,
    grad_gates: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Names as in `delta_backward`: X is `solved`, M `pairs`, Q `read`."""
    *_, k, v = tiles.sizes
    inverse, states, grad_states = (_buffer(tiles, *shape) for shape in ((TILE, TILE), (k, v), (k, v)))
    made = _prepared(tiles, inverse)
    scales, written, w = made[:3], made.u, made.w
    _kernels().states.delta_states(tiles, *scales, written, w, states, before, None)
    grad_written = _buffer(tiles, TILE, v)
    _kernels().outputs.delta_outputs_backward(tiles, *scales, grad_o, grad_written)
    _kernels().states.delta_states_backward(tiles, *scales, w, grad_o, grad_written, grad_states, *grad_ends)
    del made, w
    read, parts = _buffer(tiles, TILE, TILE), _buffer(tiles, _kernels().backward.gate_parts(tiles), 2, TILE, wide=True)
    _kernels().backward.delta_pairs_backward(
        tiles, *scales, written, grad_o, grad_written, inverse, read, parts, grad_qkv
    )
    pairs, solved = inverse, grad_written
    grad_q, grad_k = (_key_buffer(tiles) for _ in range(2))
    _kernels().backward.delta_keys_backward(
        tiles, *scales, states, written, grad_o, grad_states, solved, pairs, read, grad_q, grad_k, parts
    )
    _kernels().backward.delta_gates_backward(tiles, parts, *grad_gates)
    _kernels().backward.delta_norm_backward(tiles, grad_q, grad_k, grad_qkv)


def _prepared(tiles: Tiles, inverse: Tensor | None = None) -> Prepared:
    *_, k, v = tiles.sizes
    total, scale, query_scale = (_buffer(tiles, TILE, wide=True) for _ in range(3))
    made = Prepared(total, scale, query_scale, _buffer(tiles, TILE, v), _buffer(tiles, TILE, k))
    _kernels().prepare.delta_prepare(tiles, *made, inverse)
    return made


def _buffer(tiles: Tiles, *shape: int, wide: bool = False) -> Tensor:
    dtype = torch.float32 if wide else tiles.between
    return torch.empty(tiles.slots, tiles.heads, *shape, dtype=dtype, device=tiles.qkv.device)


def _key_buffer(tiles: Tiles) -> Tensor:
    shape = (tiles.slots, tiles.heads // tiles.ratio, TILE, tiles.sizes[2])
    return torch.empty(shape, dtype=tiles.between, device=tiles.qkv.device)


# -- parts of a chunk --------------------------------------------------------------------------------------------------


def _parts(given: Operands) -> Iterator[Tiles]:
    """Sequences and heads that are taken at a time."""
    sizes = given.sizes
    for run in runs(given.seq_lens, sizes):
        cu, heads = given.cu_seqlens[run.begin : run.end + 1], run.heads(sizes)
        spans = spans_of(cu, run.slots)
        for first in range(0, sizes.value_heads, heads):
            count = min(heads, sizes.value_heads - first)
            yield _kernels().prepare.Tiles(given.qkv, *given.gates, cu, spans, sizes, first, count, given.between)
