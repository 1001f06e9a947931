"""The device that a person names."""

from __future__ import annotations

import torch

from flexengine.hardware.memory_usage import note_baseline


def choose_device(name: str) -> torch.device:
    """The device that `name` means: auto, cpu, cuda or cuda:N; makes it the current one. Raises: ValueError."""
    if name != "cpu":
        note_baseline()  # before the first question to torch.cuda makes a context
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not known; choose auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported; choose auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        why = "; this torch was built without CUDA" if torch.version.cuda is None else ""  # type: ignore[attr-defined]
        raise ValueError(f"device={name!r}: this machine has {count} usable NVIDIA GPUs{why}; try device='cpu'")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
