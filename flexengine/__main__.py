"""`python -m flexengine COMMAND ...`"""

import sys

from flexengine.parallel.parent import follow_parent, tell


def run() -> int:
    """Run the command of this process's arguments; a rank tells the launcher how it ended. Returns the exit status."""
    status: object = 1  # of an exception
    try:
        from flexengine.cli import main  # noqa: PLC0415, after the first line of a rank

        status = main()
        return status
    except SystemExit as end:
        status = end.code or 0
        raise
    finally:
        tell(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    follow_parent()
    sys.exit(run())
