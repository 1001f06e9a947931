"""The manifest of a download or an export: where it came from, with size and SHA-256 of every file.

A download writes it last, so its presence says that the download was complete; verify_manifest says that it still is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.checkpoint.atomic import sha256_unless, write_text
from flexengine.wording import parse_json

FOLDER_MANIFEST = "flexengine_manifest.json"
FORMAT_VERSION = 1
NUM_CHECKING_THREADS = 4  # files compared at once: SHA-256 takes a core for 1 to 2 GB/s


class DownloadError(RuntimeError):
    """A download cannot be done or is not what it should be; the message says what was asked, found, and what to do."""


class FileRecord(NamedTuple):
    """Contents of one file: size in bytes and SHA-256 in hex."""

    num_bytes: int
    sha256: str


def manifest_path(target: Path) -> Path:
    """Manifest of a downloaded folder (inside it), or of a single file such as a data set (beside it)."""
    return target / FOLDER_MANIFEST if target.is_dir() else target.with_name(target.name + ".manifest.json")


def manifest_text(files: Mapping[str, FileRecord], source: dict[str, Any]) -> str:
    """A manifest as text: `source` says where the files came from, their names are relative to the manifest."""
    records = {name: {"size": record.num_bytes, "sha256": record.sha256} for name, record in sorted(files.items())}
    return json.dumps({"format_version": FORMAT_VERSION, **source, "files": records}, indent=2) + "\n"


def write_manifest(target: Path, files: Mapping[str, FileRecord], source: dict[str, Any]) -> Path:
    """Write the manifest of `target`, as `manifest_text` makes it; returns its path."""
    path = manifest_path(target)
    write_text(path, manifest_text(files, source))
    return path


def read_manifest(target: Path) -> dict[str, Any]:
    """The manifest of `target` as it was written.

    Raises: DownloadError where there is none (the download did not finish) or it is damaged.
    """
    path = manifest_path(target)
    try:
        manifest = parse_json(path.read_bytes(), path)
        files = manifest["files"]
        assert all({"size", "sha256"} <= files[name].keys() for name in files)
    except FileNotFoundError:
        raise DownloadError(f"{path}: not found; the download did not finish. Run it again to complete it.") from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
        raise DownloadError(f"{path}: not a manifest; run the download again, or remove it.") from None
    return manifest


def verify_manifest(target: Path | str) -> dict[str, Any]:
    """Check every file of a download or an export against its manifest; returns the manifest. Reads every byte.

    target: the folder of a model, or the .jsonl file of a data set.
    Raises: DownloadError naming each file that is missing or differs.
    """
    target = Path(target)
    manifest = read_manifest(target)
    problems = _differences(manifest_path(target).parent, manifest["files"], threading.Event())
    if problems:
        raise DownloadError(
            f"{target}: {len(problems)} of {len(manifest['files'])} files differ from the manifest:"
            f"{_listed(problems)}\nRun the download again to fetch what differs, or export again."
        )
    return manifest


DAMAGED_MODEL = (
    f"They are damaged, or of two models: fetch or export the model again. If they were changed on purpose, remove"
    f" {FOLDER_MANIFEST}."
)


def check_files(folder: Path, names: Iterable[str], stop: threading.Event, remedy: str = DAMAGED_MODEL) -> None:
    """Check those of the files `names` of a model folder that its manifest lists; without a manifest, none.

    stop: once it is set, what was not compared yet is taken as right. remedy: what to do where one differs.
    Raises: DownloadError naming each file that differs, or where the manifest is damaged.
    """
    if not manifest_path(folder).is_file():
        return
    records = read_manifest(folder)["files"]
    problems = _differences(folder, {name: records[name] for name in names if name in records}, stop)
    if problems:
        raise DownloadError(
            f"{folder}: {len(problems)} files differ from {FOLDER_MANIFEST}:{_listed(problems)}\n{remedy}"
        )


def _differences(folder: Path, records: dict[str, Any], stop: threading.Event) -> list[str]:
    """What is wrong with the files of `records`, in words."""
    with ThreadPoolExecutor(NUM_CHECKING_THREADS, "checksums") as pool:
        found = pool.map(lambda item: _difference(folder / item[0], item[1], stop), records.items())
        return [f"{name}: {problem}" for name, problem in zip(records, found, strict=True) if problem]


def _difference(path: Path, record: dict[str, Any], stop: threading.Event) -> str | None:
    if not path.is_file():
        return "missing"
    if path.stat().st_size != record["size"]:
        return f"{path.stat().st_size} bytes, expected {record['size']}"
    found = sha256_unless(path, stop)
    return None if found in (None, record["sha256"]) else f"SHA-256 {found}, expected {record['sha256']}"


def _listed(problems: list[str]) -> str:
    return "".join(f"\n  {problem}" for problem in problems)
