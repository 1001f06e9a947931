"""Makes bench/ importable (in its importlib mode pytest leaves sys.path alone)."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
collect_ignore_glob = [] if Path(ROOT, "bench").is_dir() else ["test_golden_*.py"]  # not beside an installed package
if ROOT not in sys.path:
    sys.path.append(ROOT)
