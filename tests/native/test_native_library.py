"""Loading of the compiled library: found, switched off, stale; errors with C's message; notices given once."""

import ctypes
import logging
import subprocess
from pathlib import Path

import pytest

from flexengine.native import library
from flexengine.native.host_memory import PAGE_BYTES, allocate_host


@pytest.fixture
def forgotten():
    """The loader as in a new process, before and after."""
    caches = (library._load_once, library._say_stale, library.fallback_notice)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def build(compiler: str, folder: Path, source: str) -> Path:
    (folder / "stub.cpp").write_text(source)
    path = folder / "_native.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(folder / "stub.cpp"), "-o", str(path)], check=True)
    return path


def test_the_built_library_has_this_version(native_library):
    assert native_library.flex_abi_version() == library.ABI_VERSION
    header = (Path(__file__).parents[2] / "csrc/common.h").read_text()
    assert f"#define FLEX_ABI_VERSION {library.ABI_VERSION}\n" in header


def test_it_can_be_switched_off(native_library, monkeypatch):
    monkeypatch.setenv("FLEXENGINE_NATIVE", "0")
    assert library.load() is None
    assert library.bind("flex_host_map") is None


def test_a_stale_library_counts_as_absent(compiler, forgotten, tmp_path, monkeypatch, caplog):
    path = build(compiler, tmp_path, 'extern "C" int flex_abi_version() { return 999; }')
    monkeypatch.setattr(library, "library_path", lambda: path)
    with caplog.at_level(logging.WARNING):
        assert library.load() is None
        assert library.load() is None
    assert caplog.text.count(f"has interface version 999, this package needs {library.ABI_VERSION}") == 1


def test_a_file_that_is_no_library_counts_as_absent(forgotten, tmp_path, monkeypatch, caplog):
    path = tmp_path / "_native.so"
    path.write_text("not a library")
    monkeypatch.setattr(library, "library_path", lambda: path)
    assert library.load() is None
    assert "cannot be loaded" in caplog.text


def test_a_missing_function_counts_as_absent(native_library, forgotten, caplog):
    assert library.bind("flex_of_tomorrow") is None
    assert library.bind("flex_of_tomorrow") is None
    assert caplog.text.count("has no function flex_of_tomorrow") == 1


def test_messages_of_c_name_place_and_statement(native_library):
    discard = library.bind("flex_host_discard", ctypes.c_void_p, ctypes.c_int64)
    assert discard is not None
    with pytest.raises(OSError, match=r"test: host_arena.cpp:\d+: madvise: .* \(errno 22\)"):
        library.check(discard(12345, PAGE_BYTES), "test")  # not the begin of a page


def test_a_fallback_is_announced_once(forgotten, monkeypatch, caplog):
    monkeypatch.setenv("FLEXENGINE_NATIVE", "0")
    for _ in range(2):
        allocate_host(1, page_locked=False).close()
    assert caplog.text.count("native code is not available for host memory: it is mapped without regard to NUMA") == 1
    assert "more slowly, and when memory is exhausted the system may end the process" in caplog.text
