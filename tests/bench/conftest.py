"""Makes bench/ importable, also in processes started from here (in its importlib mode pytest leaves sys.path alone)."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)
