"""Gated units between layers with adapters, whose backward reads FP8 codes of the sums: ops and kernels against
autograd in float64, where rounding is the identity for gradients."""

import pytest
import torch

from flexengine import LoRA
from flexengine.kernels import rounded_lora_glu
from flexengine.models.keep_dtype import with_keep_dtype
from flexengine.models.lora import with_lora
from flexengine.models.registry import build_model
from flexengine.ops import rounded_glu
from flexengine.ops.adapters.lora import LoraDown
from flexengine.ops.base import OpEnv
from flexengine.ops.glu import GLU
from flexengine.ops.linear import Linear
from flexengine.ops.rounded_glu import LARGEST, LEAST_ABSMAX, RoundedGLU, RoundGateUp, RoundingGLU
from tests.adapter_ops import chunk_of, run_ops, unwritten
from tests.kernels.test_lora_glu_kernel import UNITS
from tests.kernels.test_rounded_glu_kernel import buffers, rounded

TOKENS, WIDTH, HIDDEN, RANK = 35, 150, 24, 3
CONFIG = {
    "model_type": "llama", "vocab_size": 11, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 1, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 64,
}  # fmt: skip
BOTH, ONE, BEHIND = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj"), ("down_proj",)


def ffn(targets):
    """The ops of a block from the layer of gate and up on, and the shapes of its parameters."""
    spec = with_lora(with_keep_dtype(build_model("tiny", CONFIG), "fp8"), LoRA(targets, rank=RANK, alpha=2.0 * RANK))
    layer = spec.blocks[0]
    first = next(i for i, op in enumerate(layer.ops) if op.name.startswith("gate_up_proj"))
    shapes = {
        local: next(p.shape for p in spec.groups[group].params if p.name == name) for local, group, name in layer.params
    }
    names = {name for op in layer.ops[first:] for name in (*op.params, getattr(op, "weight", None)) if name}
    return layer.ops[first:], {name: shapes[name] for name in sorted(names)}


def given(tokens, shapes, dtype):
    params = {name: (torch.randn(shape).double() * shape[-1] ** -0.5).to(dtype) for name, shape in shapes.items()}
    return params, {name: torch.randn(tokens, HIDDEN).to(dtype) for name in ("h2", "x1", "grad_y")}


def run(ops, params, inputs, fused):
    """Outputs of unit and last layer, codes, and gradients, where backward reads codes alone.

    fused: forward writes the codes in one pass with the unit; else they are computed by themselves.
    """
    last, codes = ops[-1].y, next(op for op in ops if isinstance(op, RoundGateUp)).kept[:2]
    lost = [name for name in ("gate_up", "a", "down_proj.low") if name in {s.name for op in ops for s in op.outputs}]
    given = {name: inputs[name] for name in ("h2", "x1")}
    outputs, grads, sums = run_ops(ops, params, given, {last: inputs["grad_y"]}, lost=lost, fused=fused)
    return {name: outputs[name] for name in ("a", last, *codes)} | {"grad_h2": grads["h2"]} | sums


def decoded(codes, scales):
    values = codes.view(torch.float8_e4m3fn).double().view(len(codes), 2, -1)
    by_column = scales.double().view(len(codes), 2, -1).repeat_interleave(128, 2)[..., : values.shape[2]]
    return (values * by_column).view(codes.shape)


def reference(ops, params, inputs, kept):
    """Outputs and gradients in float64; the codes' values take the place of the sums, whose gradient theirs is."""
    linear, last = (op for op in ops if isinstance(op, Linear))
    unit, of = (
        next(op for op in ops if isinstance(op, GLU)),
        {op.adapters.name: op.adapters for op in ops if isinstance(op, LoraDown)},
    )
    leaves = {name: tensor.double().requires_grad_() for name, tensor in params.items()}
    h, x1, grad_y = (inputs[name].double().requires_grad_() for name in ("h2", "x1", "grad_y"))

    def layer(op, x):
        y = x @ leaves[op.weight].t()
        if op.name not in of:
            return y
        own = of[op.name]
        adapters = (leaves[own.down].split(RANK), leaves[own.up].split(own.widths))
        for rows, down, up in zip(own.rows, *adapters, strict=True):
            added = own.scale * (x @ down.t()) @ up.t()
            y = y + torch.nn.functional.pad(added, (rows.start, y.shape[1] - rows.stop))
        return y

    def output(total):
        gate, up = total.chunk(2, dim=1)
        return UNITS[unit.activation](gate) * up

    total = layer(linear, h)
    a = output(total)
    near = total + (decoded(*kept) - total).detach()
    y = x1 + layer(last, output(near))
    wanted = {name: leaf for name, leaf in leaves.items() if ".lora_" in name} | {"grad_h2": h}
    found = torch.autograd.grad(y, list(wanted.values()), grad_y)
    exact = {"a": a.detach(), last.y: (x1 + layer(last, a)).detach()}
    return total.detach(), exact | dict(zip(wanted, found, strict=True))


@pytest.mark.parametrize(
    ("dtype", "kernel", "targets"),
    [
        (torch.float64, False, BOTH),
        (torch.float32, False, BEHIND),
        (torch.float32, True, ONE),
        (torch.bfloat16, True, BOTH),
        (torch.float32, True, BEHIND),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_rounded_sums(dtype, kernel, targets, checks, monkeypatch):
    for choice in ("products.use_product_kernel", "adapters.lora_grads.use_product_kernel", "glu.use_kernel"):
        monkeypatch.setattr(f"flexengine.ops.{choice}", lambda _: kernel)
    monkeypatch.setattr(rounded_glu, "PLAIN_ELEMENTS", 5000)  # several blocks of rows
    ops, shapes = ffn(targets)
    params, inputs = given(TOKENS, shapes, dtype)
    found, apart = (run(ops, params, inputs, fused) for fused in (True, False))
    assert all(torch.equal(found[name], tensor) for name, tensor in apart.items())
    codes = next(op for op in ops if isinstance(op, RoundGateUp)).kept
    kept = found.pop(codes.codes), found.pop(codes.scales)
    total, expected = reference(ops, params, inputs, kept)
    of_sums = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]  # gate_up is rounded to bf16
    checks.assert_close(decoded(*kept), rounded(total), of_sums, "codes")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        checks.assert_close(found[name], tensor, {torch.bfloat16: 1e-2}.get(dtype, 1e-5), name)


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "kernel"])
def test_without_adapters_nothing_is_added(kernel, monkeypatch):
    monkeypatch.setattr("flexengine.ops.glu.use_kernel", lambda _: kernel)
    rounding, unit = (next(op for op in ffn(BOTH)[0] if isinstance(op, kind)) for kind in (RoundGateUp, GLU))
    bare = RoundingGLU(RoundGateUp("bare", "gate_up", rounding.kept), RoundedGLU(unit, rounding.kept))
    env = OpEnv({"gate_up": torch.randn(5, 2 * WIDTH)}, {}, {}, {}, chunk_of(5), adapters=False)
    low, up = unit.before.low, unit.before.matrix
    env.t[low], env.p[up] = torch.full((5, 2 * RANK), torch.nan), torch.ones(2 * WIDTH, RANK)  # nobody wrote low
    found = []
    for op in (rounding.with_next(unit), bare):
        env.t |= {spec.name: unwritten(spec, 5, torch.float32) for spec in op.outputs}
        op.forward(env)
        found.append([env.t[spec.name] for spec in op.outputs])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "width", "rank"), [(4097, 14336, 16), (33, 12345, 70)])
def test_matches_float64_on_gpu(checks, gpu, tokens, width, rank, dtype):
    gate_up, low, up = (checks.normal(*shape, dtype=dtype, device=gpu) for shape in ((tokens, 2 * width),
                        (tokens, 2 * rank), (2 * width, rank)))  # fmt: skip
    up.mul_(rank**-0.5)
    halves = ((0, 0, 0), (width, rank, width))
    both, alone = buffers(tokens, width, gpu), buffers(tokens, width, gpu)
    outs = [checks.empty(tokens, width, dtype=dtype, device=gpu) for _ in range(2)]
    rounded_lora_glu.round_sums(gate_up, low, up, halves, *both, LARGEST, LEAST_ABSMAX, outs[0], "silu")
    rounded_lora_glu.round_sums(gate_up, low, up, halves, *alone, LARGEST, LEAST_ABSMAX)
    rounded_lora_glu.glu_forward(gate_up, low, up, halves, outs[1], "silu")
    assert torch.equal(outs[0], outs[1])
    assert all(torch.equal(one, other) for one, other in zip(both, alone, strict=True))
    total = gate_up.double() + torch.cat([low[:, at : at + rank].double() @ up[row : row + width].double().t()
                                          for _, at, row in halves], dim=1)  # fmt: skip
    checks.assert_close(decoded(*both), rounded(total), 1e-3, "codes")
    grad_out, grad_low = (checks.normal(tokens, columns, dtype=dtype, device=gpu) for columns in (width, rank))
    down, grad = checks.normal(rank, width, dtype=dtype, device=gpu), torch.empty_like(gate_up)
    rounded_lora_glu.glu_backward_from_codes(grad_out, *both, grad, "silu", (grad_low, down))
    near = decoded(*both).requires_grad_()
    gate, other = near.chunk(2, dim=1)
    out = UNITS["silu"](gate) * other
    (expected,) = torch.autograd.grad(out, near, grad_out.double() + grad_low.double() @ down.double())
    checks.assert_close(grad, expected, checks.TOLERANCE[dtype], "grad_gate_up")


def test_refuses_adapters_of_other_ranks(device):
    gate_up, grad_out, low, up = (torch.zeros(shape, device=device) for shape in ((4, 16), (4, 8), (4, 3), (16, 3)))
    kept, behind = buffers(4, 8, device), (low, torch.zeros(3, 7, device=device))
    with pytest.raises(ValueError, match=r"down must have shape \[3, 8\], got \[3, 7\]"):
        rounded_lora_glu.glu_backward_from_codes(grad_out, *kept, gate_up, "silu", behind)
    with pytest.raises(ValueError, match="lie outside"):
        rounded_lora_glu.round_sums(gate_up, low, up, ((0, 1, 0),), *kept, LARGEST, LEAST_ABSMAX)
