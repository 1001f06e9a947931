"""Token embedding: x [T, D] = weight [V, D][input_ids]; its gradient adds rows of grad_x at the tokens' indices."""

from __future__ import annotations

import torch

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work


class Embedding(Op):
    """Gather rows. Backward has a weight half only; duplicates are summed in token order when `deterministic` is on."""

    def __init__(self, name: str, y: str, vocab_size: int, width: int, weight: str) -> None:
        self.name, self.y, self.weight, self.vocab_size, self.width = name, y, weight, vocab_size, width
        self.inputs = ()
        self.outputs = (TensorSpec(y, (width,)),)
        self.params = (weight,)

    def forward(self, env: OpEnv) -> None:
        torch.index_select(env.p[self.weight], 0, env.chunk.input_ids, out=env.t[self.y])

    def backward_weight(self, env: OpEnv) -> None:
        acc, grad = env.gp[self.weight], env.g[self.y]
        if env.first:
            acc.zero_()
        acc.index_add_(0, env.chunk.input_ids, grad.to(acc.dtype))

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=4.0 * self.vocab_size * self.width + 16.0 * tokens * self.width, kernels=3)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        # float32 copy of the gradient and, in deterministic mode, the sorted copy with its indices
        return 2 * tokens * self.width * max(4, compute_bytes) + 64 * tokens
