"""Rates of a machine over several probes: medians of the last ones, none of a file that holds anything else."""

import json
from pathlib import Path

import pytest

from flexengine.hardware.curve import Curve
from flexengine.hardware.machine_rates import MOST_SAMPLES, UPDATES, MachineRates, pooled, remembered_machine
from flexengine.hardware.parts import HostProfile, LinkProfile

UPDATE_RATES = (("float32", 4e9), ("bfloat16", 8e9))
MACHINE = MachineRates(
    LinkProfile(50e9, 40e9, 45e9, 35e9, 40e9, 30e9, 1e-5, 41e9, 31e9, 0.2),
    HostProfile(100e9, UPDATE_RATES, 1e-5, 2e-5),
    2e12,
    7e14,
    1700.0,
    (Curve("host to device", "bytes", "bytes/s", ((1024, 1e9), (2048, 2e9))),),
)


def faster(factor: float) -> MachineRates:
    """The machine with all that samples hold so much higher."""
    values = {key: value if key == UPDATES else factor * value for key, value in MACHINE.sample().items()}
    link, host = ({k: v for k, v in values.items() if k in part.values()} for part in (MACHINE.link, MACHINE.host))
    updates = tuple((name, factor * rate) for name, rate in UPDATE_RATES)
    host = HostProfile(host["host_bytes_per_s"], updates, host["launch_s"], host["issue_s"])
    memory, peak, clock = (factor * rate for rate in MACHINE[2:5])
    return MachineRates(LinkProfile(**link), host, memory, peak, clock, MACHINE.curves)


def factors(machine: MachineRates) -> set[float]:
    """How much higher its rates are."""
    pairs = [(machine.sample()[key], value) for key, value in MACHINE.sample().items() if key != UPDATES]
    pairs += [(rate, dict(UPDATE_RATES)[name]) for name, rate in machine.host.adamw_parameters_per_s]
    return {round(now / then, 6) for now, then in pairs}


def test_medians_of_the_last_probes(tmp_path: Path):
    path = tmp_path / "machines" / "machine.json"
    found = [factors(pooled(faster(factor), path)) for factor in (1.0, 1.2, 4.0, 1.1)]
    assert found == [{1.0}, {1.1}, {1.2}, {1.15}]
    for _ in range(MOST_SAMPLES):
        pooled(faster(0.5), path)
    assert remembered_machine(path) == faster(0.5)
    assert len(json.loads(path.read_text())["samples"]) == MOST_SAMPLES


def test_a_forced_probe_stands_alone(tmp_path: Path):
    path = tmp_path / "machine.json"
    pooled(faster(3.0), path)
    assert factors(pooled(faster(1.5), path, anew=True)) == {1.5}
    assert factors(pooled(faster(2.5), path)) == {2.0}


def test_updates_that_were_not_measured_before_are_taken_from_the_last_probe(tmp_path: Path):
    path = tmp_path / "machine.json"
    pooled(faster(3.0), path)
    fewer = MACHINE._replace(host=HostProfile(100e9, UPDATE_RATES[:1], 1e-5, 2e-5))
    assert pooled(fewer, path) == fewer == remembered_machine(path)


def test_without_a_folder_a_probe_stands_alone():
    assert pooled(MACHINE, None) == MACHINE
    assert remembered_machine(None) is None


@pytest.mark.parametrize("text", ["", "{}", "[3]", '{"samples": [], "curves": []}', '{"samples": [{}], "curves": []}'])
def test_a_spoilt_file_counts_as_none(tmp_path: Path, text: str):
    path = tmp_path / "machine.json"
    path.write_text(text)
    assert remembered_machine(path) is None
    assert factors(pooled(faster(2.0), path)) == {2.0}
    assert len(json.loads(path.read_text())["samples"]) == 1


@pytest.mark.parametrize("value", ['"1"', "NaN", "-1.0", "1e9"])
@pytest.mark.parametrize("key", ["issue_s", "peak_matmul_flops_per_s", "sm_clock_mhz"])
def test_a_rate_that_no_machine_has_spoils_a_file(tmp_path: Path, key: str, value: str):
    path = tmp_path / "machine.json"
    pooled(MACHINE, path)
    found = json.loads(path.read_text())
    found["samples"][0][key] = json.loads(value)
    path.write_text(json.dumps(found))
    attained = value == "1e9" and key != "issue_s"
    assert (remembered_machine(path) is None) != attained
