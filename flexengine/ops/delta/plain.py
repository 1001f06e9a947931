"""Rules with and without correction in plain torch: on the CPU, in float64, for heads wider than the kernels hold.

Segment after segment of whole tiles, so that what a chunk takes is bounded. Shapes: those of `delta_tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from flexengine.ops.delta.segments import SEGMENT_TILES, SIDE_BY_SIDE, Segment, batches, gather, scatter
from flexengine.ops.delta.tiles import (
    TILE,
    Ends,
    Operands,
    Prepared,
    Rows,
    Sizes,
    backward_of,
    outputs_of,
    prepare,
    products_of,
    states_of,
)

NORM_EPS = 1e-6


def forward(given: Operands, o: Tensor) -> None:
    """The output o [T, N * V] of all tokens."""
    with products_of(given.qkv):
        _run(given, o)


def fill_window(given: Operands) -> None:
    """The state after the chunk's sequence."""
    with products_of(given.qkv):
        _run(given, None)


def _run(given: Operands, o: Tensor | None) -> None:
    """Run the states through all sequences; where wanted, also return what queries read from them."""
    for segments in batches(given.seq_lens):
        state = _start(given, segments[0].count)
        for segment in segments:
            rows, *_ = _rows(given, segment)
            made = prepare(rows, given.skip is None, given.between)
            states, written, state = states_of(rows, made, state[: segment.count])
            if o is not None:
                heads = outputs_of(rows, made, states, written)
                if given.skip is not None:
                    heads += _by_head(given.skip, given.sizes) * rows.v
                scatter(heads.permute(0, 3, 4, 1, 2, 5).flatten(1, 2).flatten(2), segment, o)
        if given.ends.left is not None:
            given.ends.left.copy_(state.flatten(0, 2))


def backward(
    given: Operands, grad_o: Tensor, grad_ends: Ends, grad_qkv: Tensor, grad_gates: tuple[Tensor, ...]
) -> None:
    """Gradients of qkv, of log decay and strength, and of the state before; that of the state after is read.

    grad_gates: those two, and if there is `skip` what every token adds to its gradient, all [T, N].
    """
    with products_of(given.qkv):
        for segments in batches(given.seq_lens):
            _batch_backward(given, segments, grad_o, grad_ends, grad_qkv, grad_gates)


def workspace_bytes(tokens: int, width: int, sizes: Sizes) -> int:
    """Bytes that forward or backward allocates. width: bytes of an element of the wide dtype."""
    _, n, k, v = sizes
    most = min(SEGMENT_TILES, 2 * -(-tokens // TILE) + SIDE_BY_SIDE)  # short sequences are filled up with zeros
    tiles = most * n * (TILE * (14 * k + 7 * v + 12 * TILE) + 3 * k * v)  # of a segment's backward
    starts = (tokens // (2 * TILE) + 2) * n * k * v
    return width * (tiles + starts + 8 * tokens * n)


# -- rows of a segment -------------------------------------------------------------------------------------------------


def _heads(qkv: Tensor, given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """View [B, M * TILE, all] as q and k [B, G, 1, M, TILE, K], not yet normalised, and v [B, G, r, M, TILE, V]."""
    g, n, k, v = given.sizes
    widths = (g * k, g * k, n * v)
    tiles, values_first = qkv.unflatten(1, (-1, TILE)), given.skip is not None
    parts = tiles.split(widths[::-1], dim=-1)[::-1] if values_first else tiles.split(widths, dim=-1)
    q, key = (part.unflatten(-1, (g, 1, k)).permute(0, 3, 4, 1, 2, 5) for part in parts[:2])
    return q, key, parts[2].unflatten(-1, (g, -1, v)).permute(0, 3, 4, 1, 2, 5)


def _by_head(factors: Tensor, sizes: Sizes) -> Tensor:
    """Factors [N] as those of [B, G, r, M, TILE, V]."""
    return factors.view(sizes.key_heads, -1, 1, 1, 1)


def _rows(given: Operands, segment: Segment) -> tuple[Rows, Tensor | None, Tensor | None]:
    """Rows of a segment, and what queries and keys were multiplied by to get them, if they were."""
    sizes, dtype = given.sizes, given.gates[0].dtype
    q, k, v = _heads(gather(given.qkv, segment, dtype), given)
    gates = (gather(gate, segment, dtype).unflatten(1, (-1, TILE)) for gate in given.gates)
    decay, strength = (gate.unflatten(-1, (sizes.key_heads, -1)).permute(0, 3, 4, 1, 2) for gate in gates)
    if given.skip is not None:
        return Rows(q, k, v, decay, strength), None, None
    by_q, by_k = (torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    return Rows(q * (by_q * sizes.key_dim**-0.5), k * by_k, v, decay, strength), by_q, by_k


def _start(given: Operands, count: int) -> Tensor:
    """States [B, G, r, K, V] before the first token: zeros, or what the chunk before left."""
    g, n, k, v = given.sizes
    if given.ends.before is not None:
        return given.ends.before.view(count, g, -1, k, v)
    return given.gates[0].new_zeros(count * n, k, v).view(count, g, -1, k, v)


# -- backward ----------------------------------------------------------------------------------------------------------


def _batch_backward(
    given: Operands, segments: Sequence[Segment], grad_o: Tensor, grad_ends: Ends, grad_qkv: Tensor,
    grad_gates: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """States before every segment, then the segments in reverse."""
    starts = [_start(given, segments[0].count)]
    for segment, following in pairwise(segments):
        rows, *_ = _rows(given, segment)
        made = prepare(rows, given.skip is None, given.between)
        starts.append(states_of(rows, made, starts[-1])[2][: following.count])
        del rows, made
    grad_state = torch.zeros_like(starts[-1]) if grad_ends.left is None else grad_ends.left.view_as(starts[-1])
    for segment in reversed(segments):
        start = starts.pop()
        if len(grad_state) < len(start):
            grad_state = torch.cat((grad_state, torch.zeros_like(start[len(grad_state) :])))
        grad_state = _segment_backward(given, segment, start, grad_state, grad_o, grad_qkv, grad_gates)
    if grad_ends.before is not None:
        grad_ends.before.copy_(grad_state.flatten(0, 2))


def _segment_backward(
    given: Operands, segment: Segment, start: Tensor, grad_state: Tensor, grad_o: Tensor, grad_qkv: Tensor,
    grad_gates: tuple[Tensor, ...],
) -> Tensor:  # fmt: skip
    """Write the gradients of a segment's rows; returns that of the state before it."""
    rows, by_q, by_k = _rows(given, segment)
    made: Prepared = prepare(rows, given.skip is None, given.between)
    states, written, _ = states_of(rows, made, start)
    grad_heads = gather(grad_o, segment, start.dtype).unflatten(1, (-1, TILE))
    grad_heads = grad_heads.unflatten(-1, (given.sizes.key_heads, -1, given.sizes.value_dim)).permute(0, 3, 4, 1, 2, 5)
    found, grad_state = backward_of(rows, made, states, written, grad_heads, grad_state)
    del made, states, written
    grad_rows = start.new_empty(segment.count, segment.tiles * TILE, given.qkv.shape[1])
    scaled = (rows.q, by_q, found.q, given.sizes.key_dim**-0.5), (rows.k, by_k, found.k, 1.0)
    *heads, grad_v = _heads(grad_rows, given)
    for target, parts in zip(heads, scaled, strict=True):
        target.copy_(_norm_backward(*parts))
    grad_v.copy_(found.v)
    gates = [found.decay, found.strength]
    if given.skip is not None:
        grad_v += _by_head(given.skip, given.sizes) * grad_heads
        gates.append((grad_heads * rows.v).sum(-1))
    scatter(grad_rows, segment, grad_qkv)
    for grad, own in zip(grad_gates, gates, strict=True):
        scatter(own.permute(0, 3, 4, 1, 2).flatten(1, 2).flatten(2), segment, grad)
    return grad_state


def _norm_backward(scaled: Tensor, factor: Tensor | None, grad: Tensor, scale: float) -> Tensor:
    """Gradient of x, given that of scaled = scale * factor * x for every value head; factor = 1 / sqrt(|x|^2 + eps).

    Without factor, x is what it was.
    """
    if factor is None:
        return grad.sum(2, keepdim=True)
    unit, grad = scaled / scale, grad.sum(2, keepdim=True) * scale
    return factor * (grad - unit * (unit * grad).sum(-1, keepdim=True))
