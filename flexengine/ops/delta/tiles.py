"""The gated delta rule over tiles of TILE tokens: products inside all tiles at once, states from tile to tile.

Source: Yang et al. 2024, "Gated Delta Networks"; the tiled form: Yang et al. 2024, "Parallelizing Linear Transformers
with the Delta Rule". With c_i the sum of log decays g up to token i of a tile (c of all its tokens: c_C), d_ij =
exp(c_i - c_j) for j <= i, a state S [K, V] before the tile, rows q (scaled), k, v and strengths b:

    A_ij = b_i (k_i . k_j) d_ij for j < i        U = (I + A)^-1 (b v)      W = (I + A)^-1 (b exp(c) k)
    P_ij = (q_i . k_j) d_ij for j <= i           R = U - W S               (what is written into the state)
    o = (q exp(c)) S + P R                       S' = exp(c_C) S + (k exp(c_C - c))^T R

Without correction, as in Dao & Gu 2024, "Transformers are SSMs", A and W are zero, so R = U = b v, and o gets skip * v.

Where `between` is bfloat16, U, W, the inverse, R, states and their gradients are rounded to it, as are the gradients
that follow from them, each where kernels store it; sums stay wide.

All exponents are <= 0. Shapes: B sequences, G key heads, r value heads of each, M tiles, C tokens of a tile, K and V
head widths: q, k [B, G, 1, M, C, K], v [B, G, r, M, C, V], log decay and strength [B, G, r, M, C], states
[B, G, r, K, V]; all of one wide dtype. Tokens beyond a sequence's end are zeros, which change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 64


class Sizes(NamedTuple):
    """Key heads G, value heads N, and the widths K and V."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads


class Ends(NamedTuple):
    """States [N, K, V] before a chunk's only sequence and after it, or their gradients; None where there are none."""

    before: Tensor | None = None
    left: Tensor | None = None


class Operands(NamedTuple):
    """What kernels and the plain path start from: qkv [T, 2 G K + N V] as it came, log decay and strength [T, N], the
    chunk's sequences, and the states at their ends. between: dtype of what is stored between the parts of the rule.

    skip [N]: factors of values in the output, of the rule without correction. It takes queries and keys as they are;
    in a row of qkv come values, keys and queries, in this order.
    """

    qkv: Tensor
    gates: tuple[Tensor, Tensor]
    cu_seqlens: Tensor
    seq_lens: Sequence[int]
    sizes: Sizes
    ends: Ends
    skip: Tensor | None = None
    between: torch.dtype = torch.float32


class Rows(NamedTuple):
    """Queries, keys, values and gates of a segment of tiles, or their gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    strength: Tensor


class Prepared(NamedTuple):
    """What is the same whatever the state: `d`, `a` and `p` [.., C, C] as above, `grown` = exp(c), `rest` =
    exp(c_C - c) and `last` = exp(c_C); `u`; and what only corrections need. between: as that of `Operands`."""

    d: Tensor
    p: Tensor
    grown: Tensor
    rest: Tensor
    last: Tensor
    u: Tensor
    solved: Solved | None
    between: torch.dtype = torch.float32

    def stored(self, x: Tensor) -> Tensor:
        """What is read of x once it was stored."""
        return rounded(x, self.between)


class Solved(NamedTuple):
    """A [.., C, C] and W of a correction as above, and `inverse` = (I + A)^-1."""

    a: Tensor
    w: Tensor
    inverse: Tensor


def rounded(x: Tensor, between: torch.dtype) -> Tensor:
    """x with the precision of `between` where that is bfloat16, in its own dtype."""
    return x.bfloat16().to(x.dtype) if between == torch.bfloat16 else x


@contextmanager
def products_of(x: Tensor, exact: bool = False) -> Iterator[None]:
    """Products within are in TF32 where x came in bf16 to CUDA: 3 bits more than its own. exact: in float32 after all.

    Elsewhere nothing changes. Order: takes effect on what the calling thread issues.
    """
    if not x.is_cuda or (x.dtype != torch.bfloat16 and not exact):
        yield
        return
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "ieee" if exact else "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 for strictly lower triangular [.., C, C], C a power of two.

    Blocks on the diagonal grow twofold until there is one: the lower part of a pair is -second * lower * first. In
    contrast to a product of powers of `lower`, no intermediate value is larger than those of the result's blocks.
    """
    size = lower.shape[-1]
    inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower).contiguous()
    half = 1
    with products_of(lower, exact=True):
        while half < size:
            blocks, given = _diagonal_blocks(inverse, 2 * half), _diagonal_blocks(lower, 2 * half)
            first, second = blocks[..., :half, :half], blocks[..., half:, half:]
            blocks[..., half:, :half] = -(second @ given[..., half:, :half] @ first)
            half *= 2
    return inverse


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """View the diagonal blocks of [.., C, C] as [.., C / size, size, size]."""
    grid = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def prepare(rows: Rows, corrected: bool = True, between: torch.dtype = torch.float32) -> Prepared:
    """Compute all that needs no state."""
    q, k, v, decay, strength = rows
    ones = torch.ones(TILE, TILE, dtype=decay.dtype, device=decay.device)
    total = decay @ ones.triu()  # sums up to each token; torch's own are not deterministic on CUDA
    d = (total[..., :, None] - total[..., None, :]).clamp_(max=0.0).exp_().tril_()
    grown, last, u, solved = total.exp(), total[..., -1:], strength[..., None] * v, None
    if corrected:
        a = ((k @ k.mT) * d).mul_(strength[..., None]).tril_(-1)
        inverse = unit_lower_inverse(a)
        u, w = inverse @ u, inverse @ ((strength * grown)[..., None] * k)
        u, w, inverse = (rounded(x, between) for x in (u, w, inverse))
        solved = Solved(a, w, inverse)
    return Prepared(d, (q @ k.mT) * d, grown, (last - total).exp_(), last.exp()[..., None], u, solved, between)


def states_of(rows: Rows, made: Prepared, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States before every tile [B, G, r, M, K, V], what is written R [B, G, r, M, C, V], and the state after all."""
    tail, written = rows.k * made.rest[..., None], torch.empty_like(made.u) if made.solved else made.u
    states = state.new_empty((*made.u.shape[:4], *state.shape[3:]))
    for i in range(made.u.shape[3]):
        states[:, :, :, i] = kept = made.stored(state)
        if made.solved:
            written[:, :, :, i] = made.stored(made.u[:, :, :, i] - made.solved.w[:, :, :, i] @ kept)
        state = made.last[:, :, :, i] * state + tail[:, :, :, i].mT @ written[:, :, :, i]
    return states, written, state


def outputs_of(rows: Rows, made: Prepared, states: Tensor, written: Tensor) -> Tensor:
    """The output o [B, G, r, M, C, V] of all tiles."""
    return made.grown[..., None] * (rows.q @ states) + made.p @ written


def backward_of(
    rows: Rows, made: Prepared, states: Tensor, written: Tensor, grad_o: Tensor, grad_state: Tensor
) -> tuple[Rows, Tensor]:
    """Gradients of the rows (of q and k for every value head), and of the state before them; grad_state is that of the
    state after them."""
    tail, seen = rows.k * made.rest[..., None], rows.q * made.grown[..., None]
    grad_written, from_o = made.stored(made.p.mT @ grad_o), seen.mT @ grad_o
    grad_last, grad_tail = torch.empty_like(made.last), torch.empty_like(tail)
    for i in reversed(range(made.u.shape[3])):
        at = (slice(None), slice(None), slice(None), i)
        kept = made.stored(grad_state)
        grad_last[at] = (kept * states[at]).sum((-2, -1), keepdim=True)
        grad_tail[at] = written[at] @ kept.mT
        grad_written[at] = made.stored(grad_written[at] + tail[at] @ kept)
        grad_state = from_o[at] + made.last[at] * grad_state
        if made.solved:
            grad_state -= made.solved.w[at].mT @ grad_written[at]
    return _backward_inside(rows, made, states, written, grad_o, grad_written, grad_tail, grad_last), grad_state


def _backward_inside(
    rows: Rows, made: Prepared, states: Tensor, written: Tensor, grad_o: Tensor, grad_written: Tensor,
    grad_tail: Tensor, grad_last: Tensor,
) -> Rows:  # fmt: skip
    """The part of `backward_of` that needs no order. `total` is c above."""
    q, k, v, _, strength = rows
    grad_p, grad_seen = (grad_o @ written.mT).tril_(), grad_o @ states.mT
    grad_qk = made.stored(grad_p * made.d)
    grad_q = grad_seen * made.grown[..., None] + grad_qk @ k
    grad_k = grad_qk.mT @ q + grad_tail * made.rest[..., None]
    pairs, left = grad_p * made.p, (grad_tail * k).sum(-1) * made.rest
    by_total, grad_u, grad_strength = (grad_seen * q).sum(-1), grad_written, 0.0
    if made.solved:
        a, _, inverse = made.solved
        grad_u, solved_w = made.stored(inverse.mT @ grad_written), inverse.mT @ -(grad_written @ states.mT)
        grad_a = -(grad_u @ made.u.mT + solved_w @ made.solved.w.mT).tril_(-1)
        grad_kk, by_key = made.stored(grad_a * made.d * strength[..., None]), (solved_w * k).sum(-1)
        grad_k += (grad_kk + grad_kk.mT) @ k + solved_w * (strength * made.grown)[..., None]
        grad_strength = ((grad_a * made.d) * (k @ k.mT)).sum(-1) + by_key * made.grown
        pairs += grad_a * a
        by_total += by_key * strength
    grad_total = pairs.sum(-1) - pairs.sum(-2) - left + by_total * made.grown
    grad_total[..., -1] += left.sum(-1) + (grad_last * made.last)[..., 0, 0]
    grad_strength += (grad_u * v).sum(-1)
    ones = torch.ones(TILE, TILE, dtype=q.dtype, device=q.device)
    return Rows(grad_q, grad_k, strength[..., None] * grad_u, grad_total @ ones.tril(), grad_strength)
