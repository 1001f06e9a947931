"""Makes tests/engine_helpers.py importable (in its importlib mode pytest leaves sys.path alone); one CPU thread."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HELPERS = str(Path(__file__).resolve().parents[1])
if HELPERS not in sys.path:
    sys.path.append(HELPERS)


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Models here are tiny: a second thread only waits, for very long when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
