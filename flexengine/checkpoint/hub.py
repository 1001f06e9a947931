"""Fetch files of a Hugging Face hub repository: resumable, verified, placed atomically.

huggingface_hub lists the repository, authenticates (HF_TOKEN), honours HF_ENDPOINT and HF_HUB_OFFLINE and keeps the
connections; the transfer loop is here because its own restarts from zero when the process ends in the middle of a file.
Contents are checked against the repository's metadata: SHA-256 for files in large-file storage, and for the others the
git blob id, SHA-1 of "blob <size>\\0" and the contents (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from flexengine.checkpoint.atomic import HASH_BLOCK_BYTES, format_gib, sync_folder
from flexengine.checkpoint.hub_errors import HTTP_ERROR, with_retries
from flexengine.checkpoint.manifest import DownloadError, FileRecord

PARTIAL_FOLDER = ".flexengine_partial"
LIST_TIMEOUT_S = 60.0
PROGRESS_BYTES = 1 << 30  # one line of log per GiB of a large file


class RemoteFile(NamedTuple):
    """A file as the hub describes it; a mirror may leave any of size (bytes) and hashes out."""

    path: str
    num_bytes: int | None
    sha256: str | None
    git_sha1: str | None


class RepoListing(NamedTuple):
    """The files of one repository at one commit."""

    repo: str
    repo_type: str  # "model" or "dataset"
    commit: str
    files: dict[str, RemoteFile]


class Transfer(NamedTuple):
    """How to fetch: endpoint (None: HF_ENDPOINT or the public hub), files at once, attempts without progress, log."""

    endpoint: str | None = None
    num_workers: int = 4
    num_retries: int = 5
    log: Callable[[str], None] = print

    @property
    def endpoint_url(self) -> str:
        return (self.endpoint or constants.ENDPOINT).rstrip("/")


def list_repo(repo: str, repo_type: str, revision: str, transfer: Transfer) -> RepoListing:
    """Resolve `revision` (branch, tag or commit) of `repo` to a commit and list its files with sizes and hashes.

    Raises: DownloadError when the hub cannot be reached, or refuses, or does not know the repository or revision.
    """
    asked = f"{repo_type} {repo!r} at revision {revision!r} from {transfer.endpoint_url}"
    api = HfApi(endpoint=transfer.endpoint_url)

    def ask() -> RepoListing:
        info = api.repo_info(repo, revision=revision, repo_type=repo_type, timeout=LIST_TIMEOUT_S, files_metadata=True)
        if not info.sha:
            raise DownloadError(f"{asked}: the answer names no commit; check that HF_ENDPOINT is a hub or its mirror.")
        files = {}
        for sibling in getattr(info, "siblings", None) or []:
            sha256 = sibling.lfs.sha256 if sibling.lfs else None
            size = sibling.lfs.size if sibling.lfs else sibling.size
            git_sha1 = None if sibling.lfs else sibling.blob_id
            files[sibling.rfilename] = RemoteFile(sibling.rfilename, size, sha256, git_sha1)
        return RepoListing(repo, repo_type, info.sha, files)

    return with_retries(ask, asked, transfer.num_retries, transfer.log)


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
    Raises: DownloadError for the first file that fails (others stop and keep what they have); OSError of the disk.
    """
    files = [listing.files[path] for path in paths]
    for file in files:
        pure = PurePosixPath(file.path)
        if pure.is_absolute() or ".." in pure.parts:
            raise DownloadError(f"{listing.repo}: file name {file.path!r} leaves the target folder; refusing to fetch.")
    _check_disk(files, target, partial)
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=transfer.num_workers) as pool:
        futures = {
            file.path: pool.submit(_FileFetch(listing, file, (target, partial), transfer).run, stop) for file in files
        }
        try:
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            failures = [error for future in done if (error := future.exception())]
            if failures:
                raise failures[0]
        finally:
            stop.set()  # nothing runs any more after success; after an error or Ctrl-C the rest stops at its next block
            pool.shutdown(cancel_futures=True)
    return {path: future.result() for path, future in futures.items()}


def _check_disk(files: list[RemoteFile], target: Path, partial: Path) -> None:
    needed_bytes = 0
    for file in files:
        placed = target / file.path
        if not placed.is_file() or placed.stat().st_size != file.num_bytes:
            have = partial / _partial_name(file)
            needed_bytes += (file.num_bytes or 0) - (have.stat().st_size if have.is_file() else 0)
    free_bytes = shutil.disk_usage(target).free
    if needed_bytes > free_bytes:
        raise DownloadError(
            f"{target}: {format_gib(needed_bytes)} are still to be fetched, the disk has {format_gib(free_bytes)} "
            "free. Free some space or choose another --target."
        )


def _partial_name(file: RemoteFile) -> str:
    """Named by contents, so that bytes of another revision are never continued, and by path: equal files share none."""
    return f"{file.sha256 or file.git_sha1 or 'unknown'}-{hashlib.sha256(file.path.encode()).hexdigest()[:16]}"


class _FileFetch:
    """One file on its way: bytes so far in `partial_path`, their digests in step with them."""

    def __init__(self, listing: RepoListing, file: RemoteFile, places: tuple[Path, Path], transfer: Transfer) -> None:
        target, partial = places
        self.file, self.transfer = file, transfer
        self.asked = f"{file.path} of {listing.repo_type} {listing.repo!r} from {transfer.endpoint_url}"
        self.url = hf_hub_url(
            listing.repo,
            file.path,
            repo_type=listing.repo_type,
            revision=listing.commit,
            endpoint=transfer.endpoint_url,
        )
        self.path = target / file.path
        self.partial_path = partial / _partial_name(file)
        self.stop = threading.Event()
        self._restart()

    def run(self, stop: threading.Event) -> FileRecord:
        """Keep, continue or fetch the file; returns its record once it is verified and in place.

        Raises: DownloadError at the next block after `stop` is set.
        """
        self.stop = stop
        if self.path.is_file() and self.file.num_bytes in (None, self.path.stat().st_size):
            self._digest_file(self.path)
            if self._mismatch() is None and self._hash_known():
                self.transfer.log(f"have {self.file.path} ({format_gib(self.num_bytes)}), verified")
                return FileRecord(self.num_bytes, self.sha256.hexdigest())
        self._restart()
        if self.partial_path.is_file():
            self._digest_file(self.partial_path)
        size = "size unknown" if self.file.num_bytes is None else format_gib(self.file.num_bytes)
        resumed = f", continuing at {format_gib(self.num_bytes)}" if self.num_bytes else ""
        self.transfer.log(f"fetching {self.file.path} ({size}{resumed})")
        with_retries(self._receive, self.asked, self.transfer.num_retries, self.transfer.log, self._progressed)
        self._check_contents()
        self._place()
        return FileRecord(self.num_bytes, self.sha256.hexdigest())

    def _restart(self) -> None:
        self.num_bytes = self._reported_bytes = 0
        self.sha256 = hashlib.sha256()
        self.git_sha1 = hashlib.sha1(b"blob %d\0" % (self.file.num_bytes or 0), usedforsecurity=False)

    def _digest(self, block: bytes) -> None:
        self.sha256.update(block)
        if self.file.git_sha1:
            self.git_sha1.update(block)
        self.num_bytes += len(block)

    def _digest_file(self, path: Path) -> None:
        self._restart()
        with open(path, "rb") as file:
            while block := file.read(HASH_BLOCK_BYTES):
                self._digest(block)
        self._reported_bytes = self.num_bytes

    def _hash_known(self) -> bool:
        return bool(self.file.sha256 or (self.file.git_sha1 and self.file.num_bytes is not None))

    def _progressed(self) -> bool:
        """Whether bytes arrived since the last time this was asked."""
        before, self._reported_bytes = self._reported_bytes, self.num_bytes
        return self.num_bytes > before

    def _receive(self) -> None:
        """One request for what is missing; raises unless the file is complete afterwards."""
        if self.file.num_bytes is not None and self.num_bytes > self.file.num_bytes:
            self._restart()  # what an earlier attempt left is not the beginning of this file
        if self.num_bytes and self.num_bytes == self.file.num_bytes:
            return
        self.partial_path.parent.mkdir(parents=True, exist_ok=True)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # offsets must count the file's own bytes
        if self.num_bytes:
            headers["Range"] = f"bytes={self.num_bytes}-"
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", self.url, headers=headers, timeout=timeout_s) as response:
            unsatisfiable = response.status_code == 416  # what we have is longer than the file: it is another one
            if response.is_error and not unsatisfiable:
                response.read()
                hf_raise_for_status(response)
            if response.status_code != 206:
                self._restart()
            with open(self.partial_path, "ab") as file:
                file.truncate(self.num_bytes)
                if unsatisfiable:
                    raise HTTP_ERROR("the server has fewer bytes than an earlier attempt received")
                for block in response.iter_bytes():  # as they arrive: what a broken connection gave is kept
                    self._append(file, block)
        if self.file.num_bytes is not None and self.num_bytes < self.file.num_bytes:
            raise HTTP_ERROR(f"the connection ended after {self.num_bytes} of {self.file.num_bytes} bytes")

    def _append(self, file: IO[bytes], block: bytes) -> None:
        if self.stop.is_set():
            raise DownloadError(f"{self.asked}: stopped.")
        file.write(block)
        before_bytes = self.num_bytes
        self._digest(block)
        if self.num_bytes // PROGRESS_BYTES > before_bytes // PROGRESS_BYTES:
            total = "?" if self.file.num_bytes is None else format_gib(self.file.num_bytes)
            self.transfer.log(f"  {self.file.path}: {format_gib(self.num_bytes)} of {total}")

    def _mismatch(self) -> str | None:
        """What differs between the bytes so far and the hub's description, or None."""
        sha256, git_sha1 = self.sha256.hexdigest(), self.git_sha1.hexdigest()
        if self.file.num_bytes not in (None, self.num_bytes):
            return f"size is {self.num_bytes} bytes, the hub lists {self.file.num_bytes}"
        if self.file.sha256 not in (None, sha256):
            return f"SHA-256 is {sha256}, the hub lists {self.file.sha256}"
        if self.file.num_bytes is not None and self.file.git_sha1 not in (None, git_sha1):
            return f"git SHA-1 is {git_sha1}, the hub lists {self.file.git_sha1}"
        return None

    def _check_contents(self) -> None:
        if mismatch := self._mismatch():
            self.partial_path.unlink(missing_ok=True)
            raise DownloadError(
                f"{self.asked}: the contents are wrong: {mismatch}. They were thrown away; run the download again, and "
                "if it persists, check proxies and mirrors (HF_ENDPOINT) on the way."
            )

    def _place(self) -> None:
        """Sync and rename; the digests are of what was received, so what lies on the disk must be as long."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(self.partial_path, "r+b") as file:
                on_disk_bytes = os.fstat(file.fileno()).st_size
                os.fsync(file.fileno())
        except FileNotFoundError:
            on_disk_bytes = -1  # differs from every size
        if on_disk_bytes != self.num_bytes:
            self.partial_path.unlink(missing_ok=True)
            raise DownloadError(
                f"{self.asked}: {self.num_bytes} bytes were received, {self.partial_path} now differs: "
                "another program changes this folder. Stop it and run the download again."
            )
        os.replace(self.partial_path, self.path)
        sync_folder(self.path.parent)
