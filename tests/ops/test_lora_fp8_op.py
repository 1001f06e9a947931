"""Adapters beside FP8 products: against float64 with the frozen operands rounded to FP8, and under several plans."""

import pytest
import torch
from engine_helpers import ON_GPU, build_engine, make_plan, random_batch, random_weights, streamed_plan, tiny_config
from family_configs import experts

from flexengine.models.matmul_dtype import check_matmul_dtype
from flexengine.ops.base import DropoutDraws
from flexengine.ops.dropout import drop
from flexengine.ops.fp8 import Fp8Linear
from flexengine.ops.fp8_scaling import FORWARD_DTYPE, GRADIENT_DTYPE
from flexengine.ops.linear import Linear
from flexengine.optim import AdamW
from flexengine.options.job import Job
from flexengine.plan import Numerics
from flexengine.request import described
from tests.adapter_ops import adapted, chunk_of, run_ops

TOKENS, INPUTS, OUTPUTS, RANK, SCALE = 37, 48, 80, 3, 2.0
ADAPTED = ((0, 32), (48, 80))
ROWS = torch.cat([torch.arange(*rows) for rows in ADAPTED])


def rounded(x, dtype):
    """What FP8 keeps of x, in float64."""
    largest = torch.finfo(dtype).max
    scale = x.float().abs().max() / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype).double() * scale.double()


def definition(x, grad_y, params, kept):
    """(y without what is added to it, grad_x, grad_A, grad_B), in float64; kept: factors of dropout on x."""
    down, up = params["down"].double(), params["up"].double()
    read = x.double() * kept
    y = rounded(x, FORWARD_DTYPE) @ rounded(params["w"], FORWARD_DTYPE).t()
    grad_x = rounded(grad_y, GRADIENT_DTYPE) @ rounded(params["w"], FORWARD_DTYPE)
    grad_down, grad_up = torch.zeros_like(down), torch.zeros_like(up)
    for number, (start, end) in enumerate(ADAPTED):
        ranks, own = slice(number * RANK, (number + 1) * RANK), slice(number * 32, (number + 1) * 32)
        grad = grad_y[:, start:end].double()
        y[:, start:end] += SCALE * (read @ down[ranks].t()) @ up[own].t()
        grad_x += SCALE * kept * (grad @ up[own] @ down[ranks])
        grad_down[ranks] = SCALE * (grad @ up[own]).t() @ read
        grad_up[own] = SCALE * grad.t() @ (read @ down[ranks].t())
    return y, grad_x, grad_down, grad_up


@pytest.mark.parametrize("adds", [False, True], ids=["writes", "adds"])
@pytest.mark.parametrize(
    ("bias", "residual", "dropout"), [(False, False, 0.0), (True, False, 0.25), (False, True, 0.0)]
)
def test_matches_the_products_of_rounded_operands(make_harness, checks, bias, residual, dropout, adds):
    h = make_harness("cpu", torch.bfloat16)
    linear = Linear("l", "x", "y", INPUTS, OUTPUTS, "w", "b" if bias else None, "r" if residual else None)
    ops = adapted((Fp8Linear(linear, adds),), {"l": ADAPTED}, RANK, SCALE, dropout)
    inputs = {"x": h.randn(TOKENS, INPUTS)} | ({"r": h.randn(TOKENS, OUTPUTS)} if residual else {})
    params = {
        "w": h.randn(OUTPUTS, INPUTS, scale=INPUTS**-0.5), "b": h.randn(OUTPUTS),
        "l.lora_A": h.randn(2 * RANK, INPUTS, scale=0.2), "l.lora_B": h.randn(len(ROWS), RANK, scale=0.2),
    }  # fmt: skip
    draws, grad_y = DropoutDraws(7, 1, 0) if dropout else None, h.randn(TOKENS, OUTPUTS, scale=1e-3)
    kept = torch.ones(TOKENS, INPUTS, dtype=torch.float64)
    if dropout:
        drop(kept, kept, dropout, draws, 0, 0)
    before = {"x": h.randn(TOKENS, INPUTS, scale=1e-3)} if adds else {}
    outputs, grads, sums = run_ops(ops, params, inputs, {"y": grad_y}, chunk=chunk_of(TOKENS, draws), before=before)
    named = {"w": params["w"], "down": params["l.lora_A"], "up": params["l.lora_B"]}
    y, grad_x, grad_down, grad_up = definition(inputs["x"], grad_y, named, kept)
    y = y + params["b"].double() if bias else y
    y = y + inputs["r"].double() if residual else y
    checks.close(outputs["y"], y, 6e-3, "y")  # three roundings to bf16
    checks.close(grads["x"], grad_x + before["x"].double() if adds else grad_x, 6e-3, "grad_x")
    checks.close(sums["l.lora_A"], grad_down, 6e-3, "grad_A")
    checks.close(sums["l.lora_B"], grad_up, 6e-3, "grad_B")
    if residual:
        assert torch.equal(grads["r"], grad_y)


DENSE = tiny_config(hidden_size=64, intermediate_size=96, head_dim=16)
IN_BLOCKS = tiny_config(hidden_size=128, num_key_value_heads=4, intermediate_size=128, head_dim=32, qkv_bias=True)
EXPERTS = experts("qwen3_moe", hidden_size=64, moe_intermediate_size=32, head_dim=16)


@pytest.mark.parametrize(
    ("base", "matmul", "config", "options"),
    [
        ("compute", "fp8-blockwise", DENSE, {"lora_dropout": 0.1}),
        ("fp8", "fp8", DENSE, {"lora_dropout": 0.1}),
        ("fp8", "fp8-blockwise", IN_BLOCKS, {"lora_dropout": 0.1}),
        ("compute", "fp8-blockwise", EXPERTS, {"lora_targets": ["all-linear", "all-experts"]}),
    ],
    ids=["compute", "fp8", "as stored", "experts"],
)
def test_the_plan_changes_no_bit(base, matmul, config, options):
    job = Job(mode="lora", lora_rank=4, matmul_dtype=matmul, base_dtype=base, dtype="bfloat16", **options)
    source = random_weights(config)
    source = source._replace(spec=described(source.spec, job))
    check_matmul_dtype(source.spec, matmul)
    sizes = {"chunk_tokens": 48, "chunks_per_round": 2, "numerics": Numerics(matmul=matmul, base=base)}
    found = []
    for plan in (
        streamed_plan(source.spec, **sizes),
        make_plan(source.spec, groups=[ON_GPU] * len(source.spec.groups), **sizes),
    ):
        engine = build_engine(source, plan, AdamW(lr=1e-2), seed=3)
        losses = [engine.train_step(random_batch(step, [48, 7, 31], 67))[0].loss for step in range(3)]
        found.append((losses, {n: t for n, t in engine.state_dict().items() if ".lora_" in n}))
        engine.close()
    (losses, state), (others, other_state) = found
    assert losses == others
    assert losses[0] != losses[2]
    assert all(torch.equal(tensor, other_state[name]) for name, tensor in state.items())
