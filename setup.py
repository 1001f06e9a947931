"""Builds csrc/*.cpp into one shared library, flexengine/_native*.so; everything else is in pyproject.toml.

A wheel serves every Python 3, as ctypes opens the library: its tag names the oldest C and C++ libraries that it needs.
Needs a C++17 compiler and no CUDA toolkit: driver functions are looked up at run time. Without a compiler the package
installs all the same, and torch paths take the library's place (flexengine/native says so when they do).
"""

import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# No -march: wider instructions are chosen at run time, per function. No contraction into fused multiply-add: results
# are defined to the bit. No errno from sqrt, which then is one instruction.
COMPILE_FLAGS = [
    "-O3",
    "-g0",
    "-std=c++17",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
LINK_FLAGS = ["-pthread", "-ldl"]


class BuildNative(build_ext):
    """build_ext that explains what a failed build means: the extension is optional."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception as error:
            print(
                f"flexengine: {ext.name} was not built ({error}). The package works without it, more slowly: CPU "
                f"updates, host transfers and file reads use torch. Install g++ or clang++ and install again.",
                file=sys.stderr,
            )
            raise


GLIBC_OF_GLIBCXX = {19: 17, 22: 24, 24: 26, 25: 28, 28: 31, 29: 34, 30: 35, 33: 39}
"""Symbols GLIBCXX_3.4.N of libstdc++ -> the first manylinux_2_N that has them, by auditwheel's policies."""


def manylinux(library: bytes, machine: str) -> str | None:
    """Name the oldest platform that has every versioned symbol of a library; None where no policy knows of one."""
    glibc = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library)]
    glibcxx = max((int(minor) for minor in re.findall(rb"GLIBCXX_3\.4\.(\d+)", library)), default=0)
    needed = min((has for symbol, has in GLIBC_OF_GLIBCXX.items() if symbol >= glibcxx), default=None)
    return None if needed is None else f"manylinux_2_{max([17, needed, *glibc])}_{machine}"


class AnyPythonWheel(bdist_wheel):
    """bdist_wheel whose tag names no interpreter, since nothing of Python's C interface is used."""

    def get_tag(self):
        _, _, platform = super().get_tag()
        machine = platform.partition("_")[2]
        built = sorted(Path(self.bdist_dir).glob("**/_native*.so"))
        if built and platform.startswith("linux_"):
            platform = manylinux(built[0].read_bytes(), machine) or platform
        return "py3", "none", platform


def sources(pattern: str) -> list[str]:
    """Paths relative to the root, sorted, as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob(pattern))


native = Extension(
    "flexengine._native",
    sources=sources("*.cpp"),
    depends=sources("*.h"),
    language="c++",
    extra_compile_args=COMPILE_FLAGS,
    extra_link_args=LINK_FLAGS,
    optional=True,
)

setup(
    ext_modules=[native] if sys.platform == "linux" else [],  # system calls and CPU detection are those of Linux
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPythonWheel},
)
