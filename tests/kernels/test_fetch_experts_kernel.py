"""Experts with rows are fetched and no others: several chunks, sizes that fill no block, and page-locked memory."""

import pytest
import torch

from flexengine.kernels.fetch_experts import fetch_experts

ROUTED = {
    "one chunk": [[0, 3, 0, 1, 0]],
    "several chunks": [[0, 2, 0, 0, 0], [0, 0, 0, 4, 0], [0, 1, 0, 0, 0]],
    "last alone": [[0, 0, 0, 0, 5]],
    "none": [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
    "all": [[1, 2, 3, 4, 5]],
}
"""Rows of each expert, chunk by chunk."""


def check(rows, words, dtype, device, pinned=False):
    """bounds of the experts lie among those of others, and do not begin at 0."""
    chunks, experts = len(rows), len(rows[0])
    bounds = torch.zeros(chunks, experts + 9, dtype=torch.int32)
    bounds[:, 4 : experts + 4] = torch.tensor(rows)
    bounds = (bounds.cumsum(1).int() + 11).to(device)[:, 3 : experts + 4]
    source = torch.randint(-30000, 30000, (experts, words), dtype=dtype)
    source = source.pin_memory() if pinned else source.to(device)
    target = torch.full((experts, words), -1, dtype=dtype, device=device)
    fetch_experts(source, target, bounds)
    touched = torch.tensor(rows).sum(0) > 0
    expected = torch.where(touched[:, None], source.cpu(), torch.full_like(source.cpu(), -1))
    assert torch.equal(target.cpu(), expected)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("words", [1, 1000, 2053])
@pytest.mark.parametrize("routing", ROUTED)
def test_touched_experts_are_fetched(routing, words, dtype, device):
    check(ROUTED[routing], words, dtype, device)


def test_blocks_of_one_program_follow_each_other(device):
    check(ROUTED["several chunks"], 70_000, torch.int32, device)


def test_wrong_shapes_are_refused(device):
    source = torch.zeros(4, 6, dtype=torch.int32, device=device)
    bounds = torch.zeros(1, 5, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="source"):
        fetch_experts(source[:, :5], source, bounds)
    with pytest.raises(ValueError, match="bounds"):
        fetch_experts(source, source, bounds[:, :4])
    with pytest.raises(ValueError, match="target"):
        fetch_experts(source, source.float(), bounds)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32], ids=str)
def test_page_locked_memory_is_read_by_the_gpu(dtype, gpu):
    for rows in ROUTED.values():
        check(rows, 1_000_003, dtype, gpu, pinned=True)
