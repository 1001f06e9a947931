"""Linear layers with FP8 products and low-rank adapters: the frozen product takes FP8 operands, the adapters' do not.

y = fp8(x @ weight.T) (+ bias or residual) + scale * (x @ A.T) @ B.T, and likewise for the gradient of x. Shapes as in
ops/adapters/lora.py, rounding of operands as in ops/fp8.py. FP8 products cannot add to what a tensor holds, so the
adapters' product comes second and y is rounded once more than without FP8.
"""

from __future__ import annotations

import torch

from flexengine.ops.adapters.lora import AdaptedRows, LoRALinear
from flexengine.ops.base import OpEnv, TensorSpec, Work
from flexengine.ops.fp8 import Fp8Linear


class Fp8LoRALinear(LoRALinear):
    """A frozen linear layer with FP8 operands, and adapters in the compute dtype."""

    def __init__(
        self, base: Fp8Linear, rank: int, scale: float, adapted: tuple[AdaptedRows, ...], dropout: float = 0.0,
        number: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(base, rank, scale, adapted, dropout, number)
        self.base = base.untrained()

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        own = super().scratch(half)
        return own if half == "weight" else (*own, *self.base.scratch(half))

    def forward(self, env: OpEnv) -> None:
        self.base.forward(env)
        self._write_low(env)
        if self.leaves_sum:
            return
        for rows, low, up in self._modules(env.t[self.low.name], env.p[self.up]):
            out = env.t[self.y][:, rows.start : rows.end]
            torch.addmm(out, low, up.t(), out=out)

    def backward_input(self, env: OpEnv) -> None:
        self.base.backward_input(env)
        grad_x, grad_low = env.g[self.x], self._write_grad_low(env)
        if self.takes_low:
            return
        if not self.dropout:
            torch.addmm(grad_x, grad_low, env.p[self.down], out=grad_x)
            return
        through = env.t[self.dropped.name]
        torch.mm(grad_low, env.p[self.down], out=through)
        self._drop(through, env)
        grad_x.add_(through)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return self.base.workspace_bytes(tokens, compute_bytes)

    def _frozen_work(self, half: str, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self.base.forward_work if half == "forward" else self.base.backward_input_work
        return work(tokens, seq_len, compute_bytes)
