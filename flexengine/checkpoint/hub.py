"""Fetch the files of a Hugging Face hub repository into a folder, several at once.

Each file takes care of itself (hub_file.py); here is who may write where, what fits on the disk, and when to give up.
"""

from __future__ import annotations

import contextlib
import fcntl
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from flexengine.checkpoint.atomic import format_gib
from flexengine.checkpoint.hub_file import FileFetch, partial_name
from flexengine.checkpoint.hub_listing import RemoteFile, RepoListing, Transfer
from flexengine.checkpoint.layout import PARTIAL_FOLDER, is_file_name
from flexengine.checkpoint.manifest import DownloadError, FileRecord
from flexengine.wording import shown

STALL_S = 300.0  # a download that moves fewer than STALL_BYTES in such a time is given up
STALL_BYTES = 300_000
STOP_WAIT_S = 1.0  # for threads to notice that they shall stop; one that waits for a silent server is left behind


@contextlib.contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Folder inside `target` for unfinished files, locked against a second download into the same place.

    Finished downloads remove it; interrupted ones leave it, and the next one continues from it.
    Raises: DownloadError while another process holds it.
    """
    folder = target / PARTIAL_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DownloadError(f"{target}: another download is writing here; wait for it or stop it.") from None
        try:
            yield folder
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            if [path.name for path in folder.glob("*")] == ["lock"]:  # nothing to continue from
                shutil.rmtree(folder, ignore_errors=True)


def fetch_files(
    listing: RepoListing, paths: list[str], target: Path, partial: Path, transfer: Transfer
) -> dict[str, FileRecord]:
    """Bring `paths` of a repository into folder `target`, several at once; returns size and SHA-256 of each.

    Files that are already there and match are kept; unfinished ones in `partial` continue where they stopped.
    Order: each file is renamed into place after its contents were verified and synced.
    Raises: DownloadError for the first file that fails (others stop and keep what they have), and before any is fetched
    where hashes are required that the hub does not state; OSError of the disk.
    """
    files = [listing.files[path] for path in paths]
    for file in files:
        _check_name(listing.repo, file.path)
    if transfer.require_hashes:
        _refuse_unhashed(listing, files)
    _check_disk(files, target, partial)
    fetches = [FileFetch(listing, file, (target, partial), transfer) for file in files]
    records = _run_together(fetches, transfer.num_workers)
    return {path: records[path] for path in paths}


def unverified(listing: RepoListing, paths: Iterable[str]) -> str:
    """ ", verified", or what could not be compared, for the end of a line that says that `paths` are complete."""
    files = [listing.files[path] for path in paths]
    unknown = [file for file in files if not file.has_hash]
    if not unknown:
        return ", verified"
    sizes = sum(file.num_bytes is not None for file in unknown)
    return f"; NOT verified: the hub lists no hash of {len(unknown)} of them, and of {sizes} only the size was compared"


def _refuse_unhashed(listing: RepoListing, files: list[RemoteFile]) -> None:
    unknown = [file.path for file in files if not file.has_hash]
    if unknown:
        raise DownloadError(
            f"--require-hashes: the hub lists no hash of {len(unknown)} of {len(files)} files of {listing.repo}, such"
            f" as {shown(unknown[0])}, so what arrives could not be compared. Check that HF_ENDPOINT is a hub that"
            " lists them, or leave the flag out."
        )


def _check_name(repo: str, path: str) -> None:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise DownloadError(f"{repo}: file name {path!r} leaves the target folder; refusing to fetch.")
    if not path or PARTIAL_FOLDER in pure.parts or not all(is_file_name(part) for part in pure.parts):
        raise DownloadError(f"{repo}: {shown(path)} is no name for a file here; choose others with --allow-patterns.")


def _run_together(fetches: list[FileFetch], num_workers: int) -> dict[str, FileRecord]:
    """Run all fetches in threads; returns the records by path.

    The threads are daemons: one that waits for a silent server keeps neither Ctrl-C nor the first error from ending
    the download. What it receives after `stop` is set it does not write.
    Raises: the first error; DownloadError when next to nothing arrives for STALL_S.
    """
    waiting, stop = deque(fetches), threading.Event()
    finished: queue.SimpleQueue[tuple[str, FileRecord | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while not stop.is_set() and waiting:
            fetch = waiting.popleft()
            try:
                finished.put((fetch.file.path, fetch.run(stop)))
            except BaseException as error:  # told to the thread that waits
                finished.put((fetch.file.path, error))
                return

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(num_workers, len(fetches)))]
    try:
        for thread in threads:
            thread.start()
        return _collected(finished, fetches)
    finally:
        stop.set()
        give_up_s = time.monotonic() + STOP_WAIT_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, give_up_s - time.monotonic()))


def _collected(
    finished: queue.SimpleQueue[tuple[str, FileRecord | BaseException]], fetches: list[FileFetch]
) -> dict[str, FileRecord]:
    records: dict[str, FileRecord] = {}
    seen_bytes, seen_s = 0, time.monotonic()
    while len(records) < len(fetches):
        with contextlib.suppress(queue.Empty):
            path, result = finished.get(timeout=1.0)
            if isinstance(result, BaseException):
                raise result
            records[path] = result
        moved_bytes = sum(fetch.activity_bytes for fetch in fetches)
        if moved_bytes - seen_bytes >= STALL_BYTES:
            seen_bytes, seen_s = moved_bytes, time.monotonic()
        elif time.monotonic() - seen_s > STALL_S:
            missing = [fetch for fetch in fetches if fetch.file.path not in records]
            raise DownloadError(
                f"{missing[0].asked}: {moved_bytes - seen_bytes} bytes of {len(missing)} files arrived in "
                f"{STALL_S:.0f} s. Check the network and proxies, then run the download again; it continues."
            )
    return records


def _check_disk(files: list[RemoteFile], target: Path, partial: Path) -> None:
    needed_bytes = 0
    for file in files:
        placed = target / file.path
        if not placed.is_file() or placed.stat().st_size != file.num_bytes:
            have = partial / partial_name(file)
            needed_bytes += (file.num_bytes or 0) - (have.stat().st_size if have.is_file() else 0)
    free_bytes = shutil.disk_usage(target).free
    if needed_bytes > free_bytes:
        raise DownloadError(
            f"{target}: {format_gib(needed_bytes)} are still to be fetched, the disk has {format_gib(free_bytes)} "
            "free. Free some space or choose another --target."
        )
