"""Ops of which one function tells what each half costs."""

from __future__ import annotations

from abc import abstractmethod

from flexengine.ops.base import Op, Work


class PricedByHalf(Op):
    """An op whose halves' costs share terms, and do not depend on how long sequences are."""

    @abstractmethod
    def half_work(self, half: str, tokens: int, compute_bytes: int) -> Work:
        """Cost of a half for so many tokens. half: forward, input or weight."""

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.half_work("forward", tokens, compute_bytes)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.half_work("input", tokens, compute_bytes)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.half_work("weight", tokens, compute_bytes)
