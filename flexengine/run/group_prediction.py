"""Predicts a step on completions: what writing them takes, pass by pass, and what training on them takes.

Prices are those of the plan's programs. What the machine showed in the steps before corrects them, each part by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tqdm import tqdm

from flexengine.metrics import format_seconds
from flexengine.options.objective import ObjectiveOptions
from flexengine.run.step_prediction import StepPredictor
from flexengine.runtime.engine import Engine

CALLS_OF_A_SEQUENCE = 12
"""What an op that runs for each sequence alone takes the host: views of its tensors, and the op."""
DRAW_BYTES = 64
"""Memory traffic that a token's draw has for each word of the vocabulary, in passes over float64."""
SERVER_TOKEN_S, REWARD_S = 0.02, 1e-3
"""What a server takes for a token of all completions together, and functions for a completion, until a step tells."""


class Pass(NamedTuple):
    """One forward pass while completions are written: new tokens, those that caches hold, and sequences."""

    tokens: int
    cached: int
    sequences: int


def passes(prompts: Sequence[int], completions: Sequence[int], at_a_time: int, whole: bool) -> Iterator[Pass]:
    """The passes in which completions of these lengths are written after prompts of these, as the engine does.

    A prompt enters when another's completion has ended. whole: nothing is cached, so all tokens pass every time.
    """
    waiting = list(zip(prompts, completions, strict=True))[::-1]
    active: list[list[int]] = []  # tokens in the cache, tokens to pass, completion tokens to come
    while waiting or active:
        while waiting and len(active) < at_a_time:
            prompt, left = waiting.pop()
            active.append([0, prompt, left])
        yield Pass(sum(one[1] for one in active), sum(one[0] for one in active), len(active))
        for one in active:
            one[0], one[1], one[2] = (0, one[1] + 1, one[2] - 1) if whole else (one[0] + one[1], 1, one[2] - 1)
        active = [one for one in active if one[2] > 0]


class GenerationPredictor:
    """Predicts how long the engine takes to write completions of known lengths."""

    def __init__(self, predictor: StepPredictor) -> None:
        self._predictor = predictor
        self._choice_s = DRAW_BYTES * predictor.model.vocab_size / predictor.profile.host.bytes_per_s
        self._seconds: dict[int, float] = {}

    def seconds(self, prompts: Sequence[int], completions: Sequence[int], gpu_bytes: int) -> float:
        """Predict the seconds. gpu_bytes: of the engine's arena, whose free part holds the caches."""
        at_a_time = self._predictor.num_caches(max(map(sum, zip(prompts, completions, strict=True))) - 1, gpu_bytes)
        whole = self._predictor.model.whole_sequences
        return sum(self._pass_s(one) for one in passes(prompts, completions, max(1, at_a_time), whole))

    def _pass_s(self, found: Pass) -> float:
        """Chunks one after another, ops that run for each sequence alone, caches that are read, tokens that are drawn.

        The head sees the last token of each sequence alone, and chunks are priced with all.
        """
        predictor = self._predictor
        full, rest = divmod(found.tokens, predictor.plan.chunk_tokens)
        chunks_s = full * self._simulated(predictor.plan.chunk_tokens) + (self._chunk_s(rest) if rest else 0.0)
        calls = (found.sequences - 1) * predictor.num_ops_by_sequence * CALLS_OF_A_SEQUENCE
        read_s = found.cached * predictor.cache_bytes_per_token / predictor.profile.memory.bytes_per_s
        return chunks_s + calls * predictor.profile.host.issue_s + read_s + found.sequences * self._choice_s

    def _chunk_s(self, tokens: int) -> float:
        """Seconds of a chunk with so many tokens, between those of the powers of two around it."""
        low = 1 << (tokens.bit_length() - 1)
        low_s = self._simulated(low)
        return low_s + (tokens - low) / low * (self._simulated(2 * low) - low_s)

    def _simulated(self, tokens: int) -> float:
        if tokens not in self._seconds:
            self._seconds[tokens] = self._predictor.chunk_forward_s(tokens)
        return self._seconds[tokens]


class Corrected:
    """Corrects what is predicted of one part of steps by the median of what it took before, over its predictions."""

    def __init__(self) -> None:
        self._ratios: list[float] = []

    def predict(self, seconds: float) -> float:
        """The corrected prediction."""
        return seconds * (statistics.median(self._ratios) if self._ratios else 1.0)

    def learn(self, predicted_s: float, measured_s: float) -> None:
        """Take in what a step took. predicted_s: before it was corrected."""
        if predicted_s > 0:
            self._ratios.append(measured_s / predicted_s)


class Parts(NamedTuple):
    """Seconds of what a step on completions consists of. training_s: all passes over completions, with updates."""

    generation_s: float
    rewarding_s: float
    training_s: float


class Forecast:
    """Predicts the parts of steps. Of a server's writing, and of rewards, nothing is known before the first."""

    def __init__(self, config: ObjectiveOptions, predictor: StepPredictor) -> None:
        self._config, self._predictor = config, predictor
        self._generation = GenerationPredictor(predictor)
        self._corrected, self._plain = (Corrected(), Corrected(), Corrected()), Parts(0.0, 0.0, 0.0)
        self._told = False

    def tell(self, engine: Engine, prompts: Sequence[int]) -> None:
        """Say once what a step takes at most, where every completion is as long as it may be."""
        if self._told:
            return
        self._told, count = True, self._config.completions_per_prompt
        repeated = [length for length in prompts for _ in range(count)]
        longest = [self._config.completion_tokens] * len(repeated)
        found = self.seconds(repeated, longest, engine.arenas.capacity["gpu"])
        tqdm.write(
            f"a step of {len(repeated)} completions of {longest[0]} tokens: {format_seconds(sum(found))} predicted,"
            f" {format_seconds(found.generation_s)} of them to write"
        )

    def predict(self, engine: Engine, prompts: Sequence[int], completions: Sequence[int]) -> Parts:
        """Predict a step on completions of these lengths after prompts of these, by what earlier steps took."""
        self._plain = self.seconds(prompts, completions, engine.arenas.capacity["gpu"])
        return Parts(*(one.predict(part) for one, part in zip(self._corrected, self._plain, strict=True)))

    def learn(self, measured: Parts) -> None:
        """Take in what the step took that was predicted last."""
        for one, plain, took in zip(self._corrected, self._plain, measured, strict=True):
            one.learn(plain, took)

    def seconds(self, prompts: Sequence[int], completions: Sequence[int], gpu_bytes: int) -> Parts:
        """Predict a step by prices alone. gpu_bytes: of the engine's arena."""
        lengths = [sum(pair) for pair in zip(prompts, completions, strict=True)]
        training_s = self._config.updates_per_step * self._predictor.step_s(lengths)
        if num_passes := self._config.updates_with_pass + bool(self._config.beta):
            training_s += num_passes * self._predictor.forward_s(lengths)
        writing_s = SERVER_TOKEN_S * max(completions)
        if self._config.generator is None:
            writing_s = self._generation.seconds(prompts, completions, gpu_bytes)
        return Parts(writing_s, REWARD_S * len(completions), training_s)
