"""`python -m flexengine COMMAND ...`, and the script `flexengine`."""

import sys

from flexengine.output import loading, open_standard_streams

open_standard_streams()
with loading():
    from flexengine.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
