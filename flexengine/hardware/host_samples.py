"""Rates of a host and of the link to it, as the last probes on this machine found them.

They depend on no model, so that every probe of another model measures them again. What else runs on a host, or beside a
rented part of one, changes them from minute to minute: on 16 of a host's cores AdamW attained 7.2 to 10.1 G parameters
per second in the probes of an hour, and steps that wait for it took what the median says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from flexengine.hardware.cache import read_remembered, write_remembered
from flexengine.hardware.profile import HardwareProfile

RATES = (
    "h2d_bytes_per_s", "d2h_bytes_per_s", "h2d_duplex_bytes_per_s", "d2h_duplex_bytes_per_s",
    "h2d_beside_cpu_bytes_per_s", "d2h_beside_cpu_bytes_per_s", "host_bytes_per_s", "launch_s", "issue_s",
    "copy_latency_s",
)  # fmt: skip
UPDATES = "cpu_adamw_parameters_per_s"
MOST_SAMPLES = 7

Sample = Mapping[str, float]
"""Figures of one probe by name; updates by the CPU as UPDATES and their own name."""


def pooled(profile: HardwareProfile, path: Path | None, anew: bool = False) -> HardwareProfile:
    """Remember what a probe has just found of the host, and give the profile with the medians of the last probes.

    path: of the file that remembers them; None: nothing does. anew: earlier probes count no longer. A file that cannot
    be read or written counts as none.
    """
    earlier = [] if anew else read_remembered(path, _samples) or []
    own = _sample_of(profile)
    alike = [sample for sample in earlier if sample.keys() == own.keys()]
    samples = [*alike, own][-MOST_SAMPLES:]
    write_remembered(path, json.dumps(samples))
    middle = {name: median(sample[name] for sample in samples) for name in own}
    updates = tuple((name, middle[f"{UPDATES} {name}"]) for name, _ in profile.cpu_adamw_parameters_per_s)
    return replace(profile, **{name: middle[name] for name in RATES}, cpu_adamw_parameters_per_s=updates)


def _sample_of(profile: HardwareProfile) -> Sample:
    updates = {f"{UPDATES} {name}": rate for name, rate in profile.cpu_adamw_parameters_per_s}
    return {name: getattr(profile, name) for name in RATES} | updates


def _samples(text: str) -> Sequence[Sample]:
    """Read the samples of a file. Raises: ValueError if it holds anything else."""
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(sample, dict) for sample in found):
        raise ValueError("expected a list of objects")
    for sample in found:
        for name, value in sample.items():
            if not (isinstance(value, float) and math.isfinite(value) and value >= 0):  # a CPU takes 0 s to issue
                raise ValueError(f"{name} is {value!r}, expected a number of at least 0")
    return found
