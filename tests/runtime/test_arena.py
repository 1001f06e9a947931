"""What the arenas take, and what they leave beside them."""

import pytest
import torch

from flexengine.hardware.memory_usage import hold_cublas_workspace
from flexengine.runtime.arena import Arenas

MIB = 2**20


@pytest.mark.gpu
def test_a_reserved_workspace_serves_buffers_of_many_sizes():
    """Without it the large buffer finds only the gaps that smaller ones left: more than the allocator may take."""
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    hold_cublas_workspace(device)
    allowed = torch.cuda.memory_reserved(device) + (256 + 800 + 4) * MIB
    arenas = Arenas(device, 256 * MIB, 0)
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(device).total_memory, device)
    try:
        arenas.reserve_workspace(800 * MIB)
        for sizes in ((256, 256), (32, 32, 256, 466)):
            held = [torch.empty(size * MIB, dtype=torch.uint8, device=device) for size in sizes]
            del held
        torch.empty(700 * MIB, dtype=torch.uint8, device=device)
    finally:
        arenas.close()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
def test_cublas_takes_no_part_of_the_reserved_block():
    """Its workspace stays, so that nothing of a block that holds it can be given back."""
    device = torch.device("cuda", 0)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    arenas, operand = Arenas(device, MIB, 0), torch.zeros(64, 64, dtype=torch.bfloat16, device=device)
    arenas.reserve_workspace(300 * MIB)
    torch.mm(operand, operand)
    reserved = torch.cuda.memory_reserved(device)
    arenas.reserve_workspace(0)
    assert reserved - torch.cuda.memory_reserved(device) == 300 * MIB
    arenas.close()
