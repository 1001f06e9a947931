"""Nodes that divide the optimizer states train to the bits of nodes that each have all of them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from rank_cases import BF16, Case, adapters_of_experts_in_parts, bf16, not_finite, tied
from ranks_helper import run_ranks, values_of
from safetensors.torch import load_file
from test_several_ranks import check_same, opened, resume, train

from flexengine.runtime.ranks import dealt_states
from flexengine.schedule import node_states
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.node_states import NodeStates
from flexengine.schedule.shares import SHARE_ELEMENTS, Share
from tests.schedule.small_plans import small_model


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 301)


@pytest.mark.parametrize("nodes", [1, 2, 3, 7])
def test_each_element_is_one_nodes_and_has_one_place(nodes):
    group = small_model(blocks=1).groups[1]
    stored = group_storage(group, BF16)
    states, seen = NodeStates(stored, nodes), {segment.name: [] for segment in stored.segments}
    for segment in stored.segments:
        for node in range(nodes):
            places = list[int]()
            for rank in range(3):
                for start, count, place in states.spans(segment, Share(rank, 3, node=node)):
                    seen[segment.name] += range(start, start + count)
                    places += range(place, place + count)
                    assert place % SHARE_ELEMENTS == start % SHARE_ELEMENTS
            assert len(places) == len(set(places))
            plane = next(plane for plane in segment.planes if plane.kind == "exp_avg")
            ends = [states.offset(segment, plane, place) + 4 for place in places]
            assert max(ends, default=0) <= states.num_bytes("exp_avg")
        assert sorted(seen[segment.name]) == [*range(segment.numel)]
    spare = 4 * (1 + 2 * SHARE_ELEMENTS) * sum(len(places) for places in states.placed[0].values()) + 256 * len(seen)
    assert states.num_bytes("exp_avg") < stored.plane_bytes["exp_avg"] / nodes + spare


def check_bits(case: Case, ranks: int, nodes: int, *, split: bool = False) -> None:
    whole = values_of(run_ranks(train, nodes, nodes, case, nodes=nodes))
    for shown in values_of(run_ranks(train, ranks, ranks, case._replace(by_nodes=True, split=split), nodes=nodes)):
        check_same(shown, whole[0])


def test_states_of_what_the_cpu_updates_are_divided():
    """The GPU updates every other group, whose states each node has."""
    check_bits(bf16(), 2, 2)


@pytest.mark.thorough
def test_a_step_that_is_not_finite():
    check_bits(not_finite(), 3, 3)


def test_a_tied_embedding_on_nodes_of_two_ranks_that_split():
    check_bits(tied(), 4, 2, split=True)


@pytest.mark.thorough
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
    for shown in values_of(run_ranks(resume, 2, 2, whole, (folders[0], None), nodes=2)):
        check_same(shown, goes_on[0])


def save_on_a_full_disk(rank: int, size: int, case: Case, folder: Path) -> str:
    """What saving raises where the first rank can write nothing."""

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with opened(rank, size, case) as engine:
        engine.train_step(case.steps[0][0])
        if rank == 0:
            dealt_states.write_at = no_space
        with pytest.raises(OSError, match="no space left on the disk") as raised:
            engine.save_checkpoint(folder)
        return str(raised.value)


def test_a_disk_that_is_full_on_one_node_ends_saving_on_all(tmp_path):
    case = bf16()._replace(by_nodes=True)
    told = values_of(run_ranks(save_on_a_full_disk, 2, 2, case, tmp_path / "checkpoint", nodes=2))
    assert told[1] == f"rank 0: {told[0]}"
    assert not list(tmp_path.iterdir())


def load_states(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
