"""Gated units whose backward reads FP8 codes: the plain path against autograd at the rounded values."""

from functools import partial

import pytest
import torch
from engine_helpers import peak_bytes

from flexengine import LoRA
from flexengine.models.keep_dtype import with_keep_dtype
from flexengine.models.lora import with_lora
from flexengine.ops import rounded_glu
from flexengine.ops.glu import GLU
from flexengine.ops.rounded_glu import Codes, GLUFromCodes, RoundedGLU, RoundGateUp
from tests.ops.test_workspace import SMALL, WIDER, calls_of, env_of, spec_of, tiny_config

UNITS = {"silu": torch.nn.functional.silu, "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", UNITS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 3), (7, 300)])
def test_backward_is_that_of_the_rounded_values(make_harness, checks, monkeypatch, tokens, width, activation, dtype):
    monkeypatch.setattr(rounded_glu, "PLAIN_ELEMENTS", 2000)  # several blocks of rows
    h = make_harness("cpu", dtype)
    kept = Codes("codes", "scales", width)
    unit = RoundedGLU(GLU("glu", "gate_up", "a", width, activation), kept)
    rounding, again = RoundGateUp("rounding", "gate_up", kept), GLUFromCodes(unit, kept)
    gate_up, grad_a, chunk = h.randn(tokens, 2 * width, scale=2.0), h.randn(tokens, width), h.chunk((tokens,))
    gate_up[0] = 0.0
    codes = h.run(rounding, chunk, {"gate_up": gate_up}).outputs
    near = codes["codes"].view(torch.float8_e4m3fn).double().view(tokens, 2, width)
    near = near * codes["scales"].double().view(tokens, 2, -1).repeat_interleave(128, 2)[..., :width]
    near = near.view(tokens, 2 * width).requires_grad_()
    # Half a step of 3 bits of mantissa, or of the smallest numbers beside the largest one, 2**-18 of which they are.
    error = (near.detach() - gate_up.double()).abs()
    assert (error <= gate_up.double().abs() / 16 * 1.001 + gate_up.double().abs().amax() * 2.0**-18).all()
    assert not near[0].any()
    gate, up = near.chunk(2, dim=1)
    a = UNITS[activation](gate) * up
    (grad,) = torch.autograd.grad(a, near, grad_a.double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-3}[dtype]
    checks.close(h.run(again, chunk, codes).outputs["a_again"], a.detach(), tolerance, "a again")
    both = rounding.with_next(unit)
    assert both is not None
    outputs = h.run(both, chunk, {"gate_up": gate_up}).outputs
    exact = h.run(unit.untrained(), chunk, {"gate_up": gate_up}).outputs["a"]
    assert torch.equal(outputs["a"], exact)
    assert all(torch.equal(outputs[name], codes[name]) for name in codes)
    env = h.env(unit, chunk, {"gate_up": gate_up}, {}, {"a": grad_a})
    env.t = {name: codes[name] for name in unit.needs_input}
    unit.backward_input(env)
    checks.close(env.g["gate_up"], grad, tolerance, "gradient of gate_up")


@pytest.mark.parametrize("adapters", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_takes_no_more_memory_than_declared(dtype, adapters):
    spec = with_keep_dtype(spec_of(tiny_config(**WIDER)), "fp8")
    spec = with_lora(spec, LoRA(rank=8)) if adapters else spec
    env = env_of(spec, spec.blocks[0], 1024, 128, dtype)
    for op in spec.blocks[0].ops:
        if hasattr(op, "kept"):
            bytes_of = op.workspace_bytes if dtype == torch.float64 else op.plain_workspace_bytes
            allowed = bytes_of(1024, dtype.itemsize) + SMALL
            for half, call in calls_of(op, env):
                taken = peak_bytes(call)
                assert taken <= allowed, f"{op.name}, {half}: {taken} bytes, declared {allowed}"
