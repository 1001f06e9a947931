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

from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flexengine.ops.base import FLOAT64_BYTES, Carried, Op, OpEnv, TensorSpec, Work, use_kernel, wide
from flexengine.ops.columns import Columns
from flexengine.ops.delta import plain as delta_plain
from flexengine.ops.delta.segments import TILE_HEADS, most_tile_heads
from flexengine.ops.delta.tiles import TILE, Ends, Operands, Sizes

KERNEL_WIDTH = 256
"""Widest heads that kernels hold in registers."""


class DeltaRule(Op):
    """o = delta rule of (qkv, gates). Backward recomputes the states."""

    def __init__(
        self, name: str, qkv: str, gates: str, y: str, sizes: tuple[int, int, int, int], strength: Columns,
        decay: Columns, params: tuple[str, str] = ("A_log", "dt_bias"),
    ) -> None:  # fmt: skip
        """sizes: key heads G, value heads N, and the widths K and V. strength, decay: columns of b and a in `gates`."""
        self.name, self.qkv, self.gates, self.y, self.params = name, qkv, gates, y, params
        self.sizes = Sizes(*sizes)
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

    # -- the halves ----------------------------------------------------------------------------------------------------

    def _served(self, compute_bytes: int) -> bool:
        """Whether kernels take this type and width on CUDA."""
        return compute_bytes < FLOAT64_BYTES and max(self.sizes[2:]) <= KERNEL_WIDTH

    def _path(self, env: OpEnv) -> ModuleType:
        """The kernels, or the plain path."""
        qkv = env.t[self.qkv]
        if not use_kernel(qkv) or not self._served(qkv.element_size()):
            return delta_plain
        from flexengine.ops.delta import kernels as delta_kernels  # noqa: PLC0415 (Triton is imported when first used)

        return delta_kernels

    def _ends(self, env: OpEnv, grad: bool = False) -> Ends:
        window = env.chunk.window
        return Ends() if window is None else Ends(window.before(self.state, grad), window.left(self.state, grad))

    def _operands(self, env: OpEnv) -> Operands:
        chunk = env.chunk
        return Operands(
            env.t[self.qkv], self._gates(env), chunk.cu_seqlens, chunk.seq_lens, self.sizes, self._ends(env)
        )

    def forward(self, env: OpEnv) -> None:
        self._path(env).forward(self._operands(env), env.t[self.y])

    def fill_window(self, env: OpEnv) -> None:
        self._path(env).fill_window(self._operands(env))

    def backward_input(self, env: OpEnv) -> None:
        assert self.qkv not in env.accumulate, "nothing else reads queries, keys and values"
        given = self._operands(env)
        grads = torch.empty_like(given.gates[0]), torch.empty_like(given.gates[1])
        self._path(env).backward(given, env.g[self.y], self._ends(env, grad=True), env.g[self.qkv], grads)
        self._gate_grads(env, *grads)

    def backward_weight(self, env: OpEnv) -> None:
        for name, total in zip(self.params, env.t[self.param_grads.name], strict=True):
            env.gp[name].copy_(total) if env.first else env.gp[name].add_(total)

    # -- costs ---------------------------------------------------------------------------------------------------------

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return () if half == "forward" else (self.param_grads,)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if not self._served(compute_bytes):
            return delta_plain.workspace_bytes(tokens, max(4, compute_bytes), self.sizes)
        _, n, k, v = self.sizes
        later = TILE * (TILE + 2 * (2 + k // 32) - (-2 * k // self.sizes.ratio))  # when W is not needed any more
        of_tile = TILE * (4 + TILE + 2 * v) + 2 * k * v + max(TILE * k, later)
        return 4 * (most_tile_heads(tokens, self.sizes) * of_tile + 8 * tokens * n)

    def _work(self, tokens: int, products: int, passes: int, kernels: int, once: int) -> Work:
        """products: of a tile with a state; as many of a tile with a tile, which are half as large at usual widths.
        passes: over a row of all value heads, as many as would take the time of the kernels on an H200; kernels: for a
        group of heads, beside those that run once."""
        _, n, k, v = self.sizes
        flops = 2.0 * tokens * n * products * (k * v + TILE * (k + v) / 2)
        groups = -(-tokens * n // (TILE * TILE_HEADS))
        return Work(flops, memory_bytes=4.0 * passes * tokens * n * (k + v) / 2, kernels=groups * kernels + once)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=3, passes=33, kernels=3, once=20)

    def fill_window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=2, passes=19, kernels=2, once=20)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=12, passes=85, kernels=8, once=50)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(kernels=2)
