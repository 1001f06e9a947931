"""Set-up of all tests: Triton's interpreter without a GPU, CPU threads, seeds, the gpu mark; makes engine_helpers.py
importable (in its importlib mode pytest leaves sys.path alone)."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # Read when triton is imported, so it is set before any test module brings triton in.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

torch.set_num_threads(2)  # a fixed number: the order of floating-point sums depends on it
ONE_THREAD = ("failures", "models", "runtime")
"""Folders of tests whose models are tiny: a second thread only waits, for very long when the machine is busy."""
HELPERS = str(Path(__file__).resolve().parent)
if HELPERS not in sys.path:
    sys.path.append(HELPERS)


@pytest.fixture(autouse=True, scope="module")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if request.path.parent.name in ONE_THREAD:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def driver():
    """A CUDA driver without a GPU, new for every test."""
    from fake_driver import fake_driver  # noqa: PLC0415 (few tests need its library built)

    driver = fake_driver()
    yield driver
    driver.reset()


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
