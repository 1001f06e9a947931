"""Router: which experts a token goes to, with which weights, and where its rows lie among all, sorted by expert.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; softmax over all experts before the choice, as in
Fedus et al. 2021, "Switch Transformers". With probabilities p = softmax(x @ weight.T + bias), the chosen ones c and
their sum s: w = p_c, or p_c / s where normalised, which is the softmax over the chosen alone; grad_p_c = grad_w, or
(grad_w - sum(grad_w * w)) / s; grad_logits = p * (grad_p - sum(grad_p * p)).

Groups of experts, of which the best come into question, and a factor on weights: DeepSeek-AI 2024, "DeepSeek-V2";
p = sigmoid(x @ weight.T), grad_logits = grad_p * p * (1 - p), and a bias that the choice alone sees: "DeepSeek-V3".

Shapes: T tokens, E experts, K of them for each token. Nothing is read back to the host: counts stay on the device.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, use_kernel, wide
from flexengine.ops.linear import accumulate_bias_grad, accumulate_weight_grad, widened_bytes
from flexengine.ops.products import wide_product, write_product

LEAST_SUM = 1e-20
"""What is added to the sum of a token's sigmoids before they are divided by it."""


class RouterStyle(NamedTuple):
    """How scores are computed, and among which experts a token chooses.

    groups: experts side by side form so many groups; a token's come from the groups_taken of them in which the sum of
    the best `group_best` scores is largest. scale: factor on weights. biased: a bias is added for the choice only.
    exact: logits are not rounded to the type that is computed in.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    groups_taken: int = 1
    group_best: int = 1
    scale: float = 1.0
    biased: bool = False
    exact: bool = False


SOFTMAX = RouterStyle()
"""Softmax over all experts, of which any may be chosen."""


class Router(Op):
    """weight [T * K] of every row sorted by expert, place [T, K] of a token's rows, expert [T, K], bounds [E + 1] of
    the rows of each expert. Backward finds the probabilities again."""

    transposed = False
    """Its weight is [E, D]."""
    start: str | None = None
    """What is added to the logits [T, E], where another op has written it; its gradient is that of the logits."""

    def __init__(
        self, name: str, x: str, in_features: int, num_experts: int, per_token: int, weight: str, normalised: bool,
        bias: str | None = None, style: RouterStyle = SOFTMAX,
    ) -> None:  # fmt: skip
        self.name, self.x, self.in_features, self.weight, self.bias = name, x, in_features, weight, bias
        self.num_experts, self.per_token, self.normalised = num_experts, per_token, normalised
        self.style, self.buffers = style, (f"{name}.choice_bias",) if style.biased else ()
        self.row_weight, self.place = f"{name}_weight", f"{name}_place"
        self.expert, self.bounds = f"{name}_expert", f"{name}_bounds"
        self.inputs = (x,)
        self.outputs = (
            TensorSpec(self.row_weight, (per_token,), "float32"),
            TensorSpec(self.place, (per_token,), "int32"),
            TensorSpec(self.expert, (per_token,), "int32"),
            TensorSpec(self.bounds, (), "int32", rows=num_experts + 1),
        )
        self.params = (weight,) if bias is None else (weight, bias)
        self.needs_input = (x, self.place, self.expert)
        self.needs_weight = (x,)
        self.grad_inputs = (x,)
        self.grad_logits = TensorSpec(f"{name}_grad_logits", (num_experts,))

    @property
    def out_features(self) -> int:
        """Logits of a token."""
        return self.num_experts

    def onto(self, start: str) -> Self:
        """The same router with frozen parameters, whose logits are added to `start`."""
        op = self.untrained()
        op.start, op.inputs, op.needs_input = start, (*self.inputs, start), (*self.needs_input, start)
        op.grad_inputs = (*self.grad_inputs, start)
        return op

    def _probabilities(self, env: OpEnv) -> Tensor:
        """Probabilities [T, E], wide."""
        logits = self._logits_of(env)
        return torch.softmax(logits, dim=-1) if self.style.scores == "softmax" else logits.sigmoid_()

    def _logits_of(self, env: OpEnv) -> Tensor:
        """Logits [T, E], wide: the sum of what the product gives and what it is added to."""
        product = self._product_of(env)
        return product if self.start is None else product.add_(wide(env.t[self.start]))

    def _product_of(self, env: OpEnv) -> Tensor:
        """x @ weight.T (+ bias) [T, E], wide, rounded to the compute dtype unless logits are exact."""
        x, weight = env.t[self.x], env.p[self.weight]
        if self.style.exact:
            assert self.bias is None, "no family has a bias of exact logits"
            return wide_product(x, weight)
        matrix = weight.t()
        return wide(x @ matrix if self.bias is None else torch.addmm(env.p[self.bias], x, matrix))

    def _scores(self, env: OpEnv, probabilities: Tensor) -> Tensor:
        """What the choice of experts goes by [T, E]: -inf for experts of groups that are not taken."""
        style, scores = self.style, probabilities
        if style.biased:
            scores = scores + env.p[self.buffers[0]]
        if style.groups_taken < style.groups:
            by_group = scores.unflatten(1, (style.groups, -1))
            best = by_group.topk(style.group_best, dim=-1).values.sum(-1)
            taken = best.topk(style.groups_taken, dim=-1).indices
            groups = torch.arange(style.groups, device=taken.device)
            hidden = (taken[:, :, None] != groups).all(1)  # a mask by comparison: scattering would wait for the device
            scores = by_group.masked_fill(hidden[:, :, None], float("-inf")).flatten(1)
        return scores

    @property
    def _least_sum(self) -> float:
        """What is added to the sum of chosen probabilities before they are divided by it."""
        return 0.0 if self.style.scores == "softmax" else LEAST_SUM

    def forward(self, env: OpEnv) -> None:
        probabilities = self._probabilities(env)
        scores = self._scores(env, probabilities)
        if _has_kernel(probabilities):
            self._route(env, probabilities, scores)
        else:
            self._plain_route(env, probabilities, scores)
        balance = env.chunk.balance
        if balance is not None and balance.collecting and not env.again:
            balance.collect(env.t[self.bounds].diff(), probabilities)

    def _route(self, env: OpEnv, probabilities: Tensor, scores: Tensor) -> None:
        """Choose experts and place rows by kernels: sorts and searches of torch take many launches."""
        from flexengine.kernels import routing  # noqa: PLC0415 (Triton is imported when first used)

        expert, bounds = env.t[self.expert], env.t[self.bounds]
        chosen = torch.empty_like(expert, dtype=torch.float32)
        routing.choose(scores, probabilities, expert, chosen, self.style.scale, self.normalised, self._least_sum)
        counts = bounds.new_empty(1 + routing.num_blocks(expert.numel(), self.num_experts), self.num_experts)
        routing.place_rows(expert, chosen, counts, env.t[self.place], bounds, env.t[self.row_weight].view(-1))

    def _plain_route(self, env: OpEnv, probabilities: Tensor, scores: Tensor) -> None:
        """Choose experts and place rows by torch."""
        expert = scores.topk(self.per_token, dim=-1).indices
        chosen = probabilities.gather(1, expert)
        if self.normalised:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + self._least_sum)
        if self.style.scale != 1.0:
            chosen = chosen * self.style.scale
        by_row, order = expert.flatten().sort(stable=True)
        place = env.t[self.place]
        rows = torch.arange(len(order), device=order.device, dtype=torch.int32)
        place.view(-1).index_copy_(0, order, rows)
        env.t[self.expert].copy_(expert)
        experts = torch.arange(self.num_experts, device=order.device)
        bounds = env.t[self.bounds]
        bounds[0].zero_()
        bounds[1:].copy_(torch.searchsorted(by_row, experts, right=True))
        env.t[self.row_weight].view(-1).copy_(chosen.flatten()[order])

    def backward_input(self, env: OpEnv) -> None:
        probabilities, balance = self._probabilities(env), env.chunk.balance
        added = None if balance is None else balance.gradient()
        grad_logits = env.t[self.grad_logits.name] if self.start is None else env.g[self.start]
        if _has_kernel(probabilities):
            from flexengine.kernels import routing  # noqa: PLC0415

            routing.logits_gradient(
                probabilities, env.t[self.expert], env.t[self.place], env.g[self.row_weight].view(-1),
                None if added is None else added.float(), grad_logits, self.style.scale,
                self.style.scores == "softmax", self.normalised, self._least_sum,
            )  # fmt: skip
        else:
            grad_logits.copy_(self._plain_logits_gradient(env, probabilities, added))
        write_product(env.g[self.x], grad_logits, env.p[self.weight], self.x in env.accumulate)

    def _plain_logits_gradient(self, env: OpEnv, probabilities: Tensor, added: Tensor | None) -> Tensor:
        """Compute the gradient [T, E] of the logits by torch; probabilities may be overwritten."""
        expert = env.t[self.expert].long()
        grad = env.g[self.row_weight].view(-1)[env.t[self.place].flatten().long()].view(expert.shape)
        if self.style.scale != 1.0:
            grad = grad * self.style.scale
        if self.normalised:
            chosen = probabilities.gather(1, expert)
            total = chosen.sum(-1, keepdim=True) + self._least_sum
            grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
        first = torch.arange(len(expert), device=expert.device)[:, None] * self.num_experts
        grad_p = torch.zeros_like(probabilities)
        # in one dimension: with two, torch's deterministic path copies strides from the host and waits
        grad_p.view(-1).scatter_(0, (first + expert).flatten(), grad.flatten().to(grad_p.dtype))
        if added is not None:
            grad_p.add_(added)
        if self.style.scores == "softmax":
            return grad_p.sub_((grad_p * probabilities).sum(-1, keepdim=True)).mul_(probabilities)
        return grad_p.mul_(probabilities).mul_(probabilities.neg_().add_(1.0))

    def backward_weight(self, env: OpEnv) -> None:
        grad_logits = env.t[self.grad_logits.name]
        accumulate_weight_grad(env.gp[self.weight], grad_logits, env.t[self.x], env.first)
        if self.bias is not None:
            accumulate_bias_grad(env.gp[self.bias], grad_logits, env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return () if half == "forward" or self.start is not None else (self.grad_logits,)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        wide_bytes = max(4, compute_bytes)
        copies = 4 + self.style.biased + (self.style.groups_taken < self.style.groups) + (self.start is not None)
        # More than a bias's gradient takes, which has fewer partial sums than tokens.
        return tokens * (copies * self.num_experts * wide_bytes + 10 * self.per_token * 8) + 64 * self.num_experts

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        widened = widened_bytes(tokens, self.num_experts, self.in_features, compute_bytes)
        operands = 4 * self.in_features * (tokens + self.num_experts) if self.style.exact and compute_bytes == 2 else 0
        return max(super().plain_workspace_bytes(tokens, compute_bytes) + operands, widened)

    def _logits(self, tokens: int) -> float:
        return 2.0 * tokens * self.in_features * self.num_experts

    def _work(self, tokens: int, products: int, passes: int, kernels: int) -> Work:
        memory = float(passes * 4 * tokens * self.num_experts + 64 * tokens * self.per_token)
        return Work(products * self._logits(tokens), memory_bytes=memory, kernels=kernels)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        grouped = self.style.groups_taken < self.style.groups
        kernels = 14 + 8 * grouped + (self.start is not None)
        return self._work(tokens, products=1, passes=6 + 6 * grouped, kernels=kernels)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=2, passes=12, kernels=16)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=1, passes=1, kernels=1)


def _has_kernel(probabilities: Tensor) -> bool:
    """Whether kernels route tokens of these probabilities."""
    return use_kernel(probabilities) and probabilities.dtype == torch.float32
