"""A decoder layer of any kind as one op: forward without a graph, backward by recomputation under autograd.

The layer is a function of its weights and its input. Sequences with all tokens that one may have share calls; every
other one is a call of its own, as the layer's masks and positions are those of its length. Nothing is kept but the
layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import Op, OpEnv, TensorSpec, Work
from flexengine.ops.cross_entropy import LMHeadLoss
from flexengine.ops.opaque_cost import TRACED_BYTES, CallCost, CostCurve, TimedCosts

Weights = Mapping[str, Tensor]


class LayerFunction(Protocol):
    """What an opaque block computes. Functions of equal names compute the same."""

    __qualname__: str

    def __call__(
        self, layer: int, weights: Weights, x: Tensor, adapters: tuple[Adapters, ...] = (), sequences: int = 1
    ) -> Tensor:
        """y [T, D] of sequences of one length, one behind the other in x [T, D]. layer: the layer's number in the
        model, the embedding being 0.

        adapters: those that its linear layers add, with A and B among the weights.
        """
        ...


CALL_TOKENS = 16384
"""Tokens of calls that take several sequences, at the most: larger products gain nothing."""
MOST_GROWTH, MOST_ADDED_BYTES = 2, 1 << 30
"""By what a call of several sequences may take more memory than one of a single sequence: so many times, and bytes."""


class OpaqueLinear(NamedTuple):
    """A linear layer inside an opaque block: its module's name, and its weight [out, in] (transposed: [in, out])."""

    name: str
    weight: str
    in_features: int
    out_features: int
    transposed: bool


CostOf = Callable[[tuple[Adapters, ...], tuple[str, ...]], CostCurve]
"""(adapters, names of what is trained) -> what calls cost."""


def _add(total: Tensor, grad: Tensor | None, first: bool) -> None:
    """Write or add a gradient; None is zero."""
    if grad is None:
        total.zero_() if first else None
    elif first:
        total.copy_(grad)
    else:
        total.add_(grad)


def _leaves(weights: Weights, names: Sequence[str], trained: bool) -> dict[str, Tensor]:
    """The weights as autograd sees them: `names` are leaves of their own."""
    return {**weights, **{name: weights[name].detach().requires_grad_(trained) for name in names}}


class OpaqueBlock(Op):
    """y = layer(x), with weights from env.p. cost_of: what calls cost by their tokens.

    A call takes a sequence or, where a row of y depends on one row of x alone, rows_per_call tokens. params: what is
    trained. linears: those of its linear layers that may have adapters. in_batches: whether its function takes several
    sequences; `together` of the longest ones share a call.
    """

    replays = False
    linears: tuple[OpaqueLinear, ...] = ()
    adapters: tuple[Adapters, ...] = ()
    longest: int | None = None
    in_batches = False
    together = 1

    def __init__(
        self, name: str, io: tuple[str, str], width: tuple[int, int], params: tuple[str, ...], function: LayerFunction,
        cost_of: CostOf, rows_per_call: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.function, self.params = name, function, params
        self.cost_of = cost_of
        self.cost: CostCurve | TimedCosts = cost_of((), params)
        self.rows_per_call, self.whole_sequences = rows_per_call, rows_per_call is None
        self.x, self.y = io
        self.width = width[0]
        self.inputs, self.outputs = (self.x,), (TensorSpec(self.y, (width[1],)),)
        self.needs_input = self.grad_inputs = self.inputs
        if width[0] <= width[1] and rows_per_call is None:
            # one slot holds both gradients: a sequence's is read before it is written, and no later one's is reached
            self.grad_alias = ((self.x, self.y),)

    def adapted(self, adapters: Sequence[Adapters]) -> Self:
        """The same op whose linear layers of these names have adapters, which are parameters beside its own."""
        params = (*self.params, *(name for one in adapters for name in one.params))
        return self.changed(adapters=tuple(adapters), params=params)

    def training(self, params: tuple[str, ...]) -> Self:
        """The same op of whose parameters these alone are trained."""
        op = self if params else self.untrained()
        return op.changed(params=params, cost=self.cost_of(self.adapters, params))

    def up_to(self, tokens: int) -> Self:
        """The same op for sequences of at most so many tokens, which bounds what its calls take.

        As many of these share a call as the memory of calls allows; budgets have no part in it.
        """
        if not self.in_batches or self.rows_per_call or 2 * tokens > CALL_TOKENS:
            return self.changed(longest=tokens)
        one, two = (self.cost.at(tokens, TRACED_BYTES, count).peak_bytes for count in (1, 2))
        most = 1 + min(MOST_GROWTH * one, MOST_ADDED_BYTES) // max(1, two - one)
        return self.changed(longest=tokens, together=min(most, CALL_TOKENS // tokens))

    @property
    def title(self) -> str:
        """All that decides what it computes beside its weights: code and config, as a digest."""
        return self.function.__qualname__

    def costing(self, cost: CostCurve | TimedCosts) -> Self:
        """The same op, whose calls cost something else."""
        return self.changed(cost=cost)

    def forward(self, env: OpEnv) -> None:
        used = self.adapters if env.adapters else ()
        with torch.no_grad():
            for rows, count in self._calls(env):
                env.t[self.y][rows] = self.function(env.layer, env.p, env.t[self.x][rows], used, count)

    def backward_input(self, env: OpEnv) -> None:
        first, trained = env.first, self.params if self.trained else ()
        for rows, count in self._calls(env):
            with torch.enable_grad():
                x = env.t[self.x][rows].detach().requires_grad_(True)
                weights = _leaves(env.p, trained, True)
                y = self.function(env.layer, weights, x, self.adapters, count)
                wanted = [x, *(weights[name] for name in trained)]
                grads = torch.autograd.grad(y, wanted, env.g[self.y][rows], allow_unused=True)
            del y, weights
            _add(env.g[self.x][rows], grads[0], self.x not in env.accumulate)
            for name, grad in zip(trained, grads[1:], strict=True):
                _add(env.gp[name], grad, first)
            first = False

    def backward_weight(self, env: OpEnv) -> None:
        """Do nothing: one call of autograd gave both halves."""

    def _calls(self, env: OpEnv) -> list[tuple[slice, int]]:
        """The rows of each call, and how many sequences these are."""
        step, tokens = self.rows_per_call, env.chunk.tokens
        if step is not None:
            return [(slice(start, min(start + step, tokens)), 1) for start in range(0, tokens, step)]
        assert env.chunk.window is None, "an opaque block takes whole sequences"
        calls, start = [], 0
        for length, run in groupby(env.chunk.seq_lens):
            left = len(list(run))
            while left:
                count = min(left, self._together(length))
                calls.append((slice(start, start + count * length), count))
                start, left = start + count * length, left - count
        return calls

    def _together(self, length: int) -> int:
        """How many sequences of so many tokens share a call, at the most."""
        return self.together if length == self.longest else 1

    # ---- what it costs ----------------------------------------------------------------------------------------------

    def _work(self, tokens: int, seq_len: int, compute_bytes: int, part: Callable[[CallCost], Work]) -> Work:
        length = max(1, min(tokens, self.rows_per_call or seq_len))
        count = max(1, min(tokens // length, self._together(length)))
        return part(self.cost.at(length, compute_bytes, count)).times(tokens / (count * length))

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, seq_len, compute_bytes, lambda cost: cost.forward)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, seq_len, compute_bytes, lambda cost: cost.backward)

    def model_flops(self, seq_len: int) -> float:
        halves = 1.0 + self.has_input_half + (self.has_weight_half and not self.adapters)
        return halves * self._work(seq_len, seq_len, 2, lambda cost: cost.forward).flops

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        length = max(1, min(tokens, self.rows_per_call or self.longest or tokens))
        counts = {1, max(1, min(tokens // length, self._together(length)))}
        return max(self.cost.at(length, compute_bytes, count).peak_bytes for count in counts)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return self.workspace_bytes(tokens, compute_bytes)


class OpaqueHead(LMHeadLoss):
    """Losses under logits = function(weights, h [T, D]), block by block over the tokens. params: the matrix first."""

    replays = False

    def __init__(
        self, name: str, x: str, width: int, vocab_size: int, params: tuple[str, ...],
        function: Callable[[Weights, Tensor], Tensor],
    ) -> None:  # fmt: skip
        super().__init__(name, x, width, vocab_size, params[0])
        self.blocks = self.blocks._replace(most=self.blocks.least)  # autograd takes several wide copies of a block
        self.params, self.function = params, function

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return ()

    def forward(self, env: OpEnv) -> None:
        with torch.no_grad():
            for rows in self._blocks(env):
                self._losses(env.chunk, rows, self.function(env.p, env.t[self.x][rows]).contiguous(), False)

    def backward_input(self, env: OpEnv) -> None:
        first, trained = env.first, self.params if self.trained else ()
        # autograd takes a write into any view of the arena, which losses are, for one into what it has saved
        chunk = replace(env.chunk, losses=torch.empty_like(env.chunk.losses))
        for rows in self._blocks(env):
            with torch.enable_grad():
                h = env.t[self.x][rows].detach().requires_grad_(True)
                weights = _leaves(env.p, trained, True)
                logits = self.function(weights, h)
                grad = logits.detach().clone()
                self._losses(chunk, rows, grad, True)
                grads = torch.autograd.grad(logits, [h, *(weights[n] for n in trained)], grad, allow_unused=True)
            env.chunk.losses[rows] = chunk.losses[rows]
            del logits, grad
            _add(env.g[self.x][rows], grads[0], self.x not in env.accumulate)
            for name, total in zip(trained, grads[1:], strict=True):
                _add(env.gp[name], total, first)
            first = False

    def logits_of(self, x: Tensor, weights: Weights) -> Tensor:
        with torch.no_grad():
            return self.function(weights, x)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        rows = self.blocks.rows(tokens)
        matrix = self.vocab_size * self.width * compute_bytes if self.trained else 0
        return 6 * rows * self.vocab_size * max(4, compute_bytes) + 2 * matrix

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return self.workspace_bytes(tokens, compute_bytes) + super().plain_workspace_bytes(tokens, compute_bytes)
