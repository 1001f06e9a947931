"""Two ranks measure collectives; a part that fails is noted with what it has printed."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from bench import ranks


def arguments(give_up_s: float = 100.0) -> argparse.Namespace:
    return argparse.Namespace(device="cpu", small=True, give_up_s=give_up_s)


@pytest.mark.thorough
def test_parts_are_measured_and_written(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    flags = ["--device", "cpu", "--small", "--parts", "collectives"]
    monkeypatch.setattr(sys, "argv", ["ranks", *flags, "--json", str(out)])
    ranks.main()
    parts = json.loads(out.read_text())["parts"]
    assert "failed" not in json.dumps(parts)
    found = parts["collectives"]["ranks"]
    assert [set(rank["right"].values()) for rank in found] == [{True}] * 2
    assert {row["call"] for row in found[0]["alone"]} == {"gather", "exchange", "add"}
    assert all(row["received_bytes_per_s"] > 0 for rank in found for row in rank["alone"])
    assert "collectives: " in capsys.readouterr().out


def test_a_part_that_fails_is_noted():
    found = ranks.run_part("collectives", 2, arguments(give_up_s=0.5))
    assert "killed" in found["failed"]
    assert found["ranks"] == [None, None]
    assert "FAILED" in ranks.shown("collectives", found)


@pytest.mark.gpu
def test_topology_of_gpus():
    [found] = ranks.run_part("topology", 1, argparse.Namespace(device="cuda", small=True, give_up_s=100.0))["ranks"]
    assert found["gpus"][0]["memory_bytes"] > 0
