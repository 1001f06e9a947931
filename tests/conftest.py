"""Set-up of all tests: Triton's interpreter without a GPU, two CPU threads, seeds, the gpu mark."""

import os

import torch

if not torch.cuda.is_available():
    # Read when triton is imported, so it is set before any test module brings triton in.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

torch.set_num_threads(2)  # a fixed number: the order of floating-point sums depends on it


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, in whatever order tests run."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
