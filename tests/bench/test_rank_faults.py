"""Faults of one rank end all, with one message and nothing left; bench/rank_faults.py tries more of them."""

import pytest

from bench.rank_faults import KINDS, Fault, run_fault
from flexengine.parallel import watch


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """The same with fewer beats before a stopped rank is given up, and less time for those that compute."""
    monkeypatch.setattr(watch, "STOPPED_BEATS", 3)
    monkeypatch.setattr(watch, "GRACE_S", 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_one_rank_ends_all(kind):
    outcome = run_fault(Fault(kind, rank=1, step=20, after_s=0.1), 3)
    assert outcome.is_right, outcome
