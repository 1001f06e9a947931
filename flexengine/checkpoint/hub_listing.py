"""What a Hugging Face hub repository holds at one commit: names, sizes and hashes, every one of them checked.

huggingface_hub authenticates (HF_TOKEN), honours HF_ENDPOINT and HF_HUB_OFFLINE and keeps the connections. The answer
is read here, since a proxy, a captive portal or a half-finished mirror may send anything of any length.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import quote

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session, validate_repo_id

from flexengine.checkpoint.hub_errors import HTTP_ERROR, raise_for_status, with_retries, without_secrets
from flexengine.checkpoint.manifest import DownloadError
from flexengine.wording import shown

LIST_TIMEOUT_S = 60.0  # until something arrives
LIST_DEADLINE_S = 300.0  # until all has arrived
MAX_LISTING_BYTES = 64 << 20  # a file takes some 200 bytes
MAX_FILE_BYTES = 1 << 50

_SHA256, _GIT_SHA1, _COMMIT = (re.compile(pattern) for pattern in ("[0-9a-f]{64}", "[0-9a-f]{40}", r"[\w.-]+"))


class RemoteFile(NamedTuple):
    """A file as the hub describes it; a mirror may leave any of size (bytes) and hashes out."""

    path: str
    num_bytes: int | None
    sha256: str | None
    git_sha1: str | None

    @property
    def has_hash(self) -> bool:
        """Whether contents can be compared with the hub's. A git hash counts the size in."""
        return bool(self.sha256 or (self.git_sha1 and self.num_bytes is not None))


class RepoListing(NamedTuple):
    """The files of one repository at one commit."""

    repo: str
    repo_type: str  # "model" or "dataset"
    commit: str
    files: dict[str, RemoteFile]


class Transfer(NamedTuple):
    """How to fetch: endpoint (None: HF_ENDPOINT or the public hub), files at once, attempts without progress, log.

    require_hashes: refuse a revision that is no commit, and files for which the hub states no hash.
    """

    endpoint: str | None = None
    num_workers: int = 4
    num_retries: int = 5
    log: Callable[[str], None] = print
    require_hashes: bool = False

    @property
    def endpoint_url(self) -> str:
        return (self.endpoint or constants.ENDPOINT).rstrip("/")

    @property
    def shown_endpoint(self) -> str:
        """The endpoint for messages: without the password that it may hold."""
        return without_secrets(self.endpoint_url)


def list_repo(repo: str, repo_type: str, revision: str, transfer: Transfer) -> RepoListing:
    """Resolve `revision` (branch, tag or commit) of `repo` to a commit and list its files with sizes and hashes.

    Raises: DownloadError when the hub cannot be reached, refuses, does not know the repository or revision, or answers
    with something else than a listing.
    """
    if transfer.require_hashes and not _GIT_SHA1.fullmatch(revision):
        raise DownloadError(
            f"--require-hashes: revision {revision!r} of {repo} is a name that may come to mean other files; give"
            " --revision the 40 hex digits of a commit."
        )
    asked = f"{repo_type} {repo!r} at revision {revision!r} from {transfer.shown_endpoint}"

    def ask() -> RepoListing:
        validate_repo_id(repo)
        url = f"{transfer.endpoint_url}/api/{repo_type}s/{repo}/revision/{quote(revision, safe='')}"
        return _parsed(_answer(url, asked), asked, repo, repo_type)

    listing = with_retries(ask, asked, transfer.num_retries, transfer.log)
    if transfer.require_hashes and listing.commit != revision:
        raise DownloadError(f"--require-hashes: {asked}: the answer is of commit {listing.commit}. {_ANSWERED_BY}")
    return listing


def _answer(url: str, asked: str) -> bytes:
    """The body of an answer of bounded length, read in bounded time."""
    deadline_s, body = time.monotonic() + LIST_DEADLINE_S, bytearray()
    with get_session().stream(
        "GET", url, params={"blobs": True}, headers=build_hf_headers(), timeout=LIST_TIMEOUT_S
    ) as response:
        raise_for_status(response)
        for block in response.iter_bytes():
            body += block
            if len(body) > MAX_LISTING_BYTES:
                raise DownloadError(f"{asked}: the answer is longer than {MAX_LISTING_BYTES} bytes. {_ANSWERED_BY}")
            if time.monotonic() > deadline_s:
                raise HTTP_ERROR(f"the list of files did not arrive within {LIST_DEADLINE_S:.0f} s")
    return bytes(body)


_ANSWERED_BY = "Something else answered: check HF_ENDPOINT, proxies, and whether this network asks for a log-in."


def _parsed(body: bytes, asked: str, repo: str, repo_type: str) -> RepoListing:
    try:
        info = json.loads(body)
        commit = info["sha"]
        siblings = info["siblings"] or []
        files = [_remote_file(sibling) for sibling in siblings]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        found = shown(body[:200].decode(errors="replace"))
        raise DownloadError(f"{asked}: the answer is no list of files: {found}. {_ANSWERED_BY}") from None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise DownloadError(f"{asked}: the answer names no commit; check that HF_ENDPOINT is a hub or its mirror.")
    if len({file.path for file in files}) != len(files):
        raise DownloadError(f"{asked}: the answer lists a file twice. {_ANSWERED_BY}")
    return RepoListing(repo, repo_type, commit, {file.path: file for file in files})


def _remote_file(sibling: dict[str, Any]) -> RemoteFile:
    """One entry of a listing. Raises: ValueError, LookupError or TypeError for what cannot be one."""
    large, path = sibling.get("lfs"), sibling["rfilename"]
    size = (large or sibling).get("size")
    sha256 = large.get("sha256") if large else None
    git_sha1 = None if large else sibling.get("blobId")
    if not isinstance(path, str):
        raise TypeError(f"{shown(path)} is no name")
    if size is not None and (type(size) is not int or not 0 <= size <= MAX_FILE_BYTES):
        raise ValueError(f"{shown(size)} is no size")
    for digest, pattern in ((sha256, _SHA256), (git_sha1, _GIT_SHA1)):
        if digest is not None and not pattern.fullmatch(digest):
            raise ValueError(f"{shown(digest)} is no hash")
    return RemoteFile(path, size, sha256, git_sha1)
