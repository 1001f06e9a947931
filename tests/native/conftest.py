"""Makes tests/fake_driver.py importable (in its importlib mode pytest leaves sys.path alone); library and compiler."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from flexengine.native import library

HELPERS = str(Path(__file__).resolve().parents[1])
if HELPERS not in sys.path:
    sys.path.append(HELPERS)

COMPILERS = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and shutil.which(name)]


@pytest.fixture
def native_library():
    """The compiled library; skips where there is no compiler, fails where there is one and the library is missing."""
    if library.load() is None and not COMPILERS:
        pytest.skip("no C++ compiler: the native library is not built")
    assert library.load() is not None, f"{library.library_path()} is missing or stale: pip install -e . builds it"
    return library.load()


@pytest.fixture(scope="session")
def compiler() -> str:
    """A C++ compiler's command; skips where there is none."""
    if not COMPILERS:
        pytest.skip("no C++ compiler")
    return COMPILERS[0]
