"""The fused AdamW kernel gives the bits of the plain-torch reference in every mode."""

import pytest
import torch

from flexengine.kernels.adamw import adamw_update_
from flexengine.optim.adamw import adamw_factors, adamw_update, adamw_update_reference
from flexengine.optim.rounding import split_fp32
from flexengine.random_bits import stream_keys

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MODES = ["fp32", "split", "bf16"]
STATES = [torch.float32, torch.bfloat16]


def make_segment(num_elements, mode, state_dtype, device):
    master = torch.randn(num_elements, device=device)
    remainder = None
    if mode == "split":
        weight, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
        split_fp32(master, weight, remainder)
    else:
        weight = master if mode == "fp32" else master.bfloat16()
    exp_avg = (0.1 * torch.randn(num_elements, device=device)).to(state_dtype)
    exp_avg_sq = (0.01 * torch.rand(num_elements, device=device)).to(state_dtype)
    return {"weight": weight, "remainder": remainder, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def clone(segment):
    return {name: None if tensor is None else tensor.clone() for name, tensor in segment.items()}


def run_kernel(segment, grad, grad_scale, step, seed, element_offset):
    keys = [stream_keys(seed, step, stream) for stream in range(3)]
    adamw_update_(
        *segment.values(), grad, grad_scale, adamw_factors(**SETTINGS, step=step), keys, element_offset
    )  # fmt: skip


def assert_same_bits(actual, expected):
    for name, tensor in expected.items():
        if tensor is not None:
            pattern = torch.int32 if tensor.dtype == torch.float32 else torch.int16
            differing = int((actual[name].view(pattern) != tensor.view(pattern)).sum())
            assert differing == 0, f"{name}: {differing} of {tensor.numel()} elements differ"


def check(num_elements, mode, state_dtype, grad_dtype, device, reference_device, steps=2):
    segment = make_segment(num_elements, mode, state_dtype, device)
    expected = {name: None if t is None else t.to(reference_device).clone() for name, t in segment.items()}
    element_offset = 2**32 - num_elements // 2  # the counter crosses a 32-bit border inside the segment
    for step in range(1, steps + 1):
        grad = torch.randn(num_elements, device=device).to(grad_dtype)
        grad_scale = torch.tensor([0.37], device=device)
        run_kernel(segment, grad, grad_scale, step, 11, element_offset)
        adamw_update_reference(
            **expected, grad=grad.to(reference_device), grad_scale=grad_scale.to(reference_device), **SETTINGS,
            step=step, seed=11, element_offset=element_offset,
        )  # fmt: skip
        assert_same_bits({name: t if t is None else t.to(reference_device) for name, t in segment.items()}, expected)


@pytest.mark.parametrize("grad_dtype", STATES, ids=lambda dtype: f"grad-{dtype}")
@pytest.mark.parametrize("state_dtype", STATES, ids=lambda dtype: f"states-{dtype}")
@pytest.mark.parametrize("mode", MODES)
def test_bits_of_the_reference(device, mode, state_dtype, grad_dtype):
    check(2111, mode, state_dtype, grad_dtype, device, device)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", STATES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_elements", [1 << 22, 1_000_003])
def test_bits_of_the_cpu_on_gpu(gpu, num_elements, mode, state_dtype):
    check(num_elements, mode, state_dtype, torch.bfloat16, gpu, torch.device("cpu"))


@pytest.mark.parametrize("mode", MODES)
def test_tiling_does_not_change_a_bit(device, mode):
    whole = make_segment(1500, mode, torch.bfloat16, device)
    parts = clone(whole)
    grad, grad_scale = torch.randn(1500, device=device), torch.ones(1, device=device)
    run_kernel(whole, grad, grad_scale, 3, 5, 100)
    for begin, end in [(0, 16), (16, 777), (777, 1500)]:
        part = {name: t if t is None else t[begin:end] for name, t in parts.items()}
        run_kernel(part, grad[begin:end], grad_scale, 3, 5, 100 + begin)
    assert_same_bits(parts, whole)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter computes with numpy
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mode", MODES)
def test_a_non_finite_scale_writes_nothing(device, mode, bad):
    segment = make_segment(1030, mode, torch.bfloat16, device)
    before = clone(segment)
    run_kernel(segment, torch.randn(1030, device=device), torch.tensor([bad], device=device), 1, 0, 0)
    assert_same_bits(segment, before)


@pytest.mark.gpu
def test_public_update_launches_the_kernel_on_gpu(gpu):
    segment = make_segment(4096, "split", torch.float32, gpu)
    expected = clone(segment)
    arguments = {"grad": torch.randn(4096, device=gpu), "grad_scale": torch.ones(1, device=gpu), **SETTINGS}
    with torch.cuda.stream(torch.cuda.Stream()):
        adamw_update(**segment, **arguments, step=1, seed=0, element_offset=0)
    torch.cuda.synchronize()
    adamw_update_reference(**expected, **arguments, step=1, seed=0, element_offset=0)
    assert_same_bits(segment, expected)
