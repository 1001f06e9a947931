"""One file of a hub repository on its way: resumed, bounded by what was listed, verified, placed atomically.

The transfer loop is here because that of huggingface_hub restarts from zero when the process ends in the middle of a
file. Contents are checked against the repository's metadata: SHA-256 for files in large-file storage, and for the
others the git blob id, SHA-1 of "blob <size>\\0" and the contents
(https://git-scm.com/book/en/v2/Git-Internals-Git-Objects).
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from pathlib import Path, PurePosixPath
from typing import IO, Any

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import build_hf_headers, get_session

from flexengine.checkpoint.atomic import HASH_BLOCK_BYTES, format_gib, sync_folder
from flexengine.checkpoint.hub_errors import HTTP_ERROR, raise_for_status, with_retries
from flexengine.checkpoint.hub_listing import RemoteFile, RepoListing, Transfer
from flexengine.checkpoint.manifest import DownloadError, FileRecord

PROGRESS_BYTES = 1 << 30  # one line of log per GiB of a large file
MAX_UNANNOUNCED_BYTES = 64 << 30  # of a file whose size neither the listing nor the answer tells
DEADLINE_S = 3600.0  # of a file, in all attempts, beside the time that it takes at the least rate
LEAST_BYTES_PER_S = 1 << 16  # a server that drips a byte now and then would keep a download busy for days

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


def partial_name(file: RemoteFile) -> str:
    """Named by contents, so that bytes of another revision are never continued, and by path: equal files share none."""
    return f"{file.sha256 or file.git_sha1 or 'unknown'}-{hashlib.sha256(file.path.encode()).hexdigest()[:16]}"


class FileFetch:
    """One file on its way: bytes so far in `partial_path`, their digests in step with them.

    activity_bytes: bytes received or compared so far, in all attempts; another thread may read it.
    """

    def __init__(self, listing: RepoListing, file: RemoteFile, places: tuple[Path, Path], transfer: Transfer) -> None:
        target, partial = places
        self.file, self.transfer = file, transfer
        self.asked = f"{file.path} of {listing.repo_type} {listing.repo!r} from {transfer.shown_endpoint}"
        self.url = hf_hub_url(
            listing.repo,
            file.path,
            repo_type=listing.repo_type,
            revision=listing.commit,
            endpoint=transfer.endpoint_url,
        )
        self.path = target / file.path
        self.partial_path = partial / partial_name(file)
        self.stop = threading.Event()
        self.activity_bytes = self._began_bytes = 0
        self._began_s = time.monotonic()
        self._furthest_bytes = 0
        self._restart()

    def run(self, stop: threading.Event) -> FileRecord:
        """Keep, continue or fetch the file; returns its record once it is verified and in place.

        Raises: DownloadError at the next block after `stop` is set.
        """
        self.stop = stop
        if self.path.is_file() and self.file.num_bytes in (None, self.path.stat().st_size):
            self._digest_file(self.path)
            if self._mismatch() is None and self.file.has_hash:
                self.transfer.log(f"have {self.file.path} ({format_gib(self.num_bytes)}), verified")
                return FileRecord(self.num_bytes, self.sha256.hexdigest())
        self._restart()
        if self.partial_path.is_file():
            self._digest_file(self.partial_path)
        self._furthest_bytes = self.num_bytes
        self._began_bytes, self._began_s = self.activity_bytes, time.monotonic()
        size = "size unknown" if self.file.num_bytes is None else format_gib(self.file.num_bytes)
        resumed = f", continuing at {format_gib(self.num_bytes)}" if self.num_bytes else ""
        self.transfer.log(f"fetching {self.file.path} ({size}{resumed})")
        with_retries(
            self._receive, self.asked, self.transfer.num_retries, self.transfer.log, self._progressed, stop.is_set
        )
        self._check_contents()
        self._place()
        return FileRecord(self.num_bytes, self.sha256.hexdigest())

    def _restart(self) -> None:
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()
        self.git_sha1 = hashlib.sha1(b"blob %d\0" % (self.file.num_bytes or 0), usedforsecurity=False)

    def _digest(self, block: bytes) -> None:
        self.sha256.update(block)
        if self.file.git_sha1:
            self.git_sha1.update(block)
        self.num_bytes += len(block)
        self.activity_bytes += len(block)

    def _digest_file(self, path: Path) -> None:
        self._restart()
        with open(path, "rb") as file:
            while block := file.read(HASH_BLOCK_BYTES):
                self._stop_here()
                self._digest(block)

    def _stop_here(self) -> None:
        if self.stop.is_set():
            raise DownloadError(f"{self.asked}: stopped.")

    def _progressed(self) -> bool:
        """Whether bytes arrived that no attempt had before: one that starts over and breaks off again has none."""
        before, self._furthest_bytes = self._furthest_bytes, max(self._furthest_bytes, self.num_bytes)
        return self.num_bytes > before

    def _receive(self) -> None:
        """One request for what is missing; raises unless the file is complete afterwards."""
        self._stop_here()
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
            self._take(response)

    def _take(self, response: Any) -> None:
        """Add the body of an answer to what there is."""
        unsatisfiable = response.status_code == 416  # what we have is longer than the file: it is another one
        if not unsatisfiable:
            raise_for_status(response)
            self._refuse_other_contents(response)
        other_part = response.status_code == 206 and not self._is_asked_part(response)
        if response.status_code != 206 or other_part:
            self._restart()
        with open(self.partial_path, "ab") as file:
            file.truncate(self.num_bytes)
            if unsatisfiable:
                raise HTTP_ERROR("the server has fewer bytes than an earlier attempt received")
            if other_part:
                raise HTTP_ERROR("the server sent another part of the file than was asked for")
            expected_bytes = self._expected_bytes(response)
            for block in response.iter_bytes():  # as they arrive: what a broken connection gave is kept
                self._append(file, block, MAX_UNANNOUNCED_BYTES if expected_bytes is None else expected_bytes)
        if expected_bytes is not None and self.num_bytes < expected_bytes:
            raise HTTP_ERROR(f"the connection ended after {self.num_bytes} of {expected_bytes} bytes")

    def _refuse_other_contents(self, response: Any) -> None:
        """Raise DownloadError for what cannot be the file: a web page, or bytes that something on the way packed."""
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        page = kind == "text/html" and PurePosixPath(self.file.path).suffix not in (".html", ".htm")
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        if page or encoding != "identity":
            found = "a web page" if page else f"a body in {encoding} that was not asked for"
            raise DownloadError(
                f"{self.asked}: the server sent {found} in place of the file. Check HF_ENDPOINT, proxies, and whether "
                "this network asks for a log-in; then run the download again."
            )

    def _is_asked_part(self, response: Any) -> bool:
        """Whether a partial answer begins where what there is ends. One that does not say so is believed where the
        contents can be compared with a hash."""
        if "Content-Range" not in response.headers:
            return self.file.has_hash
        found = _CONTENT_RANGE.fullmatch(response.headers["Content-Range"].strip())
        return found is not None and int(found.group(1)) == self.num_bytes

    def _expected_bytes(self, response: Any) -> int | None:
        """How long the file is: as it was listed, else as the answer says; None where neither tells.

        Raises: DownloadError where the two differ.
        """
        announced = _announced_bytes(response, self.num_bytes)
        if self.file.num_bytes is None or announced in (None, self.file.num_bytes):
            return announced if self.file.num_bytes is None else self.file.num_bytes
        raise DownloadError(self._other_size(f"of {announced} bytes"))

    def _other_size(self, found: str) -> str:
        return (
            f"{self.asked}: the server sends a file {found}, {self.file.num_bytes} bytes were listed. Check proxies "
            "and mirrors (HF_ENDPOINT) on the way, then run the download again."
        )

    def _check_deadline(self) -> None:
        """Raise DownloadError for a file that takes longer than it may at the least rate."""
        seconds, received_bytes = time.monotonic() - self._began_s, self.activity_bytes - self._began_bytes
        left_bytes = received_bytes if self.file.num_bytes is None else self.file.num_bytes
        if seconds > DEADLINE_S + left_bytes / LEAST_BYTES_PER_S:
            raise DownloadError(
                f"{self.asked}: {received_bytes} bytes arrived in {seconds:.0f} s, too few to go on. Check the network "
                "and proxies, then run the download again; it continues."
            )

    def _append(self, file: IO[bytes], block: bytes, limit_bytes: int) -> None:
        self._stop_here()
        self._check_deadline()
        if self.num_bytes + len(block) > limit_bytes:
            if self.file.num_bytes is not None:
                raise DownloadError(self._other_size("that goes on after its end"))
            raise DownloadError(f"{self.asked}: the server sends more than {limit_bytes} bytes; check HF_ENDPOINT.")
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
        self._stop_here()
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


def _announced_bytes(response: Any, start_bytes: int) -> int | None:
    """The length of the whole file as the answer gives it."""
    length = response.headers.get("Content-Length", "")
    return start_bytes + int(length) if length.isascii() and length.isdigit() else None
