"""What the calls of an engine return."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.runtime.batch import Sequences
from flexengine.schedule.layout import Layout


class FwdBwdOutput(NamedTuple):
    """One fwd_bwd call: the mean loss over its target tokens, its sizes, its FLOPs without and with recompute."""

    loss: float
    num_tokens: int
    num_target_tokens: int
    model_flops: float
    hardware_flops: float


class StepOutput(NamedTuple):
    """One optimizer step: the global gradient norm before clipping, and whether an update was skipped for it.

    skipped: True when a gradient was not finite. seconds: since the first fwd_bwd of the step began; updates on the CPU
    may go on after them.
    """

    grad_norm: float
    skipped: bool
    seconds: float


class EvaluateOutput(NamedTuple):
    """One evaluate call: the mean loss over its target tokens, and its sizes."""

    loss: float
    num_tokens: int
    num_target_tokens: int


def fwd_bwd_output(loss: float, batch: Sequences, layout: Layout) -> FwdBwdOutput:
    """Add a batch's sizes and FLOPs to its mean loss."""
    model_flops = layout.model.model_flops(batch.lengths)
    hardware_flops = model_flops + _recompute_flops(batch, layout)
    return FwdBwdOutput(loss, batch.num_tokens, batch.num_target_tokens, model_flops, hardware_flops)


def _recompute_flops(batch: Sequences, layout: Layout) -> float:
    mean_len = max(1, sum(n * n for n in batch.lengths) // batch.num_tokens)  # of the sequence a token is in
    return sum(
        program.recompute_work(batch.num_tokens, mean_len, layout.compute_bytes).flops
        for layer, program in zip(layout.model.layers, layout.programs, strict=True)
        if layer.kind == "block"
    )
