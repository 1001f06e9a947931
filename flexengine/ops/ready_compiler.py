"""The process that compiles kernels for this one (`kernels/compiler.py`), begun before what it compiles is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from flexengine.kernels.compiler import Compiler


class ReadyCompiler:
    """At most one process, which imports what compiling takes beside what this one does, until the end of a block."""

    def __init__(self) -> None:
        self._process: Compiler | None = None

    @property
    def process(self) -> Compiler | None:
        """The process, where one runs."""
        return None if self._process is None or self._process.pid is None else self._process

    def begin(self, *modules: str) -> None:
        """Start it, unless it runs or there are too few cores. modules: of this package, with what is compiled."""
        from flexengine.kernels.compiler import Compiler, spare_processes  # noqa: PLC0415 (kernels only when used)

        if self.process is None and spare_processes():
            self._process = Compiler(*modules)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


READY = ReadyCompiler()
"""That of this process."""
