"""Mamba-2's scan on CUDA: kernels over tiles, all tiles and many heads per launch, as `kernels` does the delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexengine.ops.delta.segments import Run, in_parts, runs, spans_of
from flexengine.ops.delta.tiles import TILE, Ends, Operands

if TYPE_CHECKING:
    from flexengine.kernels.scan_states import ScanTiles


class _Kernels(NamedTuple):
    """The modules with the kernels."""

    states: ModuleType
    outputs: ModuleType
    backward: ModuleType


@lru_cache(maxsize=1)
def _kernels() -> _Kernels:
    """The modules with the kernels, imported when first used, as Triton is."""
    from flexengine.kernels import scan_backward, scan_outputs, scan_states  # noqa: PLC0415

    return _Kernels(scan_states, scan_outputs, scan_backward)


def forward(given: Operands, o: Tensor) -> None:
    """The output o [T, N * V] of all tokens."""
    for run in runs(given.seq_lens, in_parts(given.sizes)):
        for tiles in _heads(given, run):
            states = _buffer(tiles, *given.sizes[2:])
            _kernels().states.scan_states(tiles, states, *given.ends)
            _kernels().outputs.scan_outputs(tiles, states, o)
            del states


def fill_window(given: Operands) -> None:
    """The state after the chunk's sequence."""
    for run in runs(given.seq_lens, in_parts(given.sizes)):
        for tiles in _heads(given, run):
            _kernels().states.scan_states(tiles, None, *given.ends)


def backward(
    given: Operands, grad_o: Tensor, grad_ends: Ends, grad_qkv: Tensor, grad_gates: tuple[Tensor, ...]
) -> None:
    """Gradients of xbc, of log decay, strength and skip, and of the state before; that of the state after is read."""
    sizes = in_parts(given.sizes)
    for run in runs(given.seq_lens, sizes):
        sums = given.gates[0].new_empty(2, run.slots, sizes.key_heads, TILE, sizes.key_dim)
        heads = list(_heads(given, run))
        for tiles in heads:
            _heads_backward(tiles, given.ends.before, grad_o, grad_ends, sums, grad_qkv, grad_gates)
        _kernels().backward.scan_sums(heads[0], sums, grad_qkv)
        del sums


def _heads_backward(
    tiles: ScanTiles, before: Tensor | None, grad_o: Tensor, grad_ends: Ends, sums: Tensor, grad_xbc: Tensor,
    grad_gates: tuple[Tensor, ...],
) -> None:  # fmt: skip
    *_, k, v = tiles.sizes
    grad_decay, grad_strength, grad_skip = grad_gates
    states, grad_states = _buffer(tiles, k, v), _buffer(tiles, k, v)
    _kernels().states.scan_states(tiles, states, before, None)
    _kernels().states.scan_states_backward(tiles, grad_o, grad_states, *grad_ends)
    _kernels().outputs.scan_values_backward(tiles, grad_o, grad_states, grad_xbc, grad_strength, grad_skip)
    parts = _buffer(tiles, _kernels().backward.decay_parts(k), TILE)
    _kernels().backward.scan_keys_backward(tiles, states, grad_o, grad_states, sums, parts)
    _kernels().backward.scan_decays_backward(tiles, parts, grad_decay)


def _buffer(tiles: ScanTiles, *shape: int) -> Tensor:
    return torch.empty(tiles.slots, tiles.heads, *shape, dtype=torch.float32, device=tiles.xbc.device)


def _heads(given: Operands, run: Run) -> Iterator[ScanTiles]:
    """Heads of a run of sequences that are taken at a time."""
    sizes, skip = in_parts(given.sizes), given.skip
    assert skip is not None, "Mamba-2 has a skip of every head"
    cu, heads = given.cu_seqlens[run.begin : run.end + 1], run.heads(sizes)
    spans = spans_of(cu, run.slots)
    for first in range(0, sizes.value_heads, heads):
        count = min(heads, sizes.value_heads - first)
        yield _kernels().states.ScanTiles(
            given.qkv, *given.gates, skip, cu, spans, given.sizes, first, count, sizes.ratio
        )
