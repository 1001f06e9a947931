"""`python -m flexengine COMMAND ...`"""

import sys

from flexengine.parallel.parent import follow_parent

follow_parent()  # the first line of a rank

from flexengine.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
