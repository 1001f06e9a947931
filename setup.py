"""Builds csrc/*.cpp into one shared library, flexengine/_native*.so; everything else is in pyproject.toml.

Needs a C++17 compiler and no CUDA toolkit: driver functions are looked up at run time. Without a compiler the package
installs all the same, and torch paths take the library's place (flexengine/native says so when they do).
"""

import sys
from pathlib import Path

from setuptools import Extension, setup
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
    cmdclass={"build_ext": BuildNative},
)
