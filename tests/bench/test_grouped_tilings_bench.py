"""bench/grouped_tilings.py without a GPU: operands, the check of candidates, floors, and how rows are told."""

import pytest
import torch

from bench import grouped_tilings as bench
from flexengine.kernels.grouped_gradient_tma import ADDED, WRITTEN
from flexengine.kernels.grouped_tiles import Tiling

CPU = torch.device("cpu")
SMALL = WRITTEN._replace(tiles=Tiling(128, 128, 64, 8, 4, 3))


def test_candidates_differ_and_hold_the_present_tiles():
    tried = list(bench.CANDIDATES.values())
    assert {ADDED, WRITTEN} <= set(tried)
    assert None in tried
    assert len(set(tried)) == len(tried)


def test_rows_are_those_of_all_choices():
    for shape in bench.SHAPES:
        counts = bench.routed(shape, 512)
        assert (len(counts), int(counts.sum())) == (shape.experts, 512 * shape.choices)


def test_floors_count_flops_and_bytes():
    shape = bench.Shape("one", experts=3, columns=5, inner=7, choices=1)
    assert shape.flops(11) == 2 * 11 * 5 * 7
    assert shape.bytes_moved(11, accumulate=False) == 2 * 11 * (5 + 7) + 4 * 3 * 5 * 7
    assert shape.bytes_moved(11, accumulate=True) == 2 * 11 * (5 + 7) + 2 * 4 * 3 * 5 * 7


def test_candidates_are_checked_against_float64(monkeypatch: pytest.MonkeyPatch):
    """What lies around the rows is NaN, and a candidate that leaves its last rows out is found."""
    operands = bench.make_operands(torch.tensor([3, 0, 1, 9]), 40, 24, CPU, around=2)
    assert operands.grad_y[[0, 1, -2, -1]].isnan().all()
    assert max(bench.errors(SMALL, operands)) < bench.MOST_ERROR
    assert max(bench.errors(None, operands)) < bench.MOST_ERROR
    whole = bench.Operands.run

    def short(self, candidate, accumulate):
        whole(self._replace(bounds=self.bounds - (self.bounds == self.bounds[-1]).int()), candidate, accumulate)

    monkeypatch.setattr(bench.Operands, "run", short)
    assert min(bench.errors(SMALL, operands)) > bench.MOST_ERROR


def test_rows_are_told():
    row = {"shape": "olmoe down", "candidate": "default", "accumulate": True, "floor_s": 1e-3, "seconds": 2e-3}
    told = bench.line({**row, "flops_per_s": 4e14})
    assert all(each in told for each in ("adds", "2.000 ms", "400 TFLOP/s", "50% of the floor's speed"))
    assert bench.line({**row, "error": "WRONG"}).endswith("WRONG")


def test_unknown_shapes_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench.main(["--only", "bert"])
    assert "names bert" in capsys.readouterr().err
