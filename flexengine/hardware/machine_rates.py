"""Rates of a machine that depend on no model: of its link, host memory, updates by the CPU, and a large product.

They are measured once and stand in the profile of every model that is probed within a day. What else runs on a host,
or beside a rented part of one, changes them from hour to hour: on 16 of a host's cores AdamW attained 7.2 to 10.1 G
parameters per second in the probes of an hour, and steps that wait for it took what the median says. So a later day
measures again, and the medians of the last samples count.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from flexengine.hardware.cache import age_s, read_remembered, write_remembered
from flexengine.hardware.curve import Curve, as_points, check_rate, is_finite
from flexengine.hardware.node_rates import LINK_FIELDS
from flexengine.hardware.parts import ONE_RANK_FIELDS, HostProfile, LinkProfile, keys_of
from flexengine.wording import parse_json, shown

LINK_KEYS = (*LINK_FIELDS, *ONE_RANK_FIELDS, "copy_latency_s")
UPDATES = "cpu_adamw_parameters_per_s"
HOST_KEYS = keys_of(HostProfile)
OWN_KEYS = ("memory_bytes_per_s", "peak_matmul_flops_per_s", "sm_clock_mhz")
MOST_SAMPLES = 7
LATEST_S = 24 * 3600.0
"""A machine whose last sample is older gives another one with the next model that is new to it. With less, more starts
wait for it; with more, fewer samples tell of a host that changes."""


class MachineRates(NamedTuple):
    """What `HardwareProfile` has under the same names. curves: of copies."""

    link: LinkProfile
    host: HostProfile
    memory_bytes_per_s: float
    peak_matmul_flops_per_s: float
    sm_clock_mhz: float
    curves: tuple[Curve, ...]

    def sample(self) -> dict[str, Any]:
        """Its rates by their keys in a profile, without the curves."""
        values = {**self.link.values(), **self.host.values(), **self._asdict()}
        return {key: values[key] for key in (*LINK_KEYS, *HOST_KEYS, *OWN_KEYS)}


def remembered_machine(path: Path | None) -> MachineRates | None:
    """The medians of the last samples; None where there are none, or none of today."""
    age = age_s(path)
    if age is None or age > LATEST_S or (known := read_remembered(path, _read)) is None:
        return None
    return _medians(*known)


def pooled(rates: MachineRates, path: Path | None, anew: bool = False) -> MachineRates:
    """Remember what a probe has just found of the machine, and give the medians of the last samples.

    path: of the file that remembers them; None: nothing does. anew: earlier samples count no longer. A file that cannot
    be read or written counts as none.
    """
    earlier = None if anew else read_remembered(path, _read)
    sample, names = rates.sample(), [name for name, _ in rates.host.adamw_parameters_per_s]
    kept = [] if earlier is None else [old for old in earlier[0] if [name for name, _ in old[UPDATES]] == names]
    samples = [*kept, sample][-MOST_SAMPLES:]
    curves = [asdict(curve) for curve in rates.curves]
    write_remembered(path, json.dumps({"samples": samples, "curves": curves}))
    return _medians(samples, rates.curves)


def _medians(samples: list[dict[str, Any]], curves: tuple[Curve, ...]) -> MachineRates:
    middle = {key: median(sample[key] for sample in samples) for key in samples[0] if key != UPDATES}
    updates = [dict(sample[UPDATES]) for sample in samples]
    middle[UPDATES] = tuple((name, median(rates[name] for rates in updates)) for name in updates[-1])
    return _machine(middle, curves)


def _machine(sample: dict[str, Any], curves: tuple[Curve, ...]) -> MachineRates:
    """The inverse of `MachineRates.sample`. Raises: ValueError for rates that no machine has."""
    for key in OWN_KEYS[:2]:
        check_rate(key, sample[key])
    if not is_finite(sample["sm_clock_mhz"]) or sample["sm_clock_mhz"] < 0:
        raise ValueError(f"rates of a machine: sm_clock_mhz is {shown(sample['sm_clock_mhz'])}, expected at least 0")
    link = LinkProfile(**{key: sample[key] for key in LINK_KEYS})
    host = HostProfile(**{name: sample[key] for key, name in HOST_KEYS.items()})
    return MachineRates(link, host, **{key: sample[key] for key in OWN_KEYS}, curves=curves)


def _read(text: str) -> tuple[list[dict[str, Any]], tuple[Curve, ...]]:
    """The samples and curves that a file holds. Raises: ValueError if it holds anything else."""
    found = parse_json(text, "rates of a machine")
    if not isinstance(found, dict) or found.keys() != {"samples", "curves"} or not isinstance(found["curves"], list):
        raise ValueError("rates of a machine: expected an object of samples and curves")
    samples, keys = found["samples"], {*LINK_KEYS, *HOST_KEYS, *OWN_KEYS}
    if not isinstance(samples, list) or not samples:
        raise ValueError("rates of a machine: expected a list of samples")
    curves = tuple(Curve.from_dict(curve) for curve in found["curves"])
    for sample in samples:
        if not isinstance(sample, dict) or sample.keys() != keys:
            raise ValueError("rates of a machine: expected samples with one key per rate")
        sample[UPDATES] = as_points(UPDATES, sample[UPDATES])
        _machine(sample, curves)
    if len({tuple(name for name, _ in sample[UPDATES]) for sample in samples}) > 1:
        raise ValueError("rates of a machine: samples are of different updates")
    return samples, curves
