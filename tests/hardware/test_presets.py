"""Presets of known cards: names as people type them, sources, and figures that hang together."""

import pytest

from flexengine.hardware.cards import CARDS
from flexengine.hardware.parts import ADAMW_BYTES
from flexengine.hardware.presets import PRESETS, preset, preset_source, with_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("rtx4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("rtx_5090", "rtx-5090"),
        ("RTX PRO 6000", "rtx-pro-6000"),
        ("a100-40", "a100-40"),
        ("A100 40GB", "a100-40"),
        ("NVIDIA A100 80 GiB", "a100-80"),
        ("H100", "h100-80"),
        ("l40s", "l40s"),
        ("H200", "h200"),
        ("A10", "a10"),
        ("RTX A6000", "rtx-a6000"),
        ("NVIDIA DGX Spark", "dgx-spark"),
    ],
)
def test_names_are_forgiving(typed: str, name: str):
    assert preset(typed) is PRESETS[name]


def test_unknown_and_ambiguous_names_list_what_there_is():
    with pytest.raises(ValueError, match="a100-80 or a100-40"):
        preset("A100")
    for typed in ("voodoo2", "", "4090 Ti", "rtx-4090-ti"):
        with pytest.raises(ValueError, match=r"h200, h100-80, .*dgx-spark, cpu-test"):
            preset(typed)
    with pytest.raises(ValueError, match=r"did you mean rtx-4090\?"):
        preset("rtx-4009")


def test_the_profiles_own_name_finds_it():
    for name, card in CARDS.items():
        if name not in ("rtx-pro-6000",):  # its full name has an edition
            assert preset(card.name) is PRESETS[name]


@pytest.mark.parametrize("name", CARDS)
def test_presets_are_plausible(name: str):
    profile, card = PRESETS[name], CARDS[name]
    assert profile.source == "preset"
    rates = [rate for _, rate in profile.matmul.flops_per_s]
    assert rates[0] < rates[-1]
    assert max(rates) < 1.02 * profile.matmul.peak_flops_per_s
    assert profile.matmul.peak_flops_per_s <= card.bf16_flops_per_s
    assert profile.memory.bytes_per_s < card.memory_bytes_per_s
    for length in (512, 2048, 32768):
        assert profile.attention.backward_rate(length) < profile.attention.forward_rate(length)
        assert profile.attention.forward_rate(length) < profile.matmul.peak_flops_per_s
    assert profile.link.h2d_duplex_bytes_per_s < profile.link.h2d_bytes_per_s < profile.host.bytes_per_s
    assert profile.host.adamw_rate("float32") < profile.host.adamw_rate("bfloat16")
    assert profile.memory.gpu_free_bytes + profile.memory.gpu_context_bytes == profile.memory.gpu_total_bytes
    assert profile.curves == ()


@pytest.mark.parametrize(
    ("names", "int8", "stochastic"),
    [
        (
            ("h200", "h100-80", "a100-40", "l40s", "b200", "l4"),
            (4.4e9, 5.5e9),
            (3.7e9, 4.6e9),
        ),  # as probes of 16 cores found
        (("rtx-4090", "rtx-5090", "rtx-3090", "rtx-pro-6000"), (1.9e9, 2.8e9), (1.8e9, 2.5e9)),  # 7 cores' 0.28 to 0.40
    ],
    ids=["servers", "desktops"],
)
def test_arithmetic_bounds_updates_with_8_bit_states(names: tuple[str, ...], int8: tuple, stochastic: tuple):
    for profile in map(preset, names):
        assert int8[0] < profile.host.adamw_rate("int8") < int8[1]
        assert stochastic[0] < profile.host.adamw_rate("int8 stochastic") < stochastic[1]
        bytes_per_s = profile.host.adamw_bytes_per_s("int8")
        assert bytes_per_s == pytest.approx(ADAMW_BYTES["int8"] * profile.host.adamw_rate("int8"))
        assert bytes_per_s <= (1 + 1e-9) * profile.host.bytes_per_s  # nor more than memory allows
        if profile.host.bytes_per_s > 50e9:  # DDR4 is so slow that memory bounds bfloat16 states before
            assert profile.host.adamw_rate("int8") < profile.host.adamw_rate("bfloat16")


@pytest.mark.parametrize("name", CARDS)
def test_every_card_names_its_source(name: str):
    assert preset_source(name).startswith("https://")
    assert preset_source(name.upper()) == CARDS[name].source


def test_published_memory_is_what_the_label_says():
    labels = {"h200": 141, "h100-80": 80, "a100-40": 40, "l40s": 48, "rtx-pro-6000": 96, "rtx-3090": 24}
    labels |= {"l4": 24, "a10": 24, "rtx-a6000": 48, "gh200": 96, "b200": 180, "rtx-3060": 12, "rtx-3080": 10}
    labels |= {"t4": 16, "v100-16": 16, "v100-32": 32, "rtx-2080-ti": 11}
    for name, label in labels.items():  # labels count in 10**9 on data-centre cards and in 2**30 on GDDR ones
        assert 0.85 * label * 1e9 < PRESETS[name].memory.gpu_total_bytes <= label * GIB


def test_with_memory_changes_sizes_only():
    profile = with_memory(preset("h200"), gpu_total_bytes=24 * GIB, host_total_bytes=64 * GIB)
    assert profile.memory.gpu_free_bytes == 24 * GIB - preset("h200").memory.gpu_context_bytes
    assert profile.memory.host_available_bytes == 64 * GIB - preset("h200").memory.host_base_bytes
    assert profile.matmul.flops_per_s == preset("h200").matmul.flops_per_s
    assert with_memory(preset("h200")) == preset("h200")
    with pytest.raises(ValueError, match="CUDA context"):
        with_memory(preset("h200"), gpu_total_bytes=1)
