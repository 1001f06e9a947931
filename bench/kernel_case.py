"""A case of bench/kernels.py: sizes of a model, random operands, a kernel beside its plain path; and the check."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.cross_entropy import logits_blocks
from flexengine.ops.experts.experts import WeightedGLU
from flexengine.ops.glu import GLU
from flexengine.optim.rounding import join_fp32
from flexengine.schedule.fixed_slots import PARTIAL_SQUARES

BF16 = torch.bfloat16
Tensors = dict[str, Tensor]


class Sizes(NamedTuple):
    """Numbers that the cases are made from."""

    tokens: int
    width: int
    ffn_width: int
    heads: int
    kv_heads: int
    head_dim: int
    inv_freq: tuple[float, ...]
    block_tokens: int
    vocab_size: int
    parameters: int
    partial_sums: int = PARTIAL_SQUARES

    @property
    def rotated_heads(self) -> int:
        return self.heads + self.kv_heads

    def cut(self, tokens: int, parameters: int) -> Sizes:
        """The same model on less of everything: what the plain path on the CPU checks in seconds."""
        return self._replace(
            tokens=min(tokens, self.tokens),
            block_tokens=min(tokens, self.block_tokens),
            parameters=min(parameters, self.parameters),
        )


def has_gated_unit(spec: ModelSpec) -> bool:
    """Whether a model has sizes for the cases: those without a gated unit, as GPT-2, have none."""
    return any(isinstance(op, (GLU, WeightedGLU)) for block in spec.blocks for op in block.ops)


def sizes_of(spec: ModelSpec, tokens: int) -> Sizes:
    """The sizes of a model whose blocks have a gated unit, for chunks of `tokens` tokens."""
    ops = [op for block in spec.blocks for op in block.ops]
    ffn = next(op.width for op in ops if isinstance(op, (GLU, WeightedGLU)))
    attention = next(op for op in ops if isinstance(op, CausalAttention))
    block = spec.groups[spec.blocks[0].groups[0]]
    return Sizes(
        tokens=tokens,
        width=spec.hidden_size,
        ffn_width=ffn,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=spec.head_dim,
        inv_freq=spec.tables[0].values,
        block_tokens=logits_blocks(spec.hidden_size, spec.vocab_size).rows(tokens),
        vocab_size=spec.vocab_size,
        parameters=block.numel,
    )


class Random:
    """Random operands of a seed on a device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator, dtype=dtype)

    def integers(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), device=self.device, generator=self.generator)

    def empty(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """Filled with NaN: what a kernel leaves out shows."""
        return torch.full(shape, float("nan"), device=self.device, dtype=dtype)


class Case(NamedTuple):
    """One kernel at one shape. `run` launches the kernel, `plain` computes the same on CPU tensors with the op's own
    path; both write into the tensors that `make` gives. Each of `reads` is read once and each of `writes` written once;
    `num_bytes` is `formula` in numbers.
    """

    name: str
    formula: str
    num_bytes: int
    make: Callable[[Random], Tensors]
    run: Callable[[Tensors], object]
    plain: Callable[[Tensors], object]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    note: str = ""

    @property
    def in_place(self) -> tuple[str, ...]:
        """Tensors that a call changes and the next one would read."""
        return tuple(name for name in self.writes if name in self.reads)


def results_of(case: Case, tensors: Tensors) -> Tensors:
    """What a call has written, as numbers: a split master joined, partial sums and maxima brought together."""
    results = {name: tensors[name] for name in case.writes}
    if "remainder" in results:
        results["weight"] = join_fp32(results["weight"], results.pop("remainder"))
    if "squares" in results:
        results["squares"] = results["squares"].double().sum(0, keepdim=True)
    if "absmax" in results:
        results["absmax"] = results["absmax"].max().reshape(1)
    return results


def check_error(case: Case, device: torch.device, seed: int) -> float:
    """The largest ||kernel - plain|| / ||plain|| over what a call writes; NaN where either is not finite."""
    ours = case.make(Random(device, seed))
    theirs = _on_cpu(ours)
    case.run(ours)
    case.plain(theirs)
    expected = results_of(case, theirs)
    errors = [_relative_error(result, expected[name]) for name, result in results_of(case, ours).items()]
    return max(errors, key=lambda error: (math.isnan(error), error))


def _on_cpu(tensors: Tensors) -> Tensors:
    """Copies in host memory; a view of another tensor becomes a tensor of its own."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
