"""Rates of a host and of the link to it, as the last probes on this machine found them.

They depend on no model, so that every probe of another model measures them again. What else runs on a host, or beside a
rented part of one, changes them from minute to minute: on 16 of a host's cores AdamW attained 7.2 to 10.1 G parameters
per second in the probes of an hour, and steps that wait for it took what the median says.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from statistics import median

from flexengine.hardware.cache import read_remembered, write_remembered
from flexengine.hardware.curve import as_points
from flexengine.hardware.node_rates import LINK_FIELDS
from flexengine.hardware.parts import ONE_RANK_FIELDS, SECONDS_FIELDS
from flexengine.hardware.profile import HardwareProfile
from flexengine.wording import parse_json

RATES = (*LINK_FIELDS, *ONE_RANK_FIELDS, "host_bytes_per_s", *SECONDS_FIELDS)
UPDATES = "cpu_adamw_parameters_per_s"
MOST_SAMPLES = 7


def pooled(profile: HardwareProfile, path: Path | None, anew: bool = False) -> HardwareProfile:
    """Remember what a probe has just found of the host, and give the profile with the medians of the last probes.

    path: of the file that remembers them; None: nothing does. anew: earlier probes count no longer. A file that cannot
    be read or written counts as none.
    """
    earlier = None if anew else read_remembered(path, partial(_read, profile))
    samples = [*(earlier or []), profile][-MOST_SAMPLES:]
    values = [sample.values() for sample in samples]
    write_remembered(path, json.dumps([{name: found[name] for name in (*RATES, UPDATES)} for found in values]))
    rates = {name: median(found[name] for found in values) for name in RATES}
    updates = [dict(found[UPDATES]) for found in values]
    middle = tuple((name, median(rates_of[name] for rates_of in updates)) for name in _updates(profile))
    return profile.changed(**rates, cpu_adamw_parameters_per_s=middle)


def _read(profile: HardwareProfile, text: str) -> list[HardwareProfile]:
    """Give the profile with the rates of each probe that measured the same updates.

    Raises: ValueError if the text holds anything else than rates that a profile may have.
    """
    found = parse_json(text, "rates of a host")
    if not isinstance(found, list) or any(not isinstance(s, dict) or s.keys() != {*RATES, UPDATES} for s in found):
        raise ValueError("rates of a host: expected a list of objects with one key per rate")
    samples = [profile.changed(**{**sample, UPDATES: as_points(UPDATES, sample[UPDATES])}) for sample in found]
    return [sample for sample in samples if _updates(sample) == _updates(profile)]


def _updates(profile: HardwareProfile) -> list[str]:
    return [name for name, _ in profile.host.adamw_parameters_per_s]
