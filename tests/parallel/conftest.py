"""Makes ranks_helper importable, as the helpers beside conftest.py of the tests are."""

import sys
from pathlib import Path

HELPERS = str(Path(__file__).resolve().parent)
if HELPERS not in sys.path:
    sys.path.append(HELPERS)
