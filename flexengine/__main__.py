"""`python -m flexengine COMMAND ...`, and the script `flexengine`."""

import sys

from flexengine.output import loading, open_standard_streams
from flexengine.parallel.parent import follow_parent

follow_parent()  # the first line of a rank
open_standard_streams()
with loading():
    from flexengine.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
