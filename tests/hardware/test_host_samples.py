"""Rates of the host over several probes: medians of the last ones, none of a file that holds anything else."""

import json
from pathlib import Path

import pytest

from flexengine.hardware.host_samples import MOST_SAMPLES, RATES, pooled
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile

PROFILE = preset("h200").changed(
    h2d_only_beside_cpu_bytes_per_s=30e9,
    d2h_only_beside_cpu_bytes_per_s=40e9,
    cpu_share_beside_link=0.2,
)


def faster(factor: float) -> HardwareProfile:
    """The profile with all that samples hold so much higher."""
    updates = tuple((name, factor * rate) for name, rate in PROFILE.host.adamw_parameters_per_s)
    rates = {name: factor * PROFILE.values()[name] for name in RATES}
    return PROFILE.changed(**rates, cpu_adamw_parameters_per_s=updates)


def factors(profile: HardwareProfile) -> set[float]:
    """How much higher rates are than the profile's, and whether the others are as they were."""
    assert profile.matmul.flops_per_s == PROFILE.matmul.flops_per_s
    before = [PROFILE.values()[name] for name in RATES] + [rate for _, rate in PROFILE.host.adamw_parameters_per_s]
    after = [profile.values()[name] for name in RATES] + [rate for _, rate in profile.host.adamw_parameters_per_s]
    return {round(now / then, 6) for then, now in zip(before, after, strict=True)}


def test_medians_of_the_last_probes(tmp_path: Path):
    path = tmp_path / "hosts" / "host.json"
    found = [factors(pooled(faster(factor), path)) for factor in (1.0, 1.2, 4.0, 1.1)]
    assert found == [{1.0}, {1.1}, {1.2}, {1.15}]
    for _ in range(MOST_SAMPLES):
        last = pooled(faster(0.5), path)
    assert factors(last) == {0.5}
    assert len(json.loads(path.read_text())) == MOST_SAMPLES


def test_a_forced_probe_stands_alone(tmp_path: Path):
    path = tmp_path / "host.json"
    pooled(faster(3.0), path)
    assert factors(pooled(faster(1.5), path, anew=True)) == {1.5}
    assert factors(pooled(faster(2.5), path)) == {2.0}


def test_updates_that_were_not_measured_before_are_taken_from_the_last_probe(tmp_path: Path):
    path = tmp_path / "host.json"
    pooled(faster(3.0), path)
    fewer = PROFILE.changed(cpu_adamw_parameters_per_s=PROFILE.host.adamw_parameters_per_s[:1])
    assert pooled(fewer, path) == fewer


def test_without_a_folder_a_probe_stands_alone():
    assert pooled(PROFILE, None) == PROFILE


@pytest.mark.parametrize("text", ["", "{}", "[3]", '[{"issue_s": 1.0}]'])
def test_a_spoilt_file_counts_as_none(tmp_path: Path, text: str):
    path = tmp_path / "host.json"
    path.write_text(text)
    assert factors(pooled(faster(2.0), path)) == {2.0}
    assert len(json.loads(path.read_text())) == 1


@pytest.mark.parametrize("value", ['"1"', "NaN", "-1.0", "1e9"])
def test_a_rate_that_no_machine_has_spoils_a_file(tmp_path: Path, value: str):
    path = tmp_path / "host.json"
    pooled(PROFILE, path)
    path.write_text(path.read_text().replace(f'"issue_s": {PROFILE.host.issue_s}', f'"issue_s": {value}'))
    assert value in path.read_text()
    assert factors(pooled(faster(2.0), path)) == {2.0}
    assert len(json.loads(path.read_text())) == 1
