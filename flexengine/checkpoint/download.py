"""Command line of hub downloads: models as folders, data sets as JSON lines, both with a manifest of what they are.

The story of a download: list the repository at one commit, choose files, fetch and verify them, write the manifest.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.utils import logging as hub_logging

from flexengine.checkpoint.atomic import format_gib, sha256_of
from flexengine.checkpoint.bounded_process import BoundedProcess
from flexengine.checkpoint.dataset_files import format_of, select_data_files
from flexengine.checkpoint.dataset_rows import import_parquet, write_json_lines
from flexengine.checkpoint.hub import fetch_files, partial_folder, unverified
from flexengine.checkpoint.hub_listing import RepoListing, Transfer, list_repo
from flexengine.checkpoint.layout import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, is_support_file
from flexengine.checkpoint.manifest import (
    DownloadError,
    FileRecord,
    ManifestError,
    manifest_path,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from flexengine.wording import FlagParser, explain_os_error, parse_json, shown

__all__ = ["DownloadError", "download_dataset", "download_model", "main", "verify_manifest"]

README = "README.md"
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130  # 2 is argparse's for wrong usage; 130 is the shells' 128 + SIGINT


def download_model(
    repo: str,
    target: Path,
    revision: str = "main",
    allow_patterns: list[str] | None = None,
    transfer: Transfer | None = None,
) -> Path:
    """Fetch a model repository into folder `target`; returns the path of its manifest, which is written last.

    allow_patterns: shell patterns over whole paths in the repository; each must match a file. Default: configuration
    and tokenizer files, and the weights as model.safetensors or as the shards that model.safetensors.index.json names.
    Raises: DownloadError for anything missing, refused or mismatched; OSError of the disk. Finished and partial files
    stay, and the next call continues from them.
    """
    transfer = transfer or Transfer()
    if target.exists() and not target.is_dir():
        raise DownloadError(f"{target}: --target of a model is a folder, this is a file.")
    listing = list_repo(repo, "model", revision, transfer)
    first, weights = _select_model_files(listing, allow_patterns)
    transfer.log(f"model {repo} at {listing.commit}: {len(first) + len(weights)} files or more into {target}")
    target.mkdir(parents=True, exist_ok=True)
    with partial_folder(target) as partial:
        manifest_path(target).unlink(missing_ok=True)  # from here on the folder is not known to be complete
        records = fetch_files(listing, first, target, partial, transfer)
        if allow_patterns is None and INDEX_FILE in first:
            weights = _shards(listing, target / INDEX_FILE)
        records |= fetch_files(listing, weights, target, partial, transfer)
        source = {"repo": repo, "repo_type": "model", "requested_revision": revision, "revision": listing.commit}
        path = write_manifest(target, records, source)
    total_bytes = sum(record.num_bytes for record in records.values())
    checked = unverified(listing, records)
    transfer.log(f"complete: {len(records)} files, {format_gib(total_bytes)}{checked}; manifest {path}")
    return path


def _select_model_files(listing: RepoListing, patterns: list[str] | None) -> tuple[list[str], list[str]]:
    """Files to fetch first (small ones), and the weights as far as they are known before the index is read."""
    names = sorted(listing.files)
    if patterns is not None:
        unmatched = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
        if unmatched:
            raise DownloadError(
                f"{listing.repo}: no file matches {', '.join(unmatched)}; it holds {_some(names)}. "
                "Correct --allow-patterns."
            )
        chosen = sorted({name for pattern in patterns for name in fnmatch.filter(names, pattern)})
        weights = [name for name in chosen if name.endswith(".safetensors")]
        return [name for name in chosen if name not in weights], weights
    layout = next((name for name in (SINGLE_FILE, INDEX_FILE) if name in listing.files), None)
    if layout is None:
        found = [name for name in names if name.endswith((".safetensors", ".bin", ".pth", ".pt", ".gguf"))]
        raise DownloadError(
            f"{listing.repo}: no safetensors weights ({SINGLE_FILE} or {INDEX_FILE}); found {_some(found)}. Choose a "
            "repository or --revision with safetensors, or name the files you want with --allow-patterns."
        )
    if CONFIG_FILE not in listing.files:
        raise DownloadError(
            f"{listing.repo}: no {CONFIG_FILE}; it holds {_some(names)}. Choose a full model repository."
        )
    support = [name for name in names if is_support_file(name)]
    return (support, [SINGLE_FILE]) if layout == SINGLE_FILE else ([*support, INDEX_FILE], [])


def _shards(listing: RepoListing, index_path: Path) -> list[str]:
    try:
        index = parse_json(index_path.read_bytes(), f"{listing.repo}: {INDEX_FILE}")
    except ValueError as error:
        raise DownloadError(f"{error}, or choose another --revision.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise DownloadError(
            f"{listing.repo}: {INDEX_FILE} has no weight_map from tensors to file names; it holds {shown(index)}. "
            "Choose another --revision."
        )
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if name not in listing.files]
    if missing:
        raise DownloadError(
            f"{listing.repo}: {INDEX_FILE} names {len(shards)} shards, the repository lacks {_some(missing)}. "
            "Choose another --revision."
        )
    return shards


def _some(names: list[str]) -> str:
    return (", ".join(names[:6]) or "nothing") + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def download_dataset(
    repo: str,
    target: Path,
    revision: str = "main",
    split: str = "train",
    *,
    config: str | None = None,
    transfer: Transfer | None = None,
) -> Path:
    """Fetch one split of a data set repository into `target` as JSON lines; returns its manifest, written last.

    The repository's files wait in a hidden folder beside `target` until the lines are written, then are removed.
    A `target` that is complete for this commit, split and configuration is left as it is.
    Raises: DownloadError for anything missing, refused or mismatched, or without a JSON form; OSError of the disk.
    """
    transfer = transfer or Transfer()
    if target.is_dir():
        raise DownloadError(
            f"{target}: --target of a data set is a file such as {target / 'train.jsonl'}, not a folder."
        )
    listing = list_repo(repo, "dataset", revision, transfer)
    source = {"repo": repo, "repo_type": "dataset", "requested_revision": revision, "revision": listing.commit}
    source |= {"config": config, "split": split}
    if _is_complete(target, source):
        transfer.log(f"have {target}, verified; nothing to do")
        return manifest_path(target)
    folder = target.with_name(f".{target.name}.source")
    folder.mkdir(parents=True, exist_ok=True)
    with partial_folder(folder) as partial:
        manifest_path(target).unlink(missing_ok=True)
        readme = None
        if README in listing.files:
            fetch_files(listing, [README], folder, partial, transfer)
            readme = (folder / README).read_text(encoding="utf-8", errors="replace")
        names = _bounded(repo, lambda: select_data_files(sorted(listing.files), readme, split, config))
        if format_of(names[0]) == "parquet":
            import_parquet()  # say what is missing before gigabytes are fetched
        transfer.log(f"data set {repo} at {listing.commit}: split {split}, {len(names)} files")
        records = fetch_files(listing, names, folder, partial, transfer)
        written = _bounded(repo, lambda: write_json_lines([folder / name for name in names], target))
    record, num_rows = FileRecord(*written[0]), written[1]
    sources = {name: {"size": part.num_bytes, "sha256": part.sha256} for name, part in records.items()}
    path = write_manifest(target, {target.name: record}, {**source, "num_rows": num_rows, "source_files": sources})
    shutil.rmtree(folder, ignore_errors=True)
    checked = unverified(listing, records)
    transfer.log(f"complete: {num_rows} rows, {format_gib(record.num_bytes)} in {target}{checked}; manifest {path}")
    return path


def _bounded(repo: str, call: Callable[[], Any]) -> Any:
    """Do in a bounded process what reads files that strangers wrote. Raises: DownloadError."""

    def telling() -> Any:
        try:
            return call()
        except DownloadError as error:
            raise ValueError(error) from None

    try:
        with BoundedProcess(f"data set {repo}", lambda: {"call": telling}) as process:
            return process.call("call")
    except ValueError as error:
        raise DownloadError(str(error)) from None


def _is_complete(target: Path, source: dict[str, str | None]) -> bool:
    """Whether target and its manifest are what this request would write."""
    if not target.is_file() or not manifest_path(target).is_file():
        return False
    try:
        manifest = read_manifest(target)
    except ManifestError:
        return False
    same_source = {key: manifest.get(key) for key in source} == source
    return same_source and manifest["files"].get(target.name, {}).get("sha256") == sha256_of(target)


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="flexengine download",
        description="Fetch a model or a data set from the Hugging Face hub, verified and resumable.",
        epilog="Environment: HF_ENDPOINT (a mirror), HF_TOKEN (private and gated repositories), HF_HUB_OFFLINE "
        "(refuse). An interrupted download continues when run again. Exit status: 0 complete and verified, 1 failed, "
        "2 wrong usage. Flags may be written with dashes or underscores.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help="a model repository into a folder")
    dataset = commands.add_parser("dataset", help="one split of a data set into a JSON lines file")
    verify = commands.add_parser("verify", help="check a finished download against its manifest")
    model.add_argument("--target", type=Path, required=True, metavar="DIR", help="folder to fill; created if absent")
    dataset.add_argument("--target", type=Path, required=True, metavar="FILE.jsonl", help="file to write")
    for command in (model, dataset):
        command.add_argument("repo", metavar="ORG/NAME", help="repository on the hub")
        command.add_argument("--revision", default="main", help="branch, tag or commit hash (default: main)")
        command.add_argument(
            "--require-hashes",
            action="store_true",
            help="refuse a --revision that is no commit, and files for which the hub states no hash",
        )
        command.add_argument("--endpoint", help="address of the hub (default: HF_ENDPOINT, else the public hub)")
        command.add_argument("--workers", type=_positive, default=4, help="files fetched at once (default: 4)")
        command.add_argument("--retries", type=int, default=5, help="attempts in a row without progress (default: 5)")
    model.add_argument(
        "--allow-patterns",
        nargs="+",
        metavar="PATTERN",
        help="fetch what matches these shell patterns instead of configuration, tokenizer and safetensors weights",
    )
    dataset.add_argument("--split", default="train", help="split to fetch (default: train)")
    dataset.add_argument("--config", "--subset", help="configuration (subset) of the data set, where it has several")
    verify.add_argument("path", type=Path, help="folder of a model, or .jsonl file of a data set")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {value}")
    return value


def _log(line: str) -> None:
    print(line, flush=True)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.command == "verify":
        manifest = verify_manifest(arguments.path)
        _log(f"{arguments.path}: {len(manifest['files'])} files as the manifest says")
        return
    transfer = Transfer(arguments.endpoint, arguments.workers, arguments.retries, _log, arguments.require_hashes)
    common = (arguments.repo, arguments.target, arguments.revision)
    if arguments.command == "model":
        download_model(*common, arguments.allow_patterns, transfer)
    else:
        download_dataset(*common, arguments.split, config=arguments.config, transfer=transfer)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name; None: the process's own); returns the exit status.

    Prints plain lines, errors to standard error, never asks, never needs a terminal.
    """
    arguments = _parser().parse_args(argv)
    hub_logging.set_verbosity_error()  # its hints and retries would double what is said here
    try:
        _run(arguments)
    except DownloadError as error:
        print(f"download failed: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except OSError as error:
        print("download failed:", explain_os_error(error, "--target"), file=sys.stderr, flush=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    return 0
