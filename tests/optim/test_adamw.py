"""AdamW against torch.optim.AdamW, and the relations between its master-weight modes."""

import pytest
import torch

from flexengine.optim import AdamW
from flexengine.optim.adamw import adamw_update, adamw_update_reference
from flexengine.optim.rounding import join_fp32, split_fp32
from flexengine.optim.rule import Update

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def update_of(planes, scale, step=1, seed=3, element_offset=0, **changes):
    settings = AdamW(**{**SETTINGS, **changes})
    return Update(planes, scale, settings, settings.lr, settings.weight_decay, step, seed, element_offset)


def run_steps(segment, gradients, scale=1.0, update=adamw_update_reference, scale_dtype=torch.float32, **extra):
    factor = torch.tensor([scale], dtype=scale_dtype)
    for step, grad in enumerate(gradients, start=1):
        update(update_of({**segment, "grad": grad}, factor, step, **extra))


def segment_of(weights, state_dtype=torch.float32):
    zeros = torch.zeros(weights.shape, dtype=state_dtype)
    return {"weights": weights, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def split_segment(master):
    weights, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split_fp32(master, weights, remainder)
    return {**segment_of(weights), "remainder": remainder}


def clone(segment):
    return {name: t.clone() for name, t in segment.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twenty_steps_of_torch_adamw(dtype, tolerance, weight_decay):
    initial = torch.randn(1001, dtype=dtype)
    gradients = [torch.randn(1001, dtype=dtype) for _ in range(20)]
    parameter = torch.nn.Parameter(initial.clone())
    optimizer = torch.optim.AdamW([parameter], **{**SETTINGS, "weight_decay": weight_decay}, foreach=False)
    for grad in gradients:
        parameter.grad = 0.5 * grad
        optimizer.step()
    segment = segment_of(initial.clone(), state_dtype=dtype)
    run_steps(segment, gradients, scale=0.5, scale_dtype=dtype, weight_decay=weight_decay)
    state = optimizer.state[parameter]
    pairs = {"weights": parameter.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    for name, expected in pairs.items():
        assert (segment[name] - expected).norm() <= tolerance * expected.norm(), name


def test_split_master_has_the_bits_of_a_float32_master():
    initial, gradients = torch.randn(1001), [torch.randn(1001).bfloat16() for _ in range(20)]
    whole, split = segment_of(initial.clone()), split_segment(initial)
    run_steps(whole, gradients)
    run_steps(split, gradients)
    assert torch.equal(join_fp32(split["weights"], split["remainder"]), whole["weights"])
    assert torch.equal(split["exp_avg_sq"], whole["exp_avg_sq"])
    assert (split["weights"].float() - whole["weights"]).abs().max() <= 2**-8 * whole["weights"].abs().max()


def test_bf16_master_follows_the_float32_one_without_drift():
    """Updates of a tenth of a bf16 unit vanish with nearest rounding; in expectation stochastic rounding keeps them."""
    n, steps = 20_000, 20
    gradients = [torch.ones(n)] * steps
    exact, rounded = segment_of(torch.ones(n)), segment_of(torch.ones(n, dtype=torch.bfloat16))
    run_steps(exact, gradients, lr=2**-8 / 10, weight_decay=0.0)
    run_steps(rounded, gradients, lr=2**-8 / 10, weight_decay=0.0)
    moved = 1.0 - float(exact["weights"].mean())
    assert moved == pytest.approx(steps * 2**-8 / 10, rel=1e-3)
    assert 1.0 - float(rounded["weights"].double().mean()) == pytest.approx(moved, rel=0.02)


def test_bf16_states_are_unbiased():
    """A constant gradient: the mean of the moments follows the exact ones; nearest rounding would freeze early."""
    n, gradients = 20_000, [torch.full((20_000,), 0.3)] * 60
    exact, rounded = segment_of(torch.ones(n)), segment_of(torch.ones(n), state_dtype=torch.bfloat16)
    run_steps(exact, gradients, betas=(0.9, 0.999))
    run_steps(rounded, gradients, betas=(0.9, 0.999))
    for name in ("exp_avg", "exp_avg_sq"):
        assert float(rounded[name].double().mean()) == pytest.approx(float(exact[name][0]), rel=1e-3)


@pytest.mark.parametrize("mode", ["fp32", "split", "bf16", "fp64"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_scale_changes_nothing(mode, bad):
    master = torch.randn(65)
    if mode == "split":
        segment = split_segment(master)
    elif mode == "fp64":
        segment = segment_of(master.double(), state_dtype=torch.float64)
    else:
        segment = segment_of(master if mode == "fp32" else master.bfloat16(), state_dtype=torch.bfloat16)
    before = clone(segment)
    run_steps(segment, [torch.randn(65)], scale=bad)
    assert all(torch.equal(t, segment[name]) for name, t in before.items())


@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize("mode", ["split", "bf16"])
def test_the_public_update_has_the_bits_of_the_reference(mode, path, monkeypatch):
    """Without native code it walks CPU segments in tiles: the bits are those of one call."""
    monkeypatch.setenv("FLEXENGINE_NATIVE", "1" if path == "native" else "0")
    monkeypatch.setattr("flexengine.optim.adamw._TILE_ELEMENTS", 64)
    master, gradients = torch.randn(1001), [torch.randn(1001) for _ in range(3)]
    states = torch.bfloat16 if mode == "bf16" else torch.float32
    whole = split_segment(master) if mode == "split" else segment_of(master.bfloat16(), state_dtype=states)
    tiled = clone(whole)
    run_steps(whole, gradients, element_offset=2**32 - 70)
    run_steps(tiled, gradients, element_offset=2**32 - 70, update=adamw_update)
    assert all(torch.equal(t, tiled[name]) for name, t in whole.items())


def test_seed_and_step_choose_the_random_bits():
    results = []
    for seed in (1, 1, 2):
        segment = segment_of(torch.ones(1000, dtype=torch.bfloat16))
        run_steps(segment, [torch.ones(1000)], seed=seed, lr=1e-4)
        results.append(segment["weights"])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be finite and at least 0, got -1.0"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": 0.0}, "eps must be finite and above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be finite and at least 0, got -0.1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        AdamW(**settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step counts from 1, got 0"),
        ({"weights": torch.ones(4, dtype=torch.float16)}, "weight must be bfloat16, float32 or float64"),
        ({"remainder": torch.ones(4, dtype=torch.int16)}, "remainder must be int16 beside a bfloat16 weight"),
        ({"exp_avg": torch.ones(4, dtype=torch.bfloat16)}, "states must both be"),
        ({"grad": torch.ones(5)}, r"grad must be contiguous with shape \[4\], got shape \[5\]"),
        ({"grad": torch.ones(8)[::2]}, "must be contiguous"),
        ({"grad": torch.ones(4, dtype=torch.int32)}, "grad must be a float tensor"),
        ({"grad_scale": torch.ones(2)}, "grad_scale must be one float32 or float64"),
    ],
)
def test_refuses_other_shapes_and_dtypes(change, message):
    given = {**segment_of(torch.ones(4)), "grad": torch.ones(4), "grad_scale": torch.ones(1), "step": 1, **change}
    scale, step = given.pop("grad_scale"), given.pop("step")
    with pytest.raises(ValueError, match=message):
        adamw_update(update_of(given, scale, step))
