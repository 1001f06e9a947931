"""Gated units beside FP8 layers with scales for blocks: as one op they have the bits of the layers by themselves."""

from typing import Literal

import pytest
import torch

from flexengine.ops.base import OpEnv
from flexengine.ops.fp8 import SCALINGS, Fp8Linear
from flexengine.ops.fp8_glu import CodedGLU, FedByUnit
from flexengine.ops.glu import GLU
from flexengine.ops.glu_down import GLUDown
from flexengine.ops.linear import Linear
from flexengine.schedule.save_sets import halves_of, in_pairs, leaving_out
from tests.adapter_ops import adapted, backward, chunk_of, forward, run_ops, unwritten

D, F = 48, 256
VALUES = ["fp8-blockwise", "fp8-blockwise-gw-squares", "fp8-blockwise-gw-hp"]


def block(matmul, activation: Literal["silu", "gelu_tanh"] = "silu", bias=False, adds=False, trained=True):
    source = Fp8Linear(Linear("up", "x", "gate_up", D, 2 * F, "w1", "b1" if bias else None), adds, SCALINGS[matmul])
    layer = Fp8Linear(Linear("down", "a", "y", F, D, "w2", residual="r"), scaling=SCALINGS[matmul])
    layers = (source, layer) if trained else (source.untrained(), layer.untrained())
    return layers[0], CodedGLU(GLU("unit", "gate_up", "a", F, activation)), layers[1]


def values(tokens, bias=False):
    given = {"x": torch.randn(tokens, D), "r": torch.randn(tokens, D)}
    params = {"w1": 0.2 * torch.randn(2 * F, D), "w2": 0.1 * torch.randn(D, F)}
    params |= {"b1": torch.randn(2 * F)} if bias else {}
    rounded = [{n: t.bfloat16() for n, t in each.items()} for each in (given, params)]
    return *rounded, {"y": (1e-3 * torch.randn(tokens, D)).bfloat16()}


def run_together(ops, params, inputs, grads, before):
    """What `run_ops` gives, of the ops that a layer's program runs: a is never written, where backward reads it not."""
    tokens, dtype = len(inputs["x"]), torch.bfloat16
    env = OpEnv(dict(inputs), params, {**grads, **before}, {}, chunk_of(tokens))
    env.gp = {n: torch.full(params[n].shape, float("nan")) for op in ops if op.trained for n in op.params}
    needs = {name for halves in halves_of(ops) for name in halves.needs}
    for op in in_pairs(ops):
        forward(leaving_out(op, frozenset({"a"} - needs)), env, dtype)
    assert ("a" in env.t) == ("a" in needs)
    for halves in halves_of(ops):
        assert halves.input is not None
        env.t |= {"a": env.t.get("a", unwritten(ops[1].outputs[0], tokens, dtype))}
        backward(halves.input, env, dtype, over=True)
    return env


def test_a_unit_that_does_the_work_of_adapters_writes_no_codes():
    ops = adapted(block("fp8-blockwise", trained=False), {"down": ((0, D),)})
    assert any(isinstance(op, GLUDown) for op in ops)
    assert not any(isinstance(op, FedByUnit) for op in in_pairs(ops))


@pytest.mark.parametrize("matmul", VALUES)
@pytest.mark.parametrize(
    ("tokens", "activation", "bias", "adds", "trained"),
    [(37, "silu", False, False, True), (130, "gelu_tanh", True, True, True), (37, "silu", False, True, False)],
    ids=["trained", "bias, added gradients", "frozen"],
)
def test_one_op_has_the_bits_of_three(matmul, tokens, activation, bias, adds, trained):
    ops = block(matmul, activation, bias, adds, trained)
    inputs, params, grads = values(tokens, bias)
    before = {"x": torch.randn(tokens, D).bfloat16()} if adds else {}
    outputs, grad_inputs, grad_params = run_ops(ops, params, inputs, grads, before=before, fused=False)
    halves = list(halves_of(ops))
    assert [type(each.input) for each in halves] == ([Fp8Linear, CodedGLU, Fp8Linear] if trained else [FedByUnit])
    env = run_together(ops, params, inputs, grads, {n: g.clone() for n, g in before.items()})
    assert torch.equal(env.t["y"], outputs["y"])
    for name, grad in grad_inputs.items():
        assert torch.equal(env.g[name], grad), name
    assert env.gp.keys() == grad_params.keys()
    for name, grad in grad_params.items():
        assert torch.equal(env.gp[name], grad), name


def test_other_layers_run_by_themselves():
    source, unit, layer = block("fp8-blockwise")
    assert unit.with_next(layer.changed(x="b")) is None
    assert unit.with_next(Fp8Linear(layer)) is None  # one scale
    narrow = CodedGLU(GLU("unit", "gate_up", "a", 80))
    assert narrow.with_next(layer) is None  # blocks of up would begin within one of gate_up
    both = unit.with_next(layer)
    assert both is not None
    assert Fp8Linear(source).with_next(both) is None
    assert source.forward_only().with_next(both) is None
