"""Makes tests/engine_helpers.py importable: in its importlib mode pytest leaves sys.path alone."""

import sys
from pathlib import Path

HELPERS = str(Path(__file__).resolve().parents[1])
if HELPERS not in sys.path:
    sys.path.append(HELPERS)
