"""LM head and cross-entropy, block by block over the tokens, so that the full logits never exist.

For a block of B tokens: logits [B, V] = h @ weight.T; loss = log-sum-exp(logits) - logits[label] in float32; the
gradient softmax(logits) - onehot overwrites the logits; grad_h = it @ weight and grad_weight += it.T @ h. Gradients
are those of the SUM of losses over tokens; the division by the step's active tokens happens once, in the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flexengine.ops.base import ChunkContext, Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel
from flexengine.ops.custom_loss import IGNORE_INDEX, custom_loss_
from flexengine.ops.linear import accumulate_weight_grad, widened_bytes
from flexengine.ops.linear_shape import HeadShape

LOGITS_BLOCK_BYTES = 256 * 2**20
"""Bytes of bf16 logits up to which a block is whole, however few tokens its chunk has."""

MOST_BLOCK_TOKENS = 4096
"""Of a block: what reading and adding to the weight's gradient takes is then a twentieth of its product."""

BLOCK_WIDTHS = 22
"""Hidden states that a token's share of a block of logits may take, once for each token of the chunk. Blocks of layers
take 15 (llama-3.1-8b) to 24 (qwen2.5-0.5b) for what they recompute and for gradients, where the logits then lie."""

BLOCK_MULTIPLE = 64
"""Tokens of a block are a multiple of it where its chunk decides: matrix products run at full rate then."""

PLAIN_ELEMENTS = 1 << 23
"""Elements of a block's logits that the plain path works on at once: its temporaries are of 32 MiB in float32."""


ALIGNED, ROW_MULTIPLE = 8, 64
"""cuBLAS multiplies five to seven times as fast where rows begin at a multiple of 16 bytes and the number of their
elements is one of 8 as well (bench/results/h100_vocabulary.json). Vocabularies of other sizes, as those to which a
token was added, get rows of a multiple of ROW_MULTIPLE elements, and their last words products of their own."""


def row_elements(vocab_size: int) -> int:
    """Elements from one row of logits to the next."""
    return vocab_size if vocab_size % ALIGNED == 0 else -(-vocab_size // ROW_MULTIPLE) * ROW_MULTIPLE


def word_ranges(vocab_size: int) -> list[slice]:
    """The words that are multiplied together: as many as a multiple of ALIGNED, then the up to 7 others."""
    aligned = vocab_size - vocab_size % ALIGNED
    return [slice(start, end) for start, end in ((0, aligned), (aligned, vocab_size)) if start < end]


class LogitsBlocks(NamedTuple):
    """How many tokens of a chunk have their logits at one time: an equal part of them, within least..most."""

    least: int
    most: int
    parts: int = 1

    def rows(self, tokens: int) -> int:
        """Tokens of each block of a chunk of `tokens` tokens; the last one may have fewer. Grows with `tokens`."""
        part = -(-tokens // self.parts)
        aligned = -(-part // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
        return min(tokens, max(self.least, min(self.most, aligned)))


def logits_blocks(width: int, vocab_size: int) -> LogitsBlocks:
    """The blocks of a head. They follow from its shape and the chunk's tokens, so budgets never change the sums.

    Every block reads and writes the sums of the weight's gradient, 8 bytes an element, while its product takes 2 FLOPs
    a token: of 512 tokens the traffic takes more of an H200's time than the product. So longer chunks have larger
    blocks, as far as the logits fit where the blocks of layers have their temporaries.
    """
    fitting = max(1, LOGITS_BLOCK_BYTES // (2 * vocab_size))
    least = max(64, min(MOST_BLOCK_TOKENS, 1 << (fitting.bit_length() - 1)))
    return LogitsBlocks(least, MOST_BLOCK_TOKENS, -(-vocab_size // (BLOCK_WIDTHS * width)))


_WHOLE = LogitsBlocks(1, MOST_BLOCK_TOKENS)


@dataclass(frozen=True)
class _LogitsSpec(TensorSpec):
    """The buffer that holds one block of logits after the other."""

    blocks: LogitsBlocks = _WHOLE

    def height(self, tokens: int) -> int:
        return self.blocks.rows(tokens)


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    write_grad: bool,
    soft_cap: float = 0.0,
    weights: Tensor | None = None,
    grad_factor: float = 1.0,
) -> None:
    """losses [B] = -log softmax(logits [B, V])[label], 0 where label is -100; optionally logits <- their gradient.

    With a soft cap C, logits count as C * tanh(logits / C) (Gemma Team 2024, "Gemma 2"). weights [B], in the dtype of
    losses: factors on losses and gradients. grad_factor: on gradients alone."""
    if use_kernel(logits) and logits.dtype != torch.float64:
        from flexengine.kernels import cross_entropy  # noqa: PLC0415 (Triton is imported when first used)

        return cross_entropy.cross_entropy_(logits, labels, losses, write_grad, soft_cap, weights, grad_factor)
    step = max(1, PLAIN_ELEMENTS // logits.shape[-1])
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        factors = None if weights is None else weights[rows]
        own_factor = grad_factor if write_grad else None
        _plain_cross_entropy_(logits[rows], labels[rows], losses[rows], own_factor, soft_cap, factors)


def _plain_cross_entropy_(
    logits: Tensor, labels: Tensor, losses: Tensor, grad_factor: float | None, soft_cap: float, weights: Tensor | None
) -> None:
    """Do what `cross_entropy_` does, with temporaries as large as the logits; grad_factor None: write no gradient."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    share = torch.tanh(wide / soft_cap) if soft_cap else None
    if share is not None:
        wide = soft_cap * share
    active = labels != IGNORE_INDEX
    targets = labels.clamp(min=0)[:, None]
    lse = torch.logsumexp(wide, dim=-1)
    losses.copy_(torch.where(active, lse - wide.gather(1, targets)[:, 0], torch.zeros_like(lse)))
    if weights is not None:
        losses *= weights
    if grad_factor is not None:
        factors = active * grad_factor if weights is None else active * weights * grad_factor
        grad = torch.exp(wide - lse[:, None])
        grad.scatter_add_(1, targets, -torch.ones_like(grad[:, :1]))
        if share is not None:
            grad *= 1 - share.square()
        logits.copy_(grad * factors[:, None])


class LMHeadLoss(Op):
    """losses of h under the LM head. Forward gives losses only; backward_input does loss and both gradients in one
    pass.
    """

    def __init__(self, name: str, x: str, width: int, vocab_size: int, weight: str, soft_cap: float = 0.0) -> None:
        self.name, self.x, self.width, self.vocab_size, self.weight = name, x, width, vocab_size, weight
        self.soft_cap = soft_cap
        self.inputs = (x,)
        self.outputs = ()
        self.params = (weight,)
        self.needs_input = (x,)
        self.grad_inputs = (x,)
        self.shape = HeadShape(width, vocab_size, soft_cap)
        self.blocks = logits_blocks(width, vocab_size)
        self.words = word_ranges(vocab_size)

    def untrained(self) -> Self:
        """The same with the least blocks: there are no sums of the weight's gradient to add to."""
        return super().untrained().changed(blocks=self.blocks._replace(most=self.blocks.least))

    def forward_only(self) -> Self:
        """The same with its own blocks, so that losses have the bits that training gives them in chunks of this size.

        Training takes more memory in these chunks.
        """
        return super().forward_only().changed(blocks=self.blocks)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if half == "weight":
            return ()
        return (_LogitsSpec("logits", (row_elements(self.vocab_size),), blocks=self.blocks),)

    def forward(self, env: OpEnv) -> None:
        for rows in self._blocks(env):
            logits = self._multiplied(env, rows)
            self._losses(env.chunk, rows, logits, False)

    def backward_input(self, env: OpEnv) -> None:
        first = env.first
        for rows in self._blocks(env):
            logits, h = self._multiplied(env, rows), env.t[self.x][rows]
            self._losses(env.chunk, rows, logits, True)
            self._write_input_grad(logits, env.p[self.weight], env.g[self.x][rows])
            if self.trained:
                self._accumulate(env, logits, h, first)
            first = False

    def backward_weight(self, env: OpEnv) -> None:
        """Do nothing: backward_input has the logits' gradient only block by block, so it does both halves."""

    def _accumulate(self, env: OpEnv, grad_logits: Tensor, h: Tensor, first: bool) -> None:
        """Add a block's part of the parameters' gradients."""
        for words in self.words:
            accumulate_weight_grad(env.gp[self.weight][words], grad_logits[:, words], h, first)

    def _multiplied(self, env: OpEnv, rows: slice) -> Tensor:
        """The logits [B, V] of a block of tokens, in their buffer."""
        whole_rows = env.t["logits"][: rows.stop - rows.start]
        logits = whole_rows[:, : self.vocab_size]
        if not logits.is_cuda:
            # with AMX oneDNN 3.12 multiplies what follows the last word of a row by zero: NaN there would spread
            whole_rows[:, self.vocab_size :].zero_()
        for words in self.words:
            torch.mm(env.t[self.x][rows], env.p[self.weight][words].t(), out=logits[:, words])
        return logits

    def _write_input_grad(self, grad_logits: Tensor, weight: Tensor, grad_x: Tensor) -> None:
        """grad_x [B, D] = grad_logits [B, V] @ weight [V, D]. The few last words come first, so that their part is
        added before the sum of all others is rounded."""
        last, *others = reversed(self.words)
        torch.mm(grad_logits[:, last], weight[last], out=grad_x)
        for words in others:
            torch.addmm(grad_x, grad_logits[:, words], weight[words], out=grad_x)

    def _losses(self, chunk: ChunkContext, rows: slice, logits: Tensor, write_grad: bool) -> None:
        """Write the losses of a block of tokens and, where asked for, their gradient over the logits."""
        labels, losses = chunk.labels[rows], chunk.losses[rows]
        weights = None if chunk.weights is None else chunk.weights[rows]
        if chunk.custom_loss is None:
            return cross_entropy_(logits, labels, losses, write_grad, self.soft_cap, weights, chunk.grad_factor)
        custom = chunk.custom_loss.of_rows(rows)
        return custom_loss_(
            custom, logits, labels, weights, losses, write_grad, self.soft_cap, grad_factor=chunk.grad_factor
        )

    def logits_of(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Logits [T, V] of x [T, D], for samples: what the losses are made of. weights: the layer's parameters."""
        logits = x @ weights[self.weight].t()
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def _blocks(self, env: OpEnv) -> list[slice]:
        tokens = env.chunk.tokens
        step = self.blocks.rows(tokens)
        return [slice(i, min(i + step, tokens)) for i in range(0, tokens, step)]

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        matrices = 5 if self.soft_cap else 2
        rows = max(1, min(self.blocks.rows(tokens), PLAIN_ELEMENTS // self.vocab_size))
        return plain_bytes(matrices * rows * (self.vocab_size + 8), compute_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        sizes = (self.blocks.rows(tokens), self.vocab_size, self.width)
        widened = widened_bytes(*sizes, compute_bytes) if self.trained else 0
        return max(super().plain_workspace_bytes(tokens, compute_bytes), widened)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        blocks = -(-tokens // self.blocks.rows(tokens))
        logits_bytes = 2.0 * tokens * self.vocab_size * compute_bytes
        kernels = (len(self.words) + 1) * blocks
        flops = 2.0 * tokens * self.width * self.vocab_size
        return Work(head_flops=flops, memory_bytes=logits_bytes, kernels=kernels)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        blocks = -(-tokens // self.blocks.rows(tokens))
        # logits read twice and written once by the loss; the accumulator is read and written once per block
        logits_bytes = 3.0 * tokens * self.vocab_size * compute_bytes
        accumulator_bytes = 2.0 * blocks * self.vocab_size * self.width * max(4, compute_bytes)
        products = 3 if self.trained else 2
        return Work(
            head_flops=2.0 * products * tokens * self.width * self.vocab_size,
            memory_bytes=logits_bytes + (accumulator_bytes if self.trained else 0.0),
            kernels=(products * len(self.words) + 1) * blocks,
        )
