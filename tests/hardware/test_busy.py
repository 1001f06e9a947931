"""A machine that others keep busy is told from an idle one."""

import pytest

from flexengine.hardware.busy import busy_signs

EVEN, UNEVEN = [1.0, 1.01, 1.05, 1.02], [1.0, 1.1, 4.0, 2.5]


@pytest.mark.parametrize(
    ("load", "samples", "signs"),
    [
        (0.5, EVEN, ""),
        (2.4, EVEN, "2.4 processes want each core"),
        (0.5, UNEVEN, "the same work took 2.1 times its least"),
        (1.2, UNEVEN, "1.2 processes want each core and the same work took 2.1 times its least"),
    ],
)
def test_signs(load, samples, signs):
    assert busy_signs(load, samples) == signs


def test_the_machine_is_looked_at():
    assert isinstance(busy_signs(), str)
