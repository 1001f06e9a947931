"""Token embedding: x [T, D] = scale * weight [V, D][input_ids]; its gradient adds rows of grad_x at those indices."""

from __future__ import annotations

import torch

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work


class Embedding(Op):
    """Gather rows. Backward has a weight half only; duplicates are summed in token order when `deterministic` is on."""

    def __init__(self, name: str, y: str, vocab_size: int, width: int, weight: str, scale: float = 1.0) -> None:
        self.name, self.y, self.weight, self.vocab_size, self.width = name, y, weight, vocab_size, width
        self.scale = scale
        self.inputs = ()
        self.outputs = (TensorSpec(y, (width,)),)
        self.params = (weight,)

    def forward(self, env: OpEnv) -> None:
        y = env.t[self.y]
        torch.index_select(env.p[self.weight], 0, env.chunk.input_ids, out=y)
        if self.scale != 1.0:
            y.mul_(self._scale_in(y.dtype))

    def _scale_in(self, dtype: torch.dtype) -> float:
        """The scale as a number of the dtype that is computed in: rounded as in the trained model."""
        return torch.tensor(self.scale, dtype=dtype).item()

    def backward_weight(self, env: OpEnv) -> None:
        acc, ids, grad = env.gp[self.weight], env.chunk.input_ids, env.g[self.y]
        if env.first:
            acc.zero_()
        rows = grad.to(acc.dtype)
        acc.index_add_(0, ids, rows if self.scale == 1.0 else rows * self._scale_in(grad.dtype))

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        passes = 1 if self.scale == 1.0 else 2
        return Work(memory_bytes=2.0 * passes * tokens * self.width * compute_bytes, kernels=passes)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=4.0 * self.vocab_size * self.width + 16.0 * tokens * self.width, kernels=3)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if not self.trained:
            return 0
        # float32 copy of the gradient (scaled: one more) and, in deterministic mode, the sorted copy with its indices
        return (2 + (self.scale != 1.0)) * tokens * self.width * max(4, compute_bytes) + 64 * tokens
