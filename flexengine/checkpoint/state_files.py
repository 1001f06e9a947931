"""Names of the files of a run's checkpoint, and its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.wording import parse_json

STATE_INDEX_FILE = "state.safetensors.index.json"
STATE_FILE = "checkpoint.json"
"""What a checkpoint holds beside tensors: the steps taken, the optimizer's options, where the data stands."""
FORMAT_VERSION = 1


def read_description(folder: Path | str) -> dict[str, Any]:
    """Read the description of a checkpoint. Raises CheckpointError when there is none, or it is of another format."""
    path = Path(folder) / STATE_FILE
    try:
        found = parse_json(path.read_bytes(), path)
        version = found["format_version"]
        known = isinstance(found["engine"], dict) and isinstance(found["run"], dict)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: no checkpoint of a run ({STATE_FILE}: {error.strerror}); give a folder checkpoints/step-N"
        ) from None
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); give an older checkpoint") from None
    if version != FORMAT_VERSION or not known:
        raise CheckpointError(f"{path} has format {version}, and this flexengine reads {FORMAT_VERSION}")
    return found
