"""The manifest of a download, an export or a checkpoint: where it came from, with size and SHA-256 of every file.

A download writes it last, so its presence says that the download was complete. Whoever reads such a folder compares
what it reads: `check_acted_on` what decides how weights are used, `check_files` the files that are named.
The manifest ends in a SHA-256 of its own bytes, so a changed one is not believed.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.checkpoint.atomic import is_temporary, sha256_of, sha256_unless, write_text
from flexengine.checkpoint.layout import ADAPTER_CONFIG, INDEX_FILE, PARTIAL_FOLDER, is_support_file
from flexengine.version import __version__
from flexengine.wording import parse_json

FOLDER_MANIFEST = "flexengine_manifest.json"
FORMAT_VERSION = 2
WITHOUT_DIGEST = 1
"""The format that has no digest of itself; downloads of 0.1 have it."""
NUM_CHECKING_THREADS = 4  # files compared at once: SHA-256 takes a core for 1 to 2 GB/s
_DIGEST = b',\n  "manifest_sha256": "'
"""What stands between the bytes that the digest is of and the digest."""


class DownloadError(RuntimeError):
    """A download cannot be done or is not what it should be; the message says what was asked, found, and what to do."""


class ManifestError(ValueError):
    """A folder is not what its manifest says, or the manifest is damaged; the message says what to do."""


class FileRecord(NamedTuple):
    """Contents of one file: size in bytes and SHA-256 in hex."""

    num_bytes: int
    sha256: str


def manifest_path(target: Path) -> Path:
    """Manifest of a folder (inside it), or of a single file such as a data set (beside it)."""
    return target / FOLDER_MANIFEST if target.is_dir() else target.with_name(target.name + ".manifest.json")


def manifest_text(files: Mapping[str, FileRecord], source: Mapping[str, Any]) -> str:
    """A manifest as text: `source` says where the files came from, their names are relative to the manifest."""
    records = {name: {"size": record.num_bytes, "sha256": record.sha256} for name, record in sorted(files.items())}
    values = {"format_version": FORMAT_VERSION, "flexengine": __version__, **source, "files": records}
    body = json.dumps(values, indent=2).removesuffix("\n}").encode()
    return (body + _DIGEST + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n').decode()


def write_manifest(target: Path, files: Mapping[str, FileRecord], source: Mapping[str, Any]) -> Path:
    """Write the manifest of `target`, as `manifest_text` makes it; returns its path."""
    path = manifest_path(target)
    write_text(path, manifest_text(files, source))
    return path


def read_manifest(target: Path) -> dict[str, Any]:
    """The manifest of `target` as it was written.

    Raises: ManifestError where there is none (a download did not finish) or it is damaged.
    """
    path = manifest_path(target)
    try:
        data = path.read_bytes()
        manifest = parse_json(data, path)
        files = manifest["files"]
        assert all({"size", "sha256"} <= files[name].keys() for name in files)
        assert _has_its_digest(data, manifest)
    except FileNotFoundError:
        raise ManifestError(f"{path}: not found; the download did not finish. Run it again to complete it.") from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
        raise ManifestError(
            f"{path}: damaged, so not a manifest to compare with; fetch or export again, or remove it to use the files"
            " as they are."
        ) from None
    return manifest


def _has_its_digest(data: bytes, manifest: Mapping[str, Any]) -> bool:
    body, found, digest = data.rpartition(_DIGEST)
    if not found:
        return manifest.get("format_version", WITHOUT_DIGEST) == WITHOUT_DIGEST
    return digest == f'{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


# ---- comparing -------------------------------------------------------------------------------------------------


def compare(target: Path) -> list[str]:
    """Say what is missing, altered or there beside what the manifest lists. Reads every byte.

    Raises: ManifestError as `read_manifest`.
    """
    records, found = read_manifest(target)["files"], _files_of(target)
    problems = _differences(manifest_path(target).parent, records, threading.Event())
    return problems + [f"{name}: not in the manifest" for name in found if name not in records]


def verify_manifest(target: Path | str) -> dict[str, Any]:
    """Check every file that a manifest lists; returns the manifest. Reads every byte.

    target: the folder of a model, or the .jsonl file of a data set.
    Raises: DownloadError naming each file that is missing or differs.
    """
    target = Path(target)
    try:
        manifest = read_manifest(target)
    except ManifestError as error:
        raise DownloadError(str(error)) from None
    problems = _differences(manifest_path(target).parent, manifest["files"], threading.Event())
    if problems:
        raise DownloadError(
            f"{target}: {len(problems)} of {len(manifest['files'])} files differ from the manifest:"
            f"{listed(problems)}\nRun the download again to fetch what differs, or export again."
        )
    return manifest


DAMAGED_MODEL = (
    "They are damaged, or of two models: fetch or export the model again. If they were changed on purpose:"
    " flexengine verify --accept {folder}"
)


def check_acted_on(folder: Path) -> None:
    """Compare the files that say how the weights of a folder are used: configuration, tokenizer, template, index.

    A folder without a manifest, as other programs write it, is taken as it is; so are files that it does not list.
    Raises: ManifestError naming each file that is missing or differs, or where the manifest is damaged.
    """
    if manifest_path(folder).is_file():
        listed_names = read_manifest(folder)["files"]
        check_files(folder, filter(_is_acted_on, listed_names), threading.Event())


def _is_acted_on(name: str) -> bool:
    return is_support_file(name) or name in (INDEX_FILE, ADAPTER_CONFIG)


def check_files(folder: Path, names: Iterable[str], stop: threading.Event, remedy: str = DAMAGED_MODEL) -> None:
    """Check those of the files `names` of a folder that its manifest lists; without a manifest, none.

    stop: once it is set, what was not compared yet is taken as right. remedy: what to do where one differs.
    Raises: ManifestError naming each file that differs, or where the manifest is damaged.
    """
    if not manifest_path(folder).is_file():
        return
    records = read_manifest(folder)["files"]
    problems = _differences(folder, {name: records[name] for name in names if name in records}, stop)
    if problems:
        raise ManifestError(
            f"{folder}: {len(problems)} files differ from {FOLDER_MANIFEST}:{listed(problems)}\n"
            f"{remedy.format(folder=folder)}"
        )


def accept(target: Path) -> list[str]:
    """Take the files of `target` as they are into its manifest, which remembers that; returns what differed.

    Raises: ManifestError as `read_manifest`, and for a checkpoint that differs, which nobody changes on purpose.
    """
    manifest, problems = read_manifest(target), compare(target)
    if problems and manifest.get("source") == "checkpoint":
        raise ManifestError(f"{target} is a checkpoint of a run, which must be what the run wrote; resume another.")
    if problems:
        folder = manifest_path(target).parent
        paths = {name: folder / name for name in _files_of(target)}
        records = {name: FileRecord(path.stat().st_size, sha256_of(path)) for name, path in paths.items()}
        source = {key: value for key, value in manifest.items() if key not in ("format_version", "manifest_sha256")}
        write_manifest(target, records, {**source, "accepted": [*manifest.get("accepted", ()), *problems]})
    return problems


def listed(problems: Iterable[str]) -> str:
    """Problems as lines of a message."""
    return "".join(f"\n  {problem}" for problem in problems)


def _files_of(target: Path) -> list[str]:
    """What a manifest of `target` is of: the file, or the folder's files but for what is being written."""
    if not target.is_dir():
        return [target.name] if target.is_file() else []
    paths = (path for path in sorted(target.rglob("*")) if path.is_file())
    names = [path.relative_to(target) for path in paths if not is_temporary(path.name)]
    left_out = (FOLDER_MANIFEST, PARTIAL_FOLDER)
    return [name.as_posix() for name in names if name.parts[0] not in left_out]


def _differences(folder: Path, records: Mapping[str, Any], stop: threading.Event) -> list[str]:
    """What is wrong with the files of `records`, in words."""
    with ThreadPoolExecutor(NUM_CHECKING_THREADS, "checksums") as pool:
        found = pool.map(lambda item: _difference(folder / item[0], item[1], stop), records.items())
        return [f"{name}: {problem}" for name, problem in zip(records, found, strict=True) if problem]


def _difference(path: Path, record: Mapping[str, Any], stop: threading.Event) -> str | None:
    if not path.is_file():
        return "missing"
    if path.stat().st_size != record["size"]:
        return f"{path.stat().st_size} bytes, expected {record['size']}"
    found = sha256_unless(path, stop)
    return None if found in (None, record["sha256"]) else f"SHA-256 {found}, expected {record['sha256']}"
