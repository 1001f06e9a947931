"""bench/attention_tilings.py without a GPU: what is tried, how tiles are exchanged, which are called fastest."""

import pytest

from bench import attention_tilings as bench
from flexengine.kernels import attention, attention_backward
from flexengine.kernels.attention_tilings import ShortTiling, Tiling

WINDOW = "gpt-oss-20b, window"


def test_the_present_tiles_come_first():
    for name in bench.PASSES:
        for case in bench.TRIED:
            tried = bench.candidates(bench.case_of(case), name)
            assert tried[0] is None
            assert len(set(tried)) == len(tried)
    kinds = {type(each) for each in bench.candidates(bench.case_of(WINDOW), "queries")}
    assert kinds == {type(None), Tiling, ShortTiling}


def test_tiles_are_exchanged_for_one_pass():
    before = attention.forward_tiling, attention.short_tiling, attention_backward.key_tiling
    with bench.tiled("forward", Tiling(32, 16, 4, 1)):
        assert attention.forward_tiling() == Tiling(32, 16, 4, 1)
        assert attention.short_tiling() is None
    with bench.tiled("queries", ShortTiling(4, 128)):
        assert attention_backward.short_tiling() == ShortTiling(4, 128)
    with bench.tiled("keys", Tiling(32, 64, 4, 3)):
        assert attention_backward.key_tiling() == Tiling(32, 64, 4, 3)
    assert before == (attention.forward_tiling, attention.short_tiling, attention_backward.key_tiling)


def test_the_fastest_right_tiles_are_told():
    """Tiles that give other results do not count; a window's price is what its FLOPs take without it."""

    def row(case, name, seconds, difference=1e-3, tiling=None):
        return {"case": case, "pass": name, "seconds": seconds, "difference": difference, "tiling": tiling}

    sizes = (16384, 2048)
    share = bench.case_of(WINDOW).flops(*sizes)[0] / bench.case_of("gpt-oss-20b").flops(*sizes)[0]
    rows = [
        row("gpt-oss-20b", "forward", 1e-3),
        row(WINDOW, "forward", 3e-3 * share),
        row(WINDOW, "forward", 1e-6, 0.3),
    ]
    rows.append({"case": WINDOW, "pass": "forward", "error": "OutOfResources"})
    lines = bench.summary(rows, sizes)
    assert lines[-1] == f"{WINDOW}: forward take 3.00 of their price"
    assert not any("0.0010 ms" in line for line in lines)


def test_unknown_cases_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench.main(["--only", "bert"])
    assert "names bert" in capsys.readouterr().err
