"""HardwareProfile: JSON both ways, interpolation, validation."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import flexengine
from flexengine.hardware.curve import Curve
from flexengine.hardware.parts import INTO_SECOND_SHARE, STOCHASTIC_BYTES_PER_S
from flexengine.hardware.presets import PRESETS, preset
from flexengine.hardware.profile import (
    FORMAT,
    HardwareProfile,
    masters_and_states,
    read_profile,
)
from flexengine.ops.attention.choice import AttentionChoice
from flexengine.ops.attention.style import AttentionShape
from flexengine.plan import Numerics
from flexengine.schedule.simulator import cpu_share

GIB = 2**30
CURVES = (Curve("device to host", "bytes", "bytes/s", ((2**16, 9.5e9), (2**28, 5.55e10 / 3))),)


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip_is_exact(name: str):
    assert HardwareProfile.from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_curves_survive_the_round_trip():
    profile = preset("cpu-test").changed(curves=CURVES, matmul_shape=(64, 96))
    assert HardwareProfile.from_json(profile.to_json()) == profile


def test_choices_of_attention_survive_the_round_trip():
    orders = ((512, ("cudnn", "triton")), (2048, ("triton",)))
    choices = (AttentionChoice(AttentionShape(2, 192, 128, 4096, True), orders),)
    profile = preset("cpu-test").changed(attention_choices=choices)
    assert HardwareProfile.from_json(profile.to_json()) == profile
    values = profile.to_dict()
    shapes = ([2, 192, 128, 0], [2, 0, 128, 0, False])
    for wrong in (7, *([[shape, orders]] for shape in shapes), [[[2, 1, 1, 0, True], [[9, ["x"]]]]]):
        with pytest.raises(ValueError, match="attention_choices is"):
            HardwareProfile.from_dict(values | {"attention_choices": wrong})


@pytest.mark.parametrize("field", ["grouped_shares", "head_shares", "attention_slice_shares"])
def test_shares_survive_the_round_trip(field: str):
    profile = preset("cpu-test").changed(**{field: ((1024, 0.5), (4096, 0.9))})
    assert HardwareProfile.from_json(profile.to_json()) == profile
    rate = {
        "grouped_shares": lambda tokens: profile.matmul.grouped_share(tokens, 0.77),
        "head_shares": profile.matmul.head_share,
        "attention_slice_shares": profile.attention.slice_share,
    }[field]
    assert [rate(tokens) for tokens in (1, 2048, 10**6)] == pytest.approx([0.5, 0.7, 0.9])
    unmeasured = preset("cpu-test")
    assert unmeasured.matmul.grouped_share(2048, 0.77) == 0.77
    assert unmeasured.matmul.head_share(2048) == unmeasured.attention.slice_share(2048) == 1.0
    for wrong in ([[0, 0.5]], [[8, 0.0]], [[8, math.inf]], [[8, 0.5], [8, 0.6]], [[8]], [[8, "fast"]]):
        with pytest.raises(ValueError, match=f"{field} is"):
            HardwareProfile.from_dict(profile.to_dict() | {field: wrong})
    without = {name: value for name, value in profile.to_dict().items() if name != field}
    assert HardwareProfile.from_dict(without).values()[field] == ()


def test_matmul_rate_is_linear_in_log_tokens_and_clamped():
    profile = preset("cpu-test").changed(matmul_flops_per_s=((64, 1e9), (256, 3e9), (1024, 4e9)))
    assert profile.matmul.rate(64) == 1e9
    assert profile.matmul.rate(128) == pytest.approx(2e9)  # half way from 64 to 256 in log tokens
    assert profile.matmul.rate(256) == 3e9
    assert profile.matmul.rate(512) == pytest.approx(3.5e9)
    assert profile.matmul.rate(1) == 1e9
    assert profile.matmul.rate(10**9) == 4e9
    with pytest.raises(ValueError, match="tokens is 0"):
        profile.matmul.rate(0)


def test_fp8_rates_are_read_where_there_are_any():
    profile = preset("cpu-test").changed(fp8_matmul_flops_per_s=((64, 1e9), (256, 3e9)))
    assert profile.matmul.fp8_rate(128) == pytest.approx(2e9)
    without = profile.changed(fp8_matmul_flops_per_s=())
    assert HardwareProfile.from_json(without.to_json()) == without
    with pytest.raises(ValueError, match="multiplies no FP8 operands"):
        without.matmul.fp8_rate(128)


def test_attention_rates_are_read_by_sequence_length():
    profile = preset("cpu-test").changed(
        attention_forward_flops_per_s=((512, 1e9), (2048, 3e9)),
        attention_backward_flops_per_s=((512, 2e9),),
    )
    assert profile.attention.forward_rate(1024) == pytest.approx(2e9)
    assert profile.attention.forward_rate(131072) == 3e9
    assert profile.attention.backward_rate(1024) == 2e9
    for rate in (profile.attention.forward_rate, profile.attention.backward_rate):
        with pytest.raises(ValueError, match="seq_len is 0"):
            rate(0)


def test_adamw_rate_of_an_unknown_dtype_is_the_slowest():
    profile = preset("cpu-test").changed(cpu_adamw_parameters_per_s=(("float32", 3e9), ("bfloat16", 2e9)))
    assert profile.host.adamw_rate("float32") == 3e9
    assert profile.host.adamw_rate("float64") == 2e9


def test_what_copies_take_from_updates_is_as_measured():
    known = preset("h200").changed(
        h2d_beside_cpu_bytes_per_s=30e9, d2h_beside_cpu_bytes_per_s=40e9, cpu_share_beside_link=0.65
    )
    assert known.host_rate("bfloat16") == pytest.approx(200e9)
    assert cpu_share(30e9 + 40e9, known.host_rate("bfloat16")) == pytest.approx(0.65)
    assert known.link.only_beside_cpu_bytes_per_s == (30e9, 40e9)
    assert known.changed(h2d_only_beside_cpu_bytes_per_s=45e9).link.only_beside_cpu_bytes_per_s == (45e9, 40e9)
    assert known.changed(cpu_share_beside_link=1.0).host_rate("bfloat16") == pytest.approx(7e12)
    with pytest.raises(ValueError, match=r"cpu_share_beside_link is 1.5, expected a number from 0 to 1"):
        known.changed(cpu_share_beside_link=1.5)


def test_updates_of_stochastic_masters_have_a_rate_of_their_own_or_a_bound():
    update = Numerics(master="stochastic", state="bfloat16").cpu_update
    rates = (("float32", 7e9), ("bfloat16", 10e9))
    fast = preset("cpu-test").changed(cpu_adamw_parameters_per_s=rates)
    assert fast.host.adamw_bytes_per_s("bfloat16") == 180e9
    assert fast.host.adamw_bytes_per_s(update) == STOCHASTIC_BYTES_PER_S
    measured = fast.changed(cpu_adamw_parameters_per_s=(*rates, (update, 8e9)))
    assert measured.host.adamw_bytes_per_s(update) == 14 * 8e9
    assert measured.host_rate(update) == fast.host_rate("bfloat16") == 180e9
    assert measured.host.adamw_into_second_bytes_per_s(update) == pytest.approx(INTO_SECOND_SHARE * 14 * 8e9)
    into = fast.changed(cpu_adamw_parameters_per_s=(*rates, (f"{update} into second planes", 1e9)))
    assert into.host.adamw_into_second_bytes_per_s(update) == 14e9
    assert into.host.adamw_rate("float64") == 7e9  # of those in place
    assert masters_and_states(f"{update} into second planes") == (
        "bfloat16 states, stochastic masters, into second planes"
    )
    slow = fast.changed(cpu_adamw_parameters_per_s=(("bfloat16", 3e9),))
    assert slow.host.adamw_bytes_per_s(update) == slow.host.adamw_bytes_per_s("bfloat16") == 54e9


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
        ("attention_forward_flops_per_s", 1e9),
        ("attention_backward_flops_per_s", ((2048, 1e9), (512, 1e9))),
        ("matmul_shape", (4096,)),
        ("matmul_shape", (4096, 0)),
        ("matmul_shape", 4096),
        ("cpu_adamw_parameters_per_s", ()),
        ("cpu_adamw_parameters_per_s", 1e9),
        ("cpu_adamw_parameters_per_s", (("float32", 0.0),)),
        ("cpu_adamw_parameters_per_s", (("float32", 1e9), ("float32", 2e9))),
        ("cpu_adamw_parameters_per_s", ((32, 1e9),)),
        ("issue_s", -1e-9),
        ("issue_s", math.nan),
        ("cpu_adamw_parameters_per_s", ((["float32"], 1e9),)),
        pytest.param("issue_s", 10**400, id="issue_s-huge"),
        ("curves", [CURVES[0]]),
        ("curves", ("a curve",)),
        ("peak_matmul_flops_per_s", 0),
        ("h2d_bytes_per_s", math.nan),
        ("d2h_bytes_per_s", math.inf),
        ("launch_s", -1e-6),
        ("copy_latency_s", True),
        ("memory_bytes_per_s", "fast"),
        pytest.param("h2d_bytes_per_s", 10**400, id="h2d_bytes_per_s-huge"),
        ("matmul_flops_per_s", ((256, 10**400),)),
        ("matmul_flops_per_s", ((256, 1e9), (10**400, 1e9))),
        ("matmul_shape", (10**400, 1)),
        pytest.param("host_total_bytes", 10**400, id="host_total_bytes-huge"),
        ("gpu_total_bytes", 1.5),
        ("gpu_context_bytes", -1),
        ("gpu_free_bytes", 9 * GIB),
        ("host_available_bytes", 17 * GIB),
    ],
)
def test_bad_field_is_rejected_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        preset("cpu-test").changed(**{field: value})


def test_from_json_names_missing_and_unknown_fields():
    values = preset("cpu-test").to_dict()
    with pytest.raises(ValueError, match="unknown fields colour"):
        HardwareProfile.from_json(json.dumps(values | {"colour": "green"}))
    del values["launch_s"]
    with pytest.raises(ValueError, match="missing fields launch_s"):
        HardwareProfile.from_json(json.dumps(values))
    for text in (
        "[]",
        "{",
        '"h200"',
        "[" * 200_000,
        '{"format": ' + "2" * 5000 + "}",
        '{"format": ' + "2" * 4000 + "}",
    ):
        with pytest.raises(ValueError, match="hardware profile: ") as raised:
            HardwareProfile.from_json(text)
        assert len(str(raised.value)) < 500
    for field in ("matmul_flops_per_s", "attention_forward_flops_per_s", "cpu_adamw_parameters_per_s"):
        with pytest.raises(ValueError, match=f"{field}.*pairs"):
            HardwareProfile.from_dict(preset("cpu-test").to_dict() | {field: [256, 1e9]})
    for curves in ([1], [{"name": "x"}], "x"):
        with pytest.raises(ValueError, match="curves"):
            HardwareProfile.from_dict(preset("cpu-test").to_dict() | {"curves": curves})


@pytest.mark.parametrize("old", [{}, {"format": 1}, {"format": FORMAT + 1}])
def test_another_format_is_refused_with_what_to_do(old: dict):
    values = {name: value for name, value in preset("cpu-test").to_dict().items() if name != "format"}
    with pytest.raises(ValueError, match=f"format {old.get('format', 1)}.*format {FORMAT}.*flexengine probe"):
        HardwareProfile.from_dict(values | old)


def test_unreadable_files_are_named(tmp_path: Path):
    absent, spoilt, binary = tmp_path / "absent.json", tmp_path / "spoilt.json", tmp_path / "binary.json"
    spoilt.write_text(preset("h200").to_json()[:200])
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (absent, spoilt, binary, tmp_path):
        with pytest.raises(ValueError, match=path.name):
            read_profile(path)
    good = tmp_path / "good.json"
    good.write_text(preset("h200").to_json())
    assert read_profile(good) == preset("h200")


def test_bad_curve_is_rejected_by_name():
    for points in ((), ((1, 1.0), (1, 2.0)), ((1, -1.0),), ((0.5, 1.0),)):
        with pytest.raises(ValueError, match="link"):
            Curve("link", "bytes", "bytes/s", points)
    with pytest.raises(ValueError, match="x_unit"):
        Curve("link", "", "bytes/s", ((1, 1.0),))


def test_profiles_and_presets_need_no_torch():
    code = "import sys, flexengine.hardware.presets; sys.exit('torch' in sys.modules)"
    root = Path(flexengine.__path__[0]).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
