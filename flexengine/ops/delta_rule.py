"""Gated delta rule: linear attention with a state that decays and is corrected, over packed and cut sequences.

Source: Yang et al. 2024, "Gated Delta Networks". Per value head, with keys of length one (x / sqrt(|x|^2 + 1e-6)):
S_t = exp(g_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, o_t = S_t^T q_t / sqrt(K), where b = sigmoid(b_raw) and
g = -exp(A_log) * softplus(a_raw + dt_bias). All in float32 (float64), products of what came in bf16 in TF32; how tiles
are computed: `delta_tiles`.

Shapes: qkv [T, 2 G K + N V]: queries and keys of G heads of width K, values of N heads of width V, N a multiple of G;
the gates' b and a [T, N] are columns of another tensor; o [T, N * V]; A_log and dt_bias [N].

Along a sequence that is cut into chunks goes the state [N, K, V] in float32: every chunk starts from what the one
before left in the window, and leaves its own there. Nothing of it is kept from forward to backward: `fill_window` runs
the states once more, first chunk to last, and then backward, which goes the other way, finds each chunk's start in the
window, also where it recomputes forward; it reads the gradient of the state that the chunk left, and leaves that of the
state it started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flexengine.ops.base import FLOAT64_BYTES, Carried, Op, OpEnv, TensorSpec, Work, use_kernel, wide
from flexengine.ops.columns import Columns
from flexengine.ops.delta_segments import SEGMENT_TILES, SIDE_BY_SIDE, Segment, batches, gather, scatter
from flexengine.ops.delta_tiles import TILE, Prepared, Rows, backward, outputs_of, prepare, products_of, states_of

NORM_EPS = 1e-6
KERNEL_WIDTH = 256
"""Widest heads that kernels hold in registers."""


def _kernels() -> ModuleType:
    from flexengine.ops import delta_kernels  # noqa: PLC0415 (Triton is imported when first used)

    return delta_kernels


class DeltaRule(Op):
    """o = delta rule of (qkv, gates). Backward finds the states again."""

    def __init__(
        self, name: str, qkv: str, gates: str, y: str, sizes: tuple[int, int, int, int], strength: Columns,
        decay: Columns, params: tuple[str, str] = ("A_log", "dt_bias"),
    ) -> None:  # fmt: skip
        """sizes: key heads G, value heads N, and the widths K and V. strength, decay: columns of b and a in `gates`."""
        self.name, self.qkv, self.gates, self.y, self.params = name, qkv, gates, y, params
        self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim = sizes
        self.columns = (strength, decay)
        self.inputs = self.needs_input = self.grad_inputs = (qkv, gates)
        self.outputs = (TensorSpec(y, (self.num_value_heads * self.value_dim,)),)
        self.state = f"{name}_state"
        self.carried = (Carried(self.state, (self.num_value_heads, self.key_dim, self.value_dim), "float32", True),)
        self.param_grads = TensorSpec(f"{name}_param_grads", (self.num_value_heads,), "float32", rows=2)

    # -- gates ---------------------------------------------------------------------------------------------------------

    def _raw_gates(self, env: OpEnv) -> tuple[Tensor, Tensor, Tensor]:
        """b, a + dt_bias [T, N] and exp(A_log) [N], wide."""
        a_log, dt_bias = (wide(env.p[name]) for name in self.params)
        strength, decay = (wide(columns.of(env.t[self.gates]).flatten(1)) for columns in self.columns)
        return strength, decay + dt_bias, a_log.exp()

    def _gates(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """Log decay and strength [T, N]."""
        strength, decay, rate = self._raw_gates(env)
        return -rate * softplus(decay), torch.sigmoid(strength)

    def _gate_grads(self, env: OpEnv, grad_decay: Tensor, grad_strength: Tensor) -> None:
        """Gradients of b and a, and sums for those of the parameters."""
        strength, decay, rate = self._raw_gates(env)
        strength = torch.sigmoid(strength)
        grad_b, grad_a = grad_strength * strength * (1 - strength), -grad_decay * rate * torch.sigmoid(decay)
        for columns, grad in zip(self.columns, (grad_b, grad_a), strict=True):
            columns.of(env.g[self.gates]).copy_(grad.unflatten(1, (columns.groups, columns.width)))
        sums = env.t[self.param_grads.name]
        sums[0] = (grad_decay * -rate * softplus(decay)).sum(0)
        sums[1] = grad_a.sum(0)

    # -- rows of a segment ---------------------------------------------------------------------------------------------

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, M * TILE, all] -> q and k [B, G, 1, M, TILE, K] as they came, v [B, G, r, M, TILE, V]; views."""
        g, k = self.num_key_heads, self.key_dim
        tiles = qkv.unflatten(1, (-1, TILE))
        parts = tiles.split((g * k, g * k, self.num_value_heads * self.value_dim), dim=-1)
        q, key = (part.unflatten(-1, (g, 1, k)).permute(0, 3, 4, 1, 2, 5) for part in parts[:2])
        return q, key, parts[2].unflatten(-1, (g, -1, self.value_dim)).permute(0, 3, 4, 1, 2, 5)

    def _gate_heads(self, gates: Tensor) -> Tensor:
        """[B, M * TILE, N] -> [B, G, r, M, TILE], a view."""
        return gates.unflatten(1, (-1, TILE)).unflatten(-1, (self.num_key_heads, -1)).permute(0, 3, 4, 1, 2)

    def _rows(self, env: OpEnv, segment: Segment, gates: tuple[Tensor, Tensor]) -> tuple[Rows, Tensor, Tensor]:
        """Rows of a segment, and what queries and keys were multiplied by to get them."""
        q, k, v = self._heads(gather(env.t[self.qkv], segment, gates[0].dtype))
        decay, strength = (self._gate_heads(gather(gate, segment, gate.dtype)) for gate in gates)
        by_q, by_k = (torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
        return Rows(q * (by_q * self.key_dim**-0.5), k * by_k, v, decay, strength), by_q, by_k

    def _start(self, env: OpEnv, count: int, dtype: torch.dtype) -> Tensor:
        """States [B, G, r, K, V] before the first token: zeros, or what the chunk before left."""
        window, device = env.chunk.window, env.t[self.qkv].device
        shape = (count, self.num_key_heads, -1, self.key_dim, self.value_dim)
        before = None if window is None else window.before(self.state)
        if before is not None:
            return before.view(shape)
        return torch.zeros(count * self.num_value_heads, *shape[3:], dtype=dtype, device=device).view(shape)

    # -- the halves ----------------------------------------------------------------------------------------------------

    def _served(self, compute_bytes: int) -> bool:
        """Whether kernels take this type and width on CUDA."""
        return compute_bytes < FLOAT64_BYTES and max(self.key_dim, self.value_dim) <= KERNEL_WIDTH

    def _operands(self, env: OpEnv) -> tuple:
        """What the kernels start from; empty where the plain path runs."""
        qkv, window = env.t[self.qkv], env.chunk.window
        if not use_kernel(qkv) or not self._served(qkv.element_size()):
            return ()
        sizes = (self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)
        ends = (None, None) if window is None else (window.before(self.state), window.left(self.state))
        chunk = (env.chunk.cu_seqlens, env.chunk.seq_lens)
        return qkv, self._gates(env), chunk, sizes, _kernels().Ends(*ends)

    def forward(self, env: OpEnv) -> None:
        if operands := self._operands(env):
            return _kernels().forward(*operands, env.t[self.y])
        self._run(env, env.t[self.y])

    def fill_window(self, env: OpEnv) -> None:
        if operands := self._operands(env):
            return _kernels().fill_window(*operands)
        self._run(env, None)

    def _run(self, env: OpEnv, y: Tensor | None) -> None:
        """States through all sequences, and what is read from them where that is wanted."""
        with products_of(env.t[self.qkv]):
            self._run_batches(env, y)

    def _run_batches(self, env: OpEnv, y: Tensor | None) -> None:
        gates = self._gates(env)
        for segments in batches(env.chunk.seq_lens):
            state = self._start(env, segments[0].count, gates[0].dtype)
            for segment in segments:
                rows, *_ = self._rows(env, segment, gates)
                made = prepare(rows)
                states, written, state = states_of(rows, made, state[: segment.count])
                if y is not None:
                    o = outputs_of(rows, made, states, written)
                    scatter(o.permute(0, 3, 4, 1, 2, 5).flatten(1, 2).flatten(2), segment, y)
            if env.chunk.window is not None:
                env.chunk.window.left(self.state).copy_(state.flatten(0, 2))

    def backward_input(self, env: OpEnv) -> None:
        assert self.qkv not in env.accumulate, "nothing else reads queries, keys and values"
        if operands := self._operands(env):
            grads = self._kernel_backward(env, operands)
        else:
            grads = self._plain_backward(env)
        self._gate_grads(env, *grads)

    def _kernel_backward(self, env: OpEnv, operands: tuple) -> tuple[Tensor, Tensor]:
        """Gradients of log decay and strength; the others are written."""
        decay, window = operands[1][0], env.chunk.window
        grads = torch.empty_like(decay), torch.empty_like(decay)
        ends = (None, None) if window is None else (window.before(self.state, True), window.left(self.state, True))
        _kernels().backward(*operands, env.g[self.y], _kernels().Ends(*ends), env.g[self.qkv], grads)
        return grads

    def _plain_backward(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        gates = self._gates(env)
        grads = torch.empty_like(gates[0]), torch.empty_like(gates[0])
        with products_of(env.t[self.qkv]):
            for segments in batches(env.chunk.seq_lens):
                self._batch_backward(env, segments, gates, grads)
        return grads

    def _batch_backward(
        self, env: OpEnv, segments: Sequence[Segment], gates: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor]
    ) -> None:
        """States before every segment, then the segments in reverse."""
        window, starts = env.chunk.window, [self._start(env, segments[0].count, gates[0].dtype)]
        for segment, following in pairwise(segments):
            rows, *_ = self._rows(env, segment, gates)
            starts.append(states_of(rows, prepare(rows), starts[-1])[2][: following.count])
            del rows
        grad_state = torch.zeros_like(starts[-1])
        if window is not None:
            grad_state = window.left(self.state, grad=True).view_as(grad_state)
        for segment in reversed(segments):
            start = starts.pop()
            if len(grad_state) < len(start):
                grad_state = torch.cat((grad_state, torch.zeros_like(start[len(grad_state) :])))
            grad_state = self._segment_backward(env, segment, gates, grads, start, grad_state)
        before = None if window is None else window.before(self.state, grad=True)
        if before is not None:
            before.copy_(grad_state.flatten(0, 2))

    def _segment_backward(
        self, env: OpEnv, segment: Segment, gates: tuple[Tensor, Tensor], grads: tuple[Tensor, Tensor], start: Tensor,
        grad_state: Tensor,
    ) -> Tensor:  # fmt: skip
        """Gradients of a segment's rows, written; that of the state before it."""
        rows, by_q, by_k = self._rows(env, segment, gates)
        made: Prepared = prepare(rows)
        states, written, _ = states_of(rows, made, start)
        grad_o = gather(env.g[self.y], segment, start.dtype).unflatten(1, (-1, TILE))
        grad_o = grad_o.unflatten(-1, (self.num_key_heads, -1, self.value_dim)).permute(0, 3, 4, 1, 2, 5)
        found, grad_state = backward(rows, made, states, written, grad_o, grad_state)
        del made, states, written
        grad_qkv = start.new_empty(segment.count, segment.tiles * TILE, env.t[self.qkv].shape[1])
        scaled = (rows.q, by_q, found.q, self.key_dim**-0.5), (rows.k, by_k, found.k, 1.0)
        *heads, grad_v = self._heads(grad_qkv)
        for target, parts in zip(heads, scaled, strict=True):
            target.copy_(_norm_backward(*parts))
        grad_v.copy_(found.v)
        scatter(grad_qkv, segment, env.g[self.qkv])
        for grad, given in zip(grads, (found.decay, found.strength), strict=True):
            scatter(given.permute(0, 3, 4, 1, 2).flatten(1, 2).flatten(2), segment, grad)
        return grad_state

    def backward_weight(self, env: OpEnv) -> None:
        for name, total in zip(self.params, env.t[self.param_grads.name], strict=True):
            env.gp[name].copy_(total) if env.first else env.gp[name].add_(total)

    # -- costs ---------------------------------------------------------------------------------------------------------

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return () if half == "forward" else (self.param_grads,)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        width = FLOAT64_BYTES if compute_bytes == FLOAT64_BYTES else 4
        n, k, v = self.num_value_heads, self.key_dim, self.value_dim
        most = min(SEGMENT_TILES, 2 * -(-tokens // TILE) + SIDE_BY_SIDE)  # short sequences are filled up with zeros
        tiles = most * n * (TILE * (14 * k + 7 * v + 12 * TILE) + 3 * k * v)  # of a segment's backward
        starts = (tokens // (2 * TILE) + 2) * n * k * v
        return width * (tiles + starts + 8 * tokens * n)

    def _work(self, tokens: int, products: int, passes: int, kernels: int) -> Work:
        """products: of a tile with a state; as many of a tile with a tile, which are half as large at usual widths."""
        n, k, v = self.num_value_heads, self.key_dim, self.value_dim
        flops = 2.0 * tokens * n * products * (k * v + TILE * (k + v) / 2)
        segments = -(-tokens // (SEGMENT_TILES * TILE))
        return Work(flops, memory_bytes=4.0 * passes * tokens * n * (k + v) / 2, kernels=segments * kernels)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=3, passes=110, kernels=140)

    def fill_window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=2, passes=90, kernels=130)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=12, passes=280, kernels=500)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(kernels=2)


def _norm_backward(scaled: Tensor, factor: Tensor, grad: Tensor, scale: float) -> Tensor:
    """Gradient of x, given that of scaled = scale * factor * x for every value head; factor = 1 / sqrt(|x|^2 + eps)."""
    unit, grad = scaled / scale, grad.sum(2, keepdim=True) * scale
    return factor * (grad - unit * (unit * grad).sum(-1, keepdim=True))
