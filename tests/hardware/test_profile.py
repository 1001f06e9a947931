"""HardwareProfile: JSON both ways, interpolation, validation; and the presets."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import flexengine
from flexengine.hardware.presets import PRESETS, preset, with_memory
from flexengine.hardware.profile import HardwareProfile

GIB = 2**30


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip_is_exact(name: str):
    assert HardwareProfile.from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_matmul_rate_is_linear_in_log_tokens_and_clamped():
    profile = replace(preset("cpu-test"), matmul_flops_per_s=((64, 1e9), (256, 3e9), (1024, 4e9)))
    assert profile.matmul_rate(64) == 1e9
    assert profile.matmul_rate(128) == pytest.approx(2e9)  # half way from 64 to 256 in log tokens
    assert profile.matmul_rate(256) == 3e9
    assert profile.matmul_rate(512) == pytest.approx(3.5e9)
    assert profile.matmul_rate(1) == 1e9
    assert profile.matmul_rate(10**9) == 4e9
    with pytest.raises(ValueError, match="tokens is 0"):
        profile.matmul_rate(0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("device_type", "tpu"),
        ("source", "guessed"),
        ("matmul_flops_per_s", ()),
        ("matmul_flops_per_s", ((256, 1e9), (256, 2e9))),
        ("matmul_flops_per_s", ((512, 1e9), (256, 2e9))),
        ("matmul_flops_per_s", ((0, 1e9),)),
        ("matmul_flops_per_s", ((256, 0.0),)),
        ("matmul_flops_per_s", ((256, 1e9, 1.0),)),
        ("matmul_flops_per_s", 1e9),
        ("peak_matmul_flops_per_s", 0),
        ("h2d_bytes_per_s", math.nan),
        ("d2h_bytes_per_s", math.inf),
        ("launch_s", -1e-6),
        ("copy_latency_s", True),
        ("memory_bytes_per_s", "fast"),
        ("gpu_total_bytes", 1.5),
        ("gpu_context_bytes", -1),
        ("gpu_free_bytes", 9 * GIB),
        ("host_available_bytes", 17 * GIB),
    ],
)
def test_bad_field_is_rejected_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        replace(preset("cpu-test"), **{field: value})


def test_from_json_names_missing_and_unknown_fields():
    values = preset("cpu-test").to_dict()
    with pytest.raises(ValueError, match="unknown fields colour"):
        HardwareProfile.from_json(json.dumps(values | {"colour": "green"}))
    del values["launch_s"]
    with pytest.raises(ValueError, match="missing fields launch_s"):
        HardwareProfile.from_json(json.dumps(values))
    for text in ("[]", "{", '"h200"'):
        with pytest.raises(ValueError):  # noqa: PT011 - JSON's own message for some
            HardwareProfile.from_json(text)
    with pytest.raises(ValueError, match="pairs"):
        HardwareProfile.from_dict(preset("cpu-test").to_dict() | {"matmul_flops_per_s": [256, 1e9]})


def test_preset_names_are_forgiving_and_errors_list_them():
    assert preset("RTX 4090") is preset("rtx4090") is PRESETS["rtx-4090"]
    with pytest.raises(ValueError, match="h200, h100-80, a100-80, rtx-3090, rtx-4090, rtx-5090, cpu-test"):
        preset("voodoo2")


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "cpu-test"])
def test_presets_are_plausible(name: str):
    profile = PRESETS[name]
    rates = [rate for _, rate in profile.matmul_flops_per_s]
    assert rates[0] < rates[-1]
    assert max(rates) < 1.02 * profile.peak_matmul_flops_per_s
    assert profile.attention_backward_flops_per_s < profile.attention_forward_flops_per_s
    assert profile.h2d_duplex_bytes_per_s < profile.h2d_bytes_per_s < profile.host_bytes_per_s
    assert profile.gpu_free_bytes + profile.gpu_context_bytes == profile.gpu_total_bytes


def test_with_memory_changes_sizes_only():
    profile = with_memory(preset("h200"), gpu_total_bytes=24 * GIB, host_total_bytes=64 * GIB)
    assert profile.gpu_free_bytes == 24 * GIB - preset("h200").gpu_context_bytes
    assert profile.host_available_bytes == 64 * GIB - preset("h200").host_base_bytes
    assert profile.matmul_flops_per_s == preset("h200").matmul_flops_per_s
    assert with_memory(preset("h200")) == preset("h200")
    with pytest.raises(ValueError, match="CUDA context"):
        with_memory(preset("h200"), gpu_total_bytes=1)


def test_profiles_and_presets_need_no_torch():
    code = "import sys, flexengine.hardware.presets; sys.exit('torch' in sys.modules)"
    root = Path(flexengine.__path__[0]).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
