"""`python -m flexengine COMMAND ...`"""

import sys

from flexengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
