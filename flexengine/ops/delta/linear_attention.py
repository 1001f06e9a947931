"""What ops have in common that keep a state per head along a sequence, which decays and is written to by every token.

Along a sequence that is cut into chunks goes the state [N, K, V] in float32: every chunk starts from what the one
before left in the window, and leaves its own there. Nothing of it is kept from forward to backward: `fill_window` runs
the states once more, first chunk to last, and then backward, which goes the other way, finds each chunk's start in the
window, also where it recomputes forward; it reads the gradient of the state that the chunk left, and leaves that of the
state it started from.
"""

from __future__ import annotations

from abc import abstractmethod
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from flexengine.ops.base import FLOAT64_BYTES, Carried, Op, OpEnv, TensorSpec, Work, wide
from flexengine.ops.columns import Columns
from flexengine.ops.delta import plain as delta_plain
from flexengine.ops.delta.tiles import Ends, Operands, Sizes
from flexengine.ops.products import use_product_kernel

KERNEL_WIDTH = 256
"""Widest heads that kernels hold in registers."""


class LinearAttention(Op):
    """o = the rule of (qkv, gates). Backward recomputes the states; it leaves the gradients of parameters as sums."""

    def __init__(
        self, name: str, qkv: str, gates: str, y: str, sizes: tuple[int, int, int, int], columns: tuple[Columns, ...],
        params: tuple[str, ...],
    ) -> None:  # fmt: skip
        """sizes: key heads G, value heads N, and the widths K and V. columns: of `gates` that decide them."""
        self.name, self.qkv, self.gates, self.y, self.columns, self.params = name, qkv, gates, y, columns, params
        self.sizes = Sizes(*sizes)
        self.inputs = self.needs_input = self.grad_inputs = (qkv, gates)
        _, n, k, v = self.sizes
        self.outputs = (TensorSpec(y, (n * v,)),)
        self.stores: Literal["float32", "bfloat16"] = "float32"  # between kernels
        self.state = f"{name}_state"
        self.carried = (Carried(self.state, (n, k, v), "float32", True),)
        self.param_grads = TensorSpec(f"{name}_param_grads", (n,), "float32", rows=len(params))

    # -- what rules differ in ------------------------------------------------------------------------------------------

    @abstractmethod
    def _gates(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """Log decay and strength [T, N]."""

    @abstractmethod
    def _gate_grads(self, env: OpEnv, *grads: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Gradients [T, N] of the columns of gates, and what every token adds to those of the parameters."""

    @abstractmethod
    def _kernels(self) -> ModuleType:
        """The kernels' path; Triton is imported when it is first used."""

    def _skip(self, env: OpEnv) -> Tensor | None:
        """Factors [N] of values in the output, of a rule without correction."""
        return None

    # -- the halves ----------------------------------------------------------------------------------------------------

    def _served(self, compute_bytes: int) -> bool:
        """Whether kernels take this type and width on CUDA."""
        return compute_bytes < FLOAT64_BYTES and max(self.sizes[2:]) <= KERNEL_WIDTH

    def _path(self, env: OpEnv) -> ModuleType:
        """The kernels, or the plain path."""
        qkv = env.t[self.qkv]
        return self._kernels() if use_product_kernel(qkv) and self._served(qkv.element_size()) else delta_plain

    @property
    def _between(self) -> torch.dtype:
        return getattr(torch, self.stores)

    def _raw(self, env: OpEnv) -> tuple[Tensor, ...]:
        """The columns of gates [T, N], wide."""
        return tuple(wide(columns.of(env.t[self.gates]).flatten(1)) for columns in self.columns)

    def _ends(self, env: OpEnv, grad: bool = False) -> Ends:
        window = env.chunk.window
        return Ends() if window is None else Ends(window.before(self.state, grad), window.left(self.state, grad))

    def _operands(self, env: OpEnv) -> Operands:
        chunk, skip = env.chunk, self._skip(env)
        return Operands(
            env.t[self.qkv], self._gates(env), chunk.cu_seqlens, chunk.seq_lens, self.sizes, self._ends(env), skip,
            self._between,
        )  # fmt: skip

    def forward(self, env: OpEnv) -> None:
        self._path(env).forward(self._operands(env), env.t[self.y])

    def fill_window(self, env: OpEnv) -> None:
        self._path(env).fill_window(self._operands(env))

    def backward_input(self, env: OpEnv) -> None:
        assert self.qkv not in env.accumulate, "nothing else reads queries, keys and values"
        given = self._operands(env)
        grads = tuple(torch.empty_like(given.gates[0]) for _ in range(2 if given.skip is None else 3))
        self._path(env).backward(given, env.g[self.y], self._ends(env, grad=True), env.g[self.qkv], grads)
        of_gates, of_params = self._gate_grads(env, *grads)
        for columns, grad in zip(self.columns, of_gates, strict=True):
            columns.of(env.g[self.gates]).copy_(grad.unflatten(1, (columns.groups, columns.width)))
        for row, grad in zip(env.t[self.param_grads.name], of_params, strict=True):
            torch.sum(grad, 0, out=row)

    def backward_weight(self, env: OpEnv) -> None:
        for name, total in zip(self.params, env.t[self.param_grads.name], strict=True):
            env.gp[name].copy_(total) if env.first else env.gp[name].add_(total)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return () if half == "forward" else (self.param_grads,)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(kernels=len(self.params))
