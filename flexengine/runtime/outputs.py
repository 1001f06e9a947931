"""What the calls of an engine return."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.given_rows import placing
from flexengine.runtime.batch_input import Sequences
from flexengine.schedule.layout import Layout


class FwdBwdOutput(NamedTuple):
    """One fwd_bwd call: the mean loss over its target tokens, its sizes, its FLOPs without and with recompute.

    With weights loss is sum(weights * losses) / sum(|weights|), with a loss of one's own its sum / target tokens.
    """

    loss: float
    num_tokens: int
    num_target_tokens: int
    model_flops: float
    hardware_flops: float


class StepOutput(NamedTuple):
    """One optimizer step: the global gradient norm before clipping, and whether an update was skipped for it.

    skipped: True when a gradient was not finite. seconds: since the first fwd_bwd of the step began; updates on the CPU
    may go on after them. loss_scale: what float16 gradients were scaled by; None in other dtypes.
    """

    grad_norm: float
    skipped: bool
    seconds: float
    loss_scale: float | None = None


class EvaluateOutput(NamedTuple):
    """One evaluate call: the mean loss over its target tokens (as of `FwdBwdOutput`), and its sizes.

    token_log_probs: with per_token=True, for each sequence a float32 tensor [tokens] on the CPU. Entry t is the
    log-probability of token t after those before it (with a head for labels that of the label of token t, or with a
    single output its score), and 0 where token t has no loss. Of batches="local" they are those
    of the sequences that this rank gave.
    """

    loss: float
    num_tokens: int
    num_target_tokens: int
    token_log_probs: list[Tensor] | None = None


def evaluate_output(loss_sum: float, batch: Sequences, token_losses: list[Tensor] | None) -> EvaluateOutput:
    """Divide a batch's summed loss by its weight. token_losses: the losses after each token of every sequence."""
    log_probs = None
    if token_losses is not None and batch.weights is not None:  # they were evaluated without weights
        loss_sum = batch.weighted(token_losses)
    if token_losses is not None:  # what comes after the last token is no target
        shift = batch.shift
        log_probs = [-torch.cat((own.new_zeros(shift), own))[: len(own)] for own in token_losses[batch.given]]
    return EvaluateOutput(loss_sum / batch.loss_weight, batch.num_tokens, batch.num_target_tokens, log_probs)


def without_loss(batch: Sequences, layout: Layout) -> FwdBwdOutput:
    """The output of a batch but for its loss, which is not known yet: its sizes and FLOPs."""
    model_flops = layout.model.model_flops(batch.lengths)
    if batch.rows is not None:
        model_flops += placing(layout.model.layers[0].ops).flops_of_rows(batch.rows.starts[-1])
    hardware_flops = model_flops + _recompute_flops(batch, layout)
    return FwdBwdOutput(math.nan, batch.num_tokens, batch.num_target_tokens, model_flops, hardware_flops)


def _recompute_flops(batch: Sequences, layout: Layout) -> float:
    mean_len = max(1, sum(n * n for n in batch.lengths) // batch.num_tokens)  # of the sequence a token is in
    return sum(
        program.recompute_work(batch.num_tokens, mean_len, layout.compute_bytes).flops
        for layer, program in zip(layout.model.layers, layout.programs, strict=True)
        if layer.kind == "block"
    )
