"""A router that adds what a low-rank adapter makes of x to its logits: x @ weight.T (+ bias) + low @ B.T.

Shapes: x [T, D], weight [E, D], low = scale * x @ A.T [T, R], B [E, R]; the rest as in ops/experts/router.py.
Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.adapters.lora import accumulate_up_grad, write_grad_low
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import OpEnv, TensorSpec, Work, wide
from flexengine.ops.experts.router import Router
from flexengine.ops.linear import widened_bytes


class RouterLoraUp(Router):
    """A frozen router and the second product of its adapter. Both products are added wide."""

    def __init__(self, base: Router, adapters: Adapters) -> None:
        super().__init__(
            base.name, base.x, base.width, base.num_experts, base.per_token, base.param, base.normalised,
            base.bias, base.style,
        )  # fmt: skip
        self.adapters, self.low, self.params = adapters, adapters.low.name, (adapters.up,)
        self.inputs = self.grad_inputs = (self.x, self.low)
        self.needs_input, self.needs_weight = (*self.needs_input, self.low), (self.low,)
        self.added = TensorSpec(f"{self.name}.added", (base.num_experts,))

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return super().scratch(half) if half == "weight" else (*super().scratch(half), self.added)

    def _logits_of(self, env: OpEnv) -> Tensor:
        if not env.adapters:
            return super()._logits_of(env)
        added = torch.mm(env.t[self.low], env.p[self.adapters.up].t(), out=env.t[self.added.name])
        return super()._logits_of(env).add_(wide(added))

    def _write_grad_x(self, env: OpEnv, grad_logits: Tensor) -> None:
        super()._write_grad_x(env, grad_logits)
        write_grad_low(self.adapters, grad_logits, env.p[self.adapters.up], env.g[self.low])

    def backward_weight(self, env: OpEnv) -> None:
        grad_logits, grad_up = env.t[self.grad_logits.name], env.gp[self.adapters.up]
        accumulate_up_grad(self.adapters, grad_logits, env.t[self.low], grad_up, env.first)

    # -- costs -------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return super().workspace_bytes(tokens, compute_bytes) + tokens * self.num_experts * max(4, compute_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        widened = widened_bytes(tokens, self.num_experts, self.adapters.rank, compute_bytes)
        return max(super().plain_workspace_bytes(tokens, compute_bytes), widened)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().forward_work(tokens, seq_len, compute_bytes)
        return work.plus(self.adapters.up_work(tokens, 2, compute_bytes))._replace(kernels=work.kernels + 2)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """The logits again, and the gradient of low."""
        work, up = super().backward_input_work(tokens, seq_len, compute_bytes), self.adapters
        return work.plus(up.up_work(tokens, 2, compute_bytes)).plus(up.up_work(tokens, 1, compute_bytes))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.adapters.up_work(tokens, 1, compute_bytes)

    def model_flops(self, seq_len: int) -> float:
        """The frozen product forward and for the gradient of x, that of B once more for its own gradient."""
        return 2 * self._logits(seq_len) + 3 * self.adapters.up_work(seq_len, 1, 2).flops
