"""Which cases of a test run with all tests, and which by `make thorough` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(everything: Iterable[Any], with_all_tests: Collection[Any]) -> list[Any]:
    """Every case, for `parametrize`, a tuple for several names; those not in `with_all_tests` are marked `thorough`."""
    everything = list(everything)
    assert set(with_all_tests) <= set(everything)

    def more(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.thorough)

    return [case if case in with_all_tests else more(case) for case in everything]
