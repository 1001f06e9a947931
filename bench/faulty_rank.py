"""A rank of `train` that fails in one of its commands: python -m bench.faulty_rank RANK COMMAND KIND FILE train ...

bench/rank_faults.py has `launch` start it in place of `python -m flexengine`. FILE appears when the rank fails.
"""

from flexengine.parallel.parent import follow_parent

follow_parent()

import os  # noqa: E402, after the first line of a rank
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from flexengine.cli import main  # noqa: E402

STATUS = 5


def fail_in(number: int, kind: str, file: Path) -> None:
    """Have the command of this number raise, or end the process."""
    from flexengine.runtime.execution.handlers import CommandHandlers  # noqa: PLC0415, the other ranks start as ever

    carry_out, count = CommandHandlers.run, 0

    def counted(self: CommandHandlers, program: Any, settings: Any, command: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            file.touch()
            if kind == "exits":
                os._exit(STATUS)
            raise FloatingPointError(f"{command.label} fails")
        carry_out(self, program, settings, command)

    CommandHandlers.run = counted


if __name__ == "__main__":
    rank, at, what, path, *sys.argv[1:] = sys.argv[1:]
    if os.environ["RANK"] == rank:
        fail_in(int(at), what, Path(path))
    sys.exit(main())
