"""Nodes that divide the optimizer states train to the bits of nodes that each have all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_cases import Case, adapters_of_experts_in_parts, bf16, not_finite, tied
from ranks_helper import run_ranks, values_of
from safetensors.torch import load_file
from test_several_ranks import check_same, resume, train

from flexengine.schedule import node_states


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 301)


def check_bits(case: Case, ranks: int, nodes: int, *, split: bool = False) -> None:
    whole = values_of(run_ranks(train, nodes, nodes, case, nodes=nodes))
    for shown in values_of(run_ranks(train, ranks, ranks, case._replace(by_nodes=True, split=split), nodes=nodes)):
        check_same(shown, whole[0])


def test_states_of_what_the_cpu_updates_are_divided():
    """The GPU updates every other group, whose states each node has."""
    check_bits(bf16(), 2, 2)


def test_a_step_that_is_not_finite():
    check_bits(not_finite(), 3, 3)


def test_a_tied_embedding_on_nodes_of_two_ranks_that_split():
    check_bits(tied(), 4, 2, split=True)


def test_adapters_of_experts_in_parts_on_nodes_of_two_ranks():
    check_bits(adapters_of_experts_in_parts(), 4, 2)


def test_a_checkpoint_is_that_of_whole_states(tmp_path):
    """It is saved while the next step runs; nodes with or without whole states go on from it."""
    case = bf16()._replace(by_nodes=True)
    whole, folders = case._replace(by_nodes=False), (tmp_path / "divided", tmp_path / "whole")
    saved = values_of(run_ranks(resume, 4, 4, case, (None, folders[0]), nodes=2))[0]
    check_same(values_of(run_ranks(resume, 2, 2, whole, (None, folders[1]), nodes=2))[0], saved)
    tensors = [load_states(folder) for folder in folders]
    assert tensors[0].keys() == tensors[1].keys()
    assert any("exp_avg_sq" in name for name in tensors[0])
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    assert not [path for path in tmp_path.iterdir() if path not in folders], "files of the gathering are left"
    goes_on = values_of(run_ranks(resume, 2, 2, case, (folders[1], None), nodes=2))
    for shown in values_of(run_ranks(resume, 4, 4, whole, (folders[0], None), nodes=2)):
        check_same(shown, goes_on[0])


def load_states(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
