"""Who a process is, from the environment of torchrun or an initialised process group."""

import pytest
from ranks_helper import run_ranks, values_of
from torch import distributed

from flexengine.parallel.ranks import Ranks


def test_a_process_without_torchrun_is_alone():
    assert Ranks.of_environment({"LOCAL_RANK": "0"}) == Ranks.alone()
    assert Ranks.alone() == (0, 1, 0, 1, 0, 1)


def test_torchrun_names_rank_and_node():
    numbers = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    ranks = Ranks.of_environment(numbers)
    assert ranks == Ranks(rank=6, size=8, local_rank=2, local_size=4, node=1, nodes=2)
    assert list(ranks.of_node) == [4, 5, 6, 7]


def test_without_a_nodes_variables_all_are_on_one():
    assert Ranks.of_environment({"RANK": "1", "WORLD_SIZE": "2"}) == Ranks(1, 2, 1, 2, 0, 1)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 is not below WORLD_SIZE 2"),
        ({"RANK": "0"}, "no WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "not a multiple"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "should have LOCAL_RANK 1"),
    ],
    ids=["rank", "size", "text", "uneven", "order"],
)
def test_nonsense_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Ranks.of_environment(numbers)


def in_a_group(rank: int) -> tuple[Ranks, str]:
    distributed.init_process_group("gloo")
    alike = Ranks.of_environment({})
    with pytest.raises(ValueError, match="the initialised process group says"):
        Ranks.of_environment({"WORLD_SIZE": "5"})
    return alike, distributed.get_backend()


def test_an_initialised_group_names_the_rank():
    assert values_of(run_ranks(in_a_group, 2)) == [(Ranks(r, 2, r, 2, 0, 1), "gloo") for r in range(2)]
