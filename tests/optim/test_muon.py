"""Muon against its formula in float64, matrix by matrix; which parameters it takes; what it declares."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flexengine.models.spec import GroupSpec, ParamSpec, WeightSource
from flexengine.optim import Muon
from flexengine.optim.muon import muon_flops, muon_scratch_bytes
from flexengine.optim.rule import Update
from flexengine.optim.rules import rule_of
from flexengine.plan import GroupPlan, Numerics, Request
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layout import Layout
from tests.schedule.small_plans import mixed_model, resident_plan

SETTINGS = Muon(lr=1e-2, weight_decay=0.1)
SHAPES = ((24, 40), (40, 24), (32, 32), (2, 17))
NUMERICS = Numerics("bfloat16", "split", "bfloat16", "bfloat16", optimizer="muon")


def by_formula(weights, momenta, gradients):
    """A step on matrices in float64, written from the paper; returns new weights and momenta."""
    moved, kept = [], []
    for weight, before, grad in zip(weights, momenta, gradients, strict=True):
        momentum = 0.95 * before + 0.05 * grad
        x = 0.05 * grad + 0.95 * momentum
        x = x / (x.norm() + 1e-7)
        if len(x) > x.shape[1]:
            x = x.T
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        x = x if x.shape == weight.shape else x.T
        scale = 0.2 * math.sqrt(max(weight.shape))
        moved.append(weight - SETTINGS.lr * (SETTINGS.weight_decay * weight + scale * x))
        kept.append(momentum)
    return moved, kept


def planes_of(weights, dtype):
    flat = torch.cat([weight.flatten() for weight in weights]).to(dtype)
    return {"weights": flat, "momentum": torch.zeros_like(flat)}


def update_of(planes, gradients, step=1, scale=0.5, shapes=SHAPES):
    """An update of consecutive matrices; the gradient is stored twice as large as it counts."""
    weights = planes["weights"]
    planes = {**planes, "grad": torch.cat([grad.flatten() for grad in gradients]).to(weights.dtype) / scale}
    scratch = torch.empty(max(muon_scratch_bytes(*shape, 8) for shape in shapes), dtype=torch.uint8).fill_(0xFF)
    factor = torch.full((1,), scale, dtype=torch.promote_types(weights.dtype, torch.float32))
    return Update(planes, factor, SETTINGS, SETTINGS.lr, SETTINGS.weight_decay, step, 0, 0, shapes, scratch)


@pytest.mark.parametrize(("compute", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_muon_is_the_published_formula(compute, tolerance):
    torch.manual_seed(0)
    weights = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    momenta = [torch.zeros_like(weight) for weight in weights]
    rule, planes = rule_of("muon", "hidden", "float32", compute), planes_of(weights, getattr(torch, compute))
    for step in range(1, 5):
        gradients = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
        weights, momenta = by_formula(weights, momenta, gradients)
        rule.update(update_of(planes, gradients, step))
    for name, expected in (("weights", weights), ("momentum", momenta)):
        flat = torch.cat([tensor.flatten() for tensor in expected])
        assert (planes[name].double() - flat).norm() <= tolerance * flat.norm(), name


@pytest.mark.parametrize("shape", [(64, 64), (48, 200), (200, 48)])
def test_an_update_has_singular_values_near_one_and_elements_as_large_as_adamws(shape):
    torch.manual_seed(0)
    rule, planes = rule_of("muon", "hidden", "float32", "float32"), planes_of([torch.zeros(shape)], torch.float32)
    update = update_of(planes, [torch.randn(shape)], shapes=(shape,))
    rule.update(update._replace(weight_decay=0.0))
    moved = -planes["weights"].view(shape) / SETTINGS.lr
    assert 0.1 <= float(moved.square().mean().sqrt()) <= 0.3
    values = torch.linalg.svdvals(moved / (0.2 * math.sqrt(max(shape))))
    assert values.max() <= 1.3
    assert values.median() >= 0.6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_changes_nothing(bad):
    torch.manual_seed(0)
    planes = planes_of([torch.randn(shape) for shape in SHAPES], torch.float32)
    before = {name: plane.clone() for name, plane in planes.items()}
    update = update_of(planes, [torch.randn(shape) for shape in SHAPES])
    rule_of("muon", "hidden", "float32", "float32").update(update._replace(grad_scale=torch.tensor([bad])))
    for name, plane in before.items():
        assert torch.equal(planes[name], plane), name


def test_gradients_of_zeros_move_nothing():
    planes = planes_of([torch.ones(shape) for shape in SHAPES], torch.float32)
    update = update_of(planes, [torch.zeros(shape) for shape in SHAPES])
    rule_of("muon", "hidden", "float32", "float32").update(update._replace(weight_decay=0.0))
    assert torch.equal(planes["weights"], torch.ones_like(planes["weights"]))


def test_each_parameter_is_updated_by_exactly_one_rule():
    model = mixed_model(blocks=4)
    for group in model.groups:
        stored = group_storage(group, NUMERICS)
        covered = sorted((s.first_element, s.first_element + s.numel) for s in stored.segments)
        assert covered[0][0] == 0
        assert all(end == start for (_, end), (start, _) in pairwise(covered))
        assert covered[-1][1] == group.numel
        for param in group.params:
            segment, first = stored.segment_of(param.name), stored.offsets[param.name]
            assert segment.first_element <= first
            assert first + param.numel <= segment.first_element + segment.numel
            hidden = group.slot_class == "block" and param.kind == "matrix"
            assert segment.rule.name == ("Muon" if hidden else "AdamW"), param.name
            assert segment.decays == (param.kind == "matrix")


def test_sources_and_experts_are_matrices_of_their_own():
    model = mixed_model(blocks=2, hidden=64)
    dense, experts = (group_storage(group, NUMERICS).segments[0].matrices for group in model.groups[1:3])
    assert dense == ((64, 64), (32, 64), (32, 64), (64, 64), (192, 64), (192, 64), (64, 192))
    assert experts[4:] == ((5, 64), *((128, 64), (128, 64)) * 5, *((64, 128),) * 5)


def test_a_checkpoint_with_fused_tensors_has_the_same_matrices():
    sources = tuple(WeightSource(name, (8, 6)) for name in ("gate", "up"))
    param = ParamSpec("gate_up", (16, 6), sources, fused=WeightSource("gate_up", (16, 6)))
    renamed = replace(param, sources=(param.fused,))
    for one in (param, renamed):
        group = GroupSpec("block.0", "block", (one,))
        assert group_storage(group, NUMERICS).segments[0].matrices == ((8, 6), (8, 6))


def test_rows_that_stand_alone_are_adamws():
    params = tuple(
        ParamSpec(name, shape, (WeightSource(name, shape),)) for name, shape in (("conv", (32, 1, 4)), ("o", (8, 6)))
    )
    stored = group_storage(GroupSpec("block.0", "block", params), NUMERICS)
    assert [(s.name, s.rule.name, s.numel) for s in stored.segments] == [
        ("hidden", "Muon", 48),
        ("matrix", "AdamW", 128),
    ]
    assert list(stored.plane_bytes) == ["weights", "remainder", "momentum", "exp_avg", "exp_avg_sq", "grad"]


def test_tiles_hold_whole_matrices():
    segment = group_storage(mixed_model().groups[1], NUMERICS).segments[0]
    sizes = [rows * columns for rows, columns in segment.matrices]
    assert [count for _, count in segment.tiles(1)] == sizes
    assert segment.tiles(1 << 20) == [(0, segment.numel)]
    for most in (1, 5000, 13000):
        tiles = segment.tiles(most)
        found = [shape for start, count in tiles for shape in segment.matrices_in(start, count)]
        assert tuple(found) == segment.matrices
        assert all(count <= max(most, *sizes) for _, count in tiles)
        assert segment.tile_elements(most) == max(count for _, count in tiles)


def test_the_cpu_updates_no_matrices_of_muon():
    model = mixed_model()
    plan = resident_plan(model, Request(64, 128, 1 << 30, 1 << 30, numerics=NUMERICS))
    groups = [replace(home) for home in plan.groups]
    groups[1] = GroupPlan(update="cpu")
    with pytest.raises(ValueError, match=r"block\.0 has matrices that are updated by products on the GPU"):
        Layout(model, replace(plan, groups=tuple(groups)))


def test_work_is_that_of_the_products():
    assert muon_flops(4096, 14336) == 5 * (2 * 2 * 4096 * 4096 * 14336 + 2 * 4096**3)
    assert muon_flops(14336, 4096) == muon_flops(4096, 14336)
    assert muon_scratch_bytes(4096, 14336, 2) == 2 * 2 * (4096 * 14336 + 4096 * 4096)


@pytest.mark.parametrize("values", [{"momentum": 1.0}, {"eps": 0.0}, {"betas": (0.9, 1.5)}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=f"Muon {'beta2' if 'betas' in values else next(iter(values))}"):
        Muon(**values)
