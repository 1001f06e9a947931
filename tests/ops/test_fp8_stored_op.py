"""FP8 weights that are multiplied as they are stored: against float64, and beside rounding their decoded values."""

from dataclasses import replace

import pytest
import torch

from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.models.registry import open_model
from flexengine.ops.formats.weight_formats import FORMATS
from flexengine.ops.fp8 import SCALINGS, Fp8Linear
from flexengine.ops.fp8_blocks import BlockScaling, round_squares, square_scales
from flexengine.ops.fp8_scaling import Operand, multiplies_fp8
from flexengine.ops.fp8_stored import as_stored
from flexengine.ops.linear import Linear
from tests.ops.test_fp8_op import rounded

FP8 = FORMATS["fp8"]
SIZES = [(1, 16, 32), (37, 304, 80), (130, 80, 272)]
ROUNDING = 2**-8  # half a step of bf16 at the most, where one output outweighs the others


def layers(h, tokens, d, f, matmul="fp8-blockwise"):
    """A frozen layer that rounds decoded weights and one that takes the stored ones; weights in both forms."""
    plain = Fp8Linear(Linear("proj", "x", "y", d, f, "w"), scaling=SCALINGS[matmul]).untrained()
    layout = FP8.layout(f, d)
    stored, decoded = torch.zeros(layout.num_bytes, dtype=torch.uint8), torch.empty(1, f * d, dtype=torch.bfloat16)
    FP8.encoder(stored, layout).add(0, h.randn(f, d, scale=d**-0.5).float().cpu() * torch.exp(2 * torch.randn(f, 1)))
    FP8.decode(stored[None], layout, decoded)
    exact = FP8.values(layout.views(stored), layout, 0, f).double()
    op = as_stored(plain, "fp8")
    assert op is not None
    return plain, op, stored.to(h.device), decoded.view(f, d).to(h.device), exact


def check(h, checks, tokens, d, f):
    plain, op, stored, decoded, exact = layers(h, tokens, d, f)
    x, grad_y, chunk = h.randn(tokens, d), h.randn(tokens, f, scale=1e-3), h.chunk((tokens,))
    found = h.run(op, chunk, {"x": x}, {"w": stored}, {"y": grad_y})
    wanted = rounded(x, rows=1, columns=128) @ exact.t(), rounded(grad_y, rows=1, columns=128) @ exact
    checks.close(found.outputs["y"], wanted[0], ROUNDING, name="y")
    checks.close(found.grads["x"], wanted[1], ROUNDING, name="grad_x")
    before = h.run(plain, chunk, {"x": x}, {"w": decoded}, {"y": grad_y})
    checks.close(found.outputs["y"], before.outputs["y"], 3 * ROUNDING, name="y of decoded weights")
    checks.close(found.grads["x"], before.grads["x"], 3 * ROUNDING, name="grad_x of decoded weights")
    checks.same_bits(found, h.run(op, chunk, {"x": x}, {"w": stored}, {"y": grad_y}))


@pytest.mark.parametrize(("tokens", "d", "f"), SIZES)
def test_products_are_those_of_what_is_stored(make_harness, checks, tokens, d, f):
    check(make_harness("cpu", torch.bfloat16), checks, tokens, d, f)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "d", "f"), [*SIZES, (1027, 512, 1008), (2048, 2048, 3072)])
def test_products_are_those_of_what_is_stored_on_cuda(make_harness, checks, tokens, d, f):
    if not multiplies_fp8(torch.device("cuda")):
        pytest.skip("this card multiplies no FP8 operands")
    check(make_harness("cuda", torch.bfloat16), checks, tokens, d, f)


def test_rounding_decoded_values_again_gives_the_same_codes(make_harness):
    """Their scales alone lose bits: in bf16, the largest value of a block is off by 2^-8 at the most."""
    h = make_harness("cpu", torch.bfloat16)
    *_, stored, decoded, _ = layers(h, 1, 304, 272)
    fields, (rows, stride) = FP8.layout(272, 304).views(stored), square_scales(272, 304)
    again = Operand(torch.empty_like(fields["codes"]), torch.zeros(rows, stride), "squares")
    round_squares(decoded, again, transposed=False)
    assert torch.equal(again.codes.view(torch.uint8), fields["codes"].view(torch.uint8))
    ratio = again.scales[:, : fields["scales"].shape[1]] / fields["scales"]
    assert 0 < (ratio - 1).abs().max() <= 2**-8


def test_less_is_rounded_and_held(make_harness):
    plain, op, *_ = layers(make_harness("cpu", torch.bfloat16), 1, 512, 256)
    assert sum(spec.num_bytes(64, 2) for spec in plain.scratch("forward")) - 256 * 512 - 4 * 2 * 4 == sum(
        spec.num_bytes(64, 2) for spec in op.scratch("forward")
    )
    sizes = (64, 64, 2)
    assert plain.forward_work(*sizes).memory_bytes - op.forward_work(*sizes).memory_bytes == 256 * 512 * (3 + 4 / 128)
    transposed = 2 * 256 * 512 * (1 + 4 / 128**2)
    rounded_again = 256 * 512 * (3 + 4 / 128)
    saved = plain.backward_input_work(*sizes).memory_bytes - op.backward_input_work(*sizes).memory_bytes
    assert saved == pytest.approx(rounded_again - transposed)


@pytest.mark.parametrize(
    ("matmul", "base", "taken"),
    [("fp8-blockwise", "fp8", True), ("fp8-blockwise-gw-hp", "fp8", True), ("fp8", "fp8", False),
     ("fp8-rowwise-gw-hp", "fp8", False), ("fp8-blockwise", "nf4", False)],
)  # fmt: skip
def test_products_with_the_scales_of_the_format_take_what_is_stored(matmul, base, taken):
    spec = with_fp8_linears(with_frozen(open_model("preset:llama-3.2-1b").spec, ["block.0-3"]), matmul)
    model = with_base_dtype(spec, base)
    frozen = [param for group in model.groups for param in group.params if param.storage != "compute"]
    assert frozen
    assert all(param.multiplied_as_stored == taken for param in frozen)
    layers = [op for layer in model.blocks for op in layer.ops if isinstance(op, Fp8Linear)]
    changed = [op for op in layers if type(op.scaling) is not type(SCALINGS[matmul])]
    assert len(changed) == (4 * 4 if taken else 0)
    assert all(isinstance(op.scaling, BlockScaling) for op in changed)
    assert len({layer.ops for layer in model.blocks}) == 2


def test_what_may_come_in_parts_is_decoded():
    spec = with_fp8_linears(with_frozen(open_model("preset:llama-3.2-1b").spec, ["block.0"]), "fp8-blockwise")
    groups = tuple(replace(group, divisions=2 if group.name == "block.0" else 1) for group in spec.groups)
    frozen = with_base_dtype(replace(spec, groups=groups), "fp8").groups[1]
    assert {param.storage for param in frozen.params} == {"compute", "fp8"}
    assert not any(param.multiplied_as_stored for param in frozen.params)
