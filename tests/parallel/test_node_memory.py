"""Host memory that ranks of a node share: contents, shares, errors, and that nothing of it is left."""

import os
import platform
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from ranks_helper import outcomes_of, run_ranks, start_ranks, values_of

from bench.shared_pages import huge_bytes, shmem_setting
from flexengine.parallel import node_memory
from flexengine.parallel.control import Control
from flexengine.parallel.node_memory import HUGE_PAGE_BYTES, NodeMemory, _share, locked_pieces
from flexengine.parallel.ranks import Ranks
from flexengine.schedule.slots import Slot, SlotKey, borders_of_slots

MIB = 2**20
PATHS = pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])


def opened(num_bytes: int, native: str = "1") -> tuple[Ranks, Control, NodeMemory]:
    os.environ["FLEXENGINE_NATIVE"] = native
    ranks = Ranks.of_environment()
    control = Control.open(ranks, 60.0)
    return ranks, control, NodeMemory.open(ranks, control, num_bytes)


def mappings(pid: int | str = "self") -> list[str]:
    """The inodes of files of memory that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # ended, or another user's
        return []
    return [line.split()[4] for line in lines if "/memfd:flexengine" in line]


def share(rank: int, num_bytes: int, native: str) -> None:
    ranks, control, memory = opened(num_bytes, native)
    assert memory.tensor.shape == (num_bytes,)
    assert memory.tensor.dtype == torch.uint8
    assert not memory.tensor.any()
    if native == "1" and num_bytes >= HUGE_PAGE_BYTES:
        assert memory.tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    control.barrier()
    memory.tensor[rank :: ranks.size] = rank + 1
    control.barrier()
    expected = torch.arange(num_bytes) % ranks.size + 1
    assert torch.equal(memory.tensor, expected.to(torch.uint8))
    assert len(mappings()) == 1
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.tensor  # noqa: B018


@PATHS
@pytest.mark.parametrize("num_bytes", [3, 5 * MIB + 123])
def test_ranks_share_the_bytes(num_bytes, native):
    values_of(run_ranks(share, 3, num_bytes, native))


@pytest.mark.parametrize("num_bytes", [1, 4096, HUGE_PAGE_BYTES, 7 * HUGE_PAGE_BYTES + 1, 100 * MIB])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_shares_are_whole_and_disjoint(num_bytes, size):
    shares = [_share(Ranks(rank, size, rank, size, 0, 1), num_bytes) for rank in range(size)]
    assert shares[0].start == 0
    assert shares[-1].stop == -(-num_bytes // 4096) * 4096
    assert all(before.stop == after.start for before, after in pairwise(shares))
    assert all(len(part) % 4096 == 0 for part in shares)


def nothing_left(rank: int, native: str) -> None:
    ranks, control, first = opened(MIB, native)
    first.close()
    descriptors = len(os.listdir("/proc/self/fd"))
    memory = NodeMemory.open(ranks, control, 4 * MIB)
    view = memory.tensor[:10]
    memory.tensor.fill_(7)
    control.barrier()
    memory.close()
    if native == "1":
        assert not view.any()
    del view
    assert mappings() == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    control.barrier()


@PATHS
def test_nothing_is_left_after_close(native):
    values_of(run_ranks(nothing_left, 2, native))


def collapses() -> bool:
    """Whether the kernel makes huge pages of a file's memory on request: Linux 6.1 and later, unless set so."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    recent = version is not None and (int(version[1]), int(version[2])) >= (6, 1)
    return recent and shmem_setting() != "unknown" and "[deny]" not in shmem_setting()


def huge(rank: int) -> int:
    _, control, memory = opened(7 * HUGE_PAGE_BYTES + 4096)
    memory.tensor.fill_(rank)
    control.barrier()
    found = huge_bytes(memory.tensor.data_ptr())
    control.barrier()
    return found


@pytest.mark.skipif(not collapses(), reason="needs Linux 6.1 with huge pages for shared memory")
def test_memory_is_in_huge_pages_on_every_rank():
    """Which rank brought them in or not: `shmem_enabled` is `never` by default, so that faults give small pages."""
    assert values_of(run_ranks(huge, 2)) == [7 * HUGE_PAGE_BYTES] * 2


def refused(rank: int) -> str:
    ranks = Ranks.of_environment()
    control = Control.open(ranks, 60.0)
    with pytest.raises(ValueError, match="num_bytes is 0") as caught:
        NodeMemory.open(ranks, control, 0 if rank == 1 else MIB)
    assert mappings() == []
    return str(caught.value)


def test_what_fails_on_one_rank_fails_on_all():
    first, second = values_of(run_ranks(refused, 2))
    assert first == f"rank 1: {second}"


def killed(rank: int, folder: str) -> None:
    _, control, memory = opened(4 * MIB)
    memory.tensor.fill_(1)
    Path(folder, str(rank)).write_text(mappings()[0])
    control.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_of_killed_ranks(tmp_path):
    outcomes = outcomes_of(*start_ranks(killed, 2, str(tmp_path)))
    assert [outcome.error for outcome in outcomes] == ["ended", "ended"]
    inodes = {path.read_text() for path in tmp_path.iterdir()}
    assert len(inodes) == 1
    running = [name for name in os.listdir("/proc") if name.isdecimal()]
    assert not any(inodes & set(mappings(pid)) for pid in running)


def test_one_rank_needs_no_others():
    memory = NodeMemory.open(Ranks.alone(), Control.open(Ranks.alone()), MIB)
    with memory:
        memory.tensor.fill_(3)
    assert mappings() == []


def test_page_locking_is_cut_where_no_slot_is(monkeypatch):
    """CUDA refuses copies across such a border, as an 8B model's loading, whose node has more than one piece, did."""
    page = 4096
    monkeypatch.setattr(node_memory, "LOCKED_PIECE_BYTES", 4 * page)
    sizes = {0: page, page: 3 * page // 2, 3 * page: 5 * page, 8 * page: page, 9 * page: page, 10 * page: 2 * page}
    slots = [Slot(SlotKey("weights", number, -1, "node"), *size, "") for number, size in enumerate(sizes.items())]
    slots.append(slots[2].subslot(("piece", 0), page, page, ""))
    borders = borders_of_slots(slots, "node")
    assert borders == list(sizes)
    assert locked_pieces(12 * page, borders) == [(n * page, m * page) for n, m in ((0, 3), (3, 8), (8, 12))]
    assert locked_pieces(4 * page, borders) == [(0, 4 * page)]
    assert locked_pieces(12 * page, [page + 256]) == [(0, 12 * page)]  # no border of a page
