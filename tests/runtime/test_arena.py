"""What the arenas take, and what they leave beside them."""

import pytest
import torch

from flexengine.runtime.arena import Arenas

MIB = 2**20


@pytest.mark.gpu
def test_a_reserved_workspace_serves_buffers_of_many_sizes():
    """Without it the large buffer finds only the gaps that smaller ones left: more than the allocator may take."""
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
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
