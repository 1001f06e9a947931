"""The manifest of a download: what was fetched, from which commit, with size and SHA-256 of every file.

It is written last, so its presence says that the download was complete; verify_manifest says that it still is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from flexengine.checkpoint.atomic import sha256_of, write_json
from flexengine.wording import parse_json

FOLDER_MANIFEST = "flexengine_manifest.json"
FORMAT_VERSION = 1


class DownloadError(RuntimeError):
    """A download cannot be done or is not what it should be; the message says what was asked, found, and what to do."""


class FileRecord(NamedTuple):
    """Contents of one file: size in bytes and SHA-256 in hex."""

    num_bytes: int
    sha256: str


def manifest_path(target: Path) -> Path:
    """Manifest of a downloaded folder (inside it), or of a single file such as a data set (beside it)."""
    return target / FOLDER_MANIFEST if target.is_dir() else target.with_name(target.name + ".manifest.json")


def write_manifest(target: Path, files: dict[str, FileRecord], source: dict[str, Any]) -> Path:
    """Write the manifest of `target`: `source` says where it came from, `files` are relative to the manifest."""
    records = {name: {"size": record.num_bytes, "sha256": record.sha256} for name, record in sorted(files.items())}
    path = manifest_path(target)
    write_json(path, {"format_version": FORMAT_VERSION, **source, "files": records})
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
        raise DownloadError(f"{path}: not a manifest of a download; run the download again.") from None
    return manifest


def verify_manifest(target: Path | str) -> dict[str, Any]:
    """Check every file of a download against its manifest, sizes first, then SHA-256; returns the manifest.

    target: the folder of a model, or the .jsonl file of a data set. Reads every byte.
    Raises: DownloadError naming each file that is missing or differs.
    """
    target = Path(target)
    manifest = read_manifest(target)
    folder = manifest_path(target).parent
    problems = []
    for name, record in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != record["size"]:
            problems.append(f"{name}: {path.stat().st_size} bytes, expected {record['size']}")
        elif (found := sha256_of(path)) != record["sha256"]:
            problems.append(f"{name}: SHA-256 {found}, expected {record['sha256']}")
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise DownloadError(
            f"{target}: {len(problems)} of {len(manifest['files'])} files differ from the manifest:{listed}\n"
            "Run the download again to fetch what differs."
        )
    return manifest
