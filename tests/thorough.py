"""Which cases of a test run with all tests, and which by `make thorough` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(everything: Iterable[Any], with_all_tests: Collection[Any]) -> list[Any]:
    """Every case, for `parametrize`; those that are not among `with_all_tests` are marked `thorough`."""
    everything = list(everything)
    assert set(with_all_tests) <= set(everything)
    return [case if case in with_all_tests else pytest.param(case, marks=pytest.mark.thorough) for case in everything]
