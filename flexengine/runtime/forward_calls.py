"""The calls of an engine that run forward passes alone: what is trained stays as it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flexengine.ops.custom_loss import LossFunction
from flexengine.ops.given_rows import Columns
from flexengine.runtime.adapter_calls import AdapterCalls
from flexengine.runtime.batch_input import Sequences, read_batch
from flexengine.runtime.generation import GREEDY, GenerationRequest, Generator, Sampling, Tell
from flexengine.runtime.one_caller import one_caller
from flexengine.runtime.outputs import EvaluateOutput, evaluate_output


class ForwardCalls(AdapterCalls):
    """The part of an engine that evaluates and generates, with adapters or without."""

    def _read(self, batch: object, columns: dict[str, object], loss: LossFunction | None) -> Sequences:
        self.state.require_usable(merged=True)
        if loss is not None and not callable(loss):
            raise ValueError(f"loss must be a function of a block of logits, got {type(loss).__name__}: docs/losses.md")
        call = self.plan.request, self.model, batch, columns
        found = self.context.read(self.settings.batches, call, loss is not None)
        return found if loss is None else replace(found, loss=loss)

    @one_caller
    def evaluate(
        self,
        batch: object = None,
        *,
        per_token: bool = False,
        loss: LossFunction | None = None,
        adapters: bool = True,
        **columns: object,
    ) -> EvaluateOutput:
        """Mean loss of a batch, forward only; nothing else changes. per_token: also each token's log-probability.

        adapters: False runs the model beneath them. Raises ValueError where there are none, or it changed with them.
        """
        sequences = self._read(batch, columns, loss)
        if per_token and loss is not None:
            raise ValueError("per_token gives log-probabilities, which a loss of your own has not; leave one out")
        token_losses = [torch.zeros(length) for length in sequences.lengths] if per_token else None
        plain = replace(sequences, weights=None) if per_token else sequences
        with self._using_adapters(adapters):
            return evaluate_output(self.steps.evaluate(plain, float, token_losses), sequences, token_losses)

    @one_caller
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int = 128, *, stop_ids: Collection[int] = (),
        sampling: Sampling = GREEDY, tell: Tell | None = None, keep_stop: bool = False, images: Columns | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Return the tokens that follow each prompt, up to a stop token, max_new_tokens or max_seq_len.

        prompts: token ids. Each pass runs the new tokens of as many prompts as there is room for the keys, values and
        states of in the GPU memory that the plan leaves free between steps; others follow when one has ended. Weights
        and gradients stay as they are. sampling: how tokens are chosen, by default the likeliest; draws depend on its
        seed and the number of the prompt. keep_stop: leave the stop token that ends an answer in it. tell: called with
        a prompt's number and each new token at once, where True ends that answer; it must not call the engine. images:
        pixels of the prompts' images, as of a batch.
        Raises ValueError for a prompt that leaves no room for an answer, and where no sequence's cache fits.
        """
        self.state.require_usable(merged=True)
        request = GenerationRequest([*map(list, prompts)], max_new_tokens, stop_ids, sampling, tell, keep_stop, images)
        request.check(self.model, self.plan.request.max_seq_len)
        run = Generator(self.rounds, self.layers).generate
        return self.steps.between_steps(lambda: run(request)) if request.prompts else []

    @one_caller
    def next_token_logits(self, tokens: list[int]) -> Tensor:
        """Logits [V] of the token after `tokens`, float32 on the CPU; runs the whole prefix, for samples only."""
        self.state.require_usable(merged=True)
        sequences = read_batch({"input_ids": [tokens]}, self.model, self.plan.request.max_seq_len)
        return self.steps.evaluate(sequences, lambda _: self.rounds.next_token_logits(), everywhere=True)
