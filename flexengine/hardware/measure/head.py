"""Measures the products of a model's LM head beside those of its linear layers.

Shapes: B tokens of a block of logits, V words, D width: h [B, D], weight [V, D], logits [B, V]. The call is the
engine's: logits, losses and both gradients of a block, the weight's added to sums in float32.
"""

import torch

from flexengine.hardware.curve import Points, interpolate
from flexengine.hardware.measure.timing import Timer, without_traffic
from flexengine.ops.base import ChunkContext, OpEnv
from flexengine.ops.cross_entropy import LMHeadLoss, LogitsBlocks, logits_blocks, row_elements
from flexengine.ops.linear_shape import HeadShape

FEW_TOKENS = 512  # fewer than a block has: what a small chunk multiplies at once
ROW_MULTIPLE = 64  # words: a part of the vocabulary lies in memory as the whole one does
WEIGHT_SCALE = 0.02  # of random weights, as models are initialised


class Head:
    """The head over a block of tokens, with as many of its words as fit some bytes."""

    def __init__(
        self, shape: HeadShape, tokens: int, dtype: torch.dtype, device: torch.device, most_bytes: int
    ) -> None:
        """Raises: ValueError where not even ROW_MULTIPLE words fit."""
        words, wide = shape.vocab_size, torch.float64 if dtype == torch.float64 else torch.float32
        while self._num_bytes(words, shape.width, tokens, dtype, wide) > most_bytes:
            half = words // (2 * ROW_MULTIPLE) * ROW_MULTIPLE
            if half == 0:
                raise ValueError(f"{words} words of {shape.width} features take more than {most_bytes} bytes")
            words = half + words % ROW_MULTIPLE
        self.tokens, self.compute_bytes = tokens, dtype.itemsize
        self.op = LMHeadLoss("lm_head", "h", shape.width, words, "weight", shape.soft_cap)
        self.op.blocks = LogitsBlocks(tokens, tokens)
        ids = torch.randint(0, words, (tokens,), device=device)
        counting = torch.arange(tokens, device=device, dtype=torch.int32)
        chunk = ChunkContext(
            tokens=tokens,
            input_ids=ids,
            labels=ids,
            positions=counting,
            cu_seqlens=counting[:1].repeat(2),
            seq_lens=(tokens,),
            losses=torch.zeros(tokens, device=device, dtype=wide),
            constants={},
        )
        weight = torch.randn(words, shape.width, device=device, dtype=dtype).mul_(WEIGHT_SCALE)
        self.env = OpEnv(
            t={
                "h": torch.randn(tokens, shape.width, device=device, dtype=dtype),
                "logits": torch.zeros(tokens, row_elements(words), device=device, dtype=dtype),
            },
            p={"weight": weight},
            g={"h": torch.empty(tokens, shape.width, device=device, dtype=dtype)},
            gp={"weight": torch.zeros(words, shape.width, device=device, dtype=wide)},
            chunk=chunk,
            first=False,
        )

    @staticmethod
    def _num_bytes(words: int, width: int, tokens: int, dtype: torch.dtype, wide: torch.dtype) -> int:
        """Bytes of all operands."""
        rows = tokens * (2 * width + row_elements(words)) * dtype.itemsize
        return words * width * (dtype.itemsize + wide.itemsize) + rows

    def flops_per_s(self, timer: Timer, least_s: float, memory_bytes_per_s: float) -> float:
        """FLOP/s of the products, in the seconds that are left when the declared memory traffic is taken off."""
        work = self.op.backward_input_work(self.tokens, self.tokens, self.compute_bytes)
        seconds = timer(lambda: self.op.backward_input(self.env), least_s)
        return work.head_flops / without_traffic(seconds, work.memory_bytes, memory_bytes_per_s)


def head_shares(
    shape: HeadShape, matmul: Points, memory_bytes_per_s: float, dtype: torch.dtype, device: torch.device,
    most_bytes: int, timer: Timer, least_s: float,
) -> Points:  # fmt: skip
    """(tokens of a chunk, share of a linear layer's rate that the head's products attain).

    matmul: the linear layers' rates by tokens. A longer chunk than a block of logits is multiplied block by block.
    Empty where nothing fits.
    """
    blocks = logits_blocks(shape.width, shape.vocab_size)
    longest = max(tokens for tokens, _ in matmul)
    rates = []
    for rows in sorted({min(FEW_TOKENS, blocks.least), blocks.least, blocks.rows(longest)}):
        try:
            head = Head(shape, rows, dtype, device, most_bytes)
        except ValueError:
            continue
        rates.append((rows, head.flops_per_s(timer, least_s, memory_bytes_per_s)))
        del head  # before the next one is made
        torch.cuda.empty_cache()
    if not rates:
        return ()
    fewest = rates[0][0]
    counts = sorted({*(rows for rows, _ in rates), *(tokens for tokens, _ in matmul if tokens >= fewest)})
    return tuple(
        (tokens, interpolate(tuple(rates), blocks.rows(tokens)) / interpolate(matmul, tokens)) for tokens in counts
    )
