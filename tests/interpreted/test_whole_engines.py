"""Whole engines whose ops run the GPU's kernels, in Triton's interpreter: what plain torch gives, under any plan.

The cheapest cases that run most kernels run with all tests or with `make thorough`; `pytest -m interpreter` runs all,
which takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    relative_error,
    same_bits,
    streamed_plan,
    tiny_config,
    worst_error,
)
from family_configs import CASES, FAMILY_CASES
from thorough import cases

from flexengine import LoRA
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.keep_dtype import with_coded_inputs, with_keep_dtype
from flexengine.models.lora import with_lora
from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.models.registry import ModelSource
from flexengine.models.spec import ModelSpec
from flexengine.ops.glu import GLU
from flexengine.plan import KeepDtype, Numerics, Plan

BF16 = Numerics("bfloat16", "split", "bfloat16", "float32")
WIDE = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
CUT = {"chunk_tokens": 8, "chunks_per_round": 2, "max_seq_len": 12}
"""Sequences of more than 8 tokens are cut into slices; the batch takes two rounds, the second of which adds up."""
LENGTHS = [7, 12, 3]
IN_FLOAT32, IN_BF16 = 2e-5, 3e-2
"""Largest relative errors of a gradient: sums in another order; values rounded to 8 bits an op earlier."""


class Whole(NamedTuple):
    """A model, its numerics and what else its plans decide."""

    source: ModelSource
    numerics: Numerics = FLOAT32
    decisions: dict = {}  # noqa: RUF012 (nobody writes to it)

    def plan(self, make: Callable[..., Plan]) -> Plan:
        return make(self.source.spec, **CUT, numerics=self.numerics, **self.decisions)


def adapted(config: dict, numerics: Numerics = BF16, **options) -> Whole:
    return with_adapters(Whole(random_weights(config), numerics), **options)


def with_adapters(whole: Whole, **options) -> Whole:
    return changed(whole, with_lora(whole.source.spec, LoRA(rank=2, **options)))


def changed(whole: Whole, spec: ModelSpec) -> Whole:
    return whole._replace(source=whole.source._replace(spec=spec))


def stored(base: str, **options) -> Whole:
    whole = adapted(tiny_config(**WIDE), replace(BF16, base=base), **options)
    return changed(whole, with_base_dtype(whole.source.spec, base))


def kept(keep: KeepDtype = "fp8") -> Whole:
    whole = Whole(random_weights(tiny_config()), replace(BF16, keep=keep))
    return changed(whole, with_coded_inputs(with_keep_dtype(whole.source.spec, keep), keep))


def without_fp8(intermediate_size: int = 64) -> Whole:
    config = tiny_config(**{**WIDE, "intermediate_size": intermediate_size}, attention_bias=True)
    return Whole(random_weights(config), BF16)


def fp8(matmul: str = "fp8", intermediate_size: int = 64) -> Whole:
    whole = without_fp8(intermediate_size)._replace(numerics=replace(BF16, matmul=matmul))
    return changed(whole, with_fp8_linears(whole.source.spec, matmul))


def short(family: str, **changes: int) -> Whole:
    """With a layer of each kind, no more."""
    return Whole(random_weights({**CASES[FAMILY_CASES[family]], "num_hidden_layers": 2, **changes}))


def in_parts() -> Whole:
    return Whole(random_weights(CASES[FAMILY_CASES["qwen3_moe"]]), decisions={"in_parts": True, "touched_only": True})


KINDS: dict[str, Callable[[], Whole]] = {
    **{family: lambda name=name: Whole(random_weights(CASES[name])) for family, name in FAMILY_CASES.items()},
    "bf16": lambda: Whole(random_weights(tiny_config()), BF16),
    "qwen3_5_text, two layers": lambda: short("qwen3_5_text", full_attention_interval=2),
    "gpt_oss, two layers": lambda: short("gpt_oss"),
    "lora with dropout on nf4": lambda: stored("nf4", dropout=0.25),
    "lora with dropout": lambda: adapted(tiny_config(), dropout=0.25),
    "dora": lambda: adapted(tiny_config(), use_dora=True),
    "lora of experts": lambda: adapted(CASES[FAMILY_CASES["qwen3_moe"]], targets=("all-experts",)),
    "lora on nf4": lambda: stored("nf4"),
    "lora on int8": lambda: stored("int8"),
    "fp8 products": fp8,
    "fp8 products by rows": lambda: fp8("fp8-rowwise-gw-hp"),
    "fp8 products by blocks": lambda: fp8("fp8-blockwise", 128),  # of which a unit has one
    "mxfp8 products": lambda: fp8("mxfp8"),
    "activations and inputs kept in fp8": lambda: kept("fp8-all"),
    "lora, activations kept in fp8": lambda: with_adapters(kept()),
    "experts in parts": in_parts,
}
WITH_ALL_TESTS = ("lora with dropout on nf4", "gpt2")
MORE = (
    "qwen3_5_text, two layers",
    "deepseek_v2",
    "gpt_oss, two layers",
    "qwen2_moe",
    "activations and inputs kept in fp8",
    "experts in parts",
)
"""They run most kernels in the least time; those of FP8 products alone take minutes, and other formats of a base differ
in the kernel that decodes them, which tests/kernels/test_decode_weights_kernel.py has."""


def shown(whole: Whole, make: Callable[..., Plan]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a batch, and no NaN of a buffer that was read before it was written."""
    engine = build_engine(whole.source, whole.plan(make))
    batch = random_batch(0, LENGTHS, whole.source.spec.vocab_size)
    found = engine.fwd_bwd(batch).loss, engine.gradients()
    engine.close()
    return found


def check(kind: str, monkeypatch: pytest.MonkeyPatch) -> Whole:
    whole = KINDS[kind]()
    loss, gradients = shown(whole, streamed_plan)
    with monkeypatch.context() as patched:
        patched.setenv("FLEXENGINE_INTERPRET_KERNELS", "0")
        plain_loss, plain_gradients = shown(whole, streamed_plan)
    exact = whole.numerics.compute == "float32"
    assert loss == pytest.approx(plain_loss, rel=1e-5 if exact else 1e-2)
    error, name = worst_error(gradients, plain_gradients)
    if whole.numerics.matmul != "compute":
        check_rounding(gradients, plain_gradients, whole.source.spec)
    else:
        assert error <= (IN_FLOAT32 if exact else IN_BF16), f"gradient of {name}: relative error {error:.1e}"
    return whole


def check_rounding(gradients: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], spec: ModelSpec) -> None:
    """One bit of an operand's largest element is its scale, and so the rounding of all of it to FP8: kernels and plain
    torch may differ by as much as each of them does from products without FP8, and no more.

    All gradients are looked at together: single ones that nearly cancel, as of a bias of keys, hold little but noise.
    """
    width = next(op.width for op in spec.blocks[0].ops if isinstance(op, GLU))
    _, unrounded = shown(without_fp8(width), streamed_plan)
    together = [torch.cat([found[name].flatten() for name in unrounded]) for found in (gradients, plain, unrounded)]
    own, other, apart = (relative_error(together[a], together[b]) for a, b in ((0, 2), (1, 2), (0, 1)))
    assert own <= 1.25 * other, f"relative error {own:.1e}, plain torch {other:.1e}"
    assert apart <= 1.5 * other, f"they differ by {apart:.1e}, plain torch from products without FP8 by {other:.1e}"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", cases((*WITH_ALL_TESTS, *MORE), WITH_ALL_TESTS))
def test_kernels_give_what_plain_torch_does(kind, monkeypatch):
    check(kind, monkeypatch)


@pytest.mark.interpreter
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_give_what_plain_torch_does_and_plans_change_no_bit(kind, monkeypatch):
    whole = check(kind, monkeypatch)
    (loss, gradients), (resident_loss, resident_gradients) = shown(whole, streamed_plan), shown(whole, make_plan)
    assert loss == resident_loss
    same_bits(gradients, resident_gradients)
