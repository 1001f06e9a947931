"""Data files of the web: fetched once, bounded in size, hashed, and kept under their address in the cache of data."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from flexengine.checkpoint.atomic import atomic_file, format_gib, write_json
from flexengine.checkpoint.hub_errors import with_retries, without_secrets
from flexengine.checkpoint.layout import is_file_name
from flexengine.checkpoint.manifest import DownloadError

logger = logging.getLogger(__name__)

MOST_FETCHED_BYTES = 8 << 30
"""Longest file that is fetched; `--data-cache` says where it goes."""
TIMEOUT_S = 60.0  # without a byte
RETRIES = 2
RECORD_FILE = ".fetched.json"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def name_in(url: str) -> str:
    """The name of the file that an address ends in; empty where it ends in none."""
    name = unquote(PurePosixPath(urlsplit(url).path).name)
    return name if is_file_name(name) else ""


def fetched(url: str, cache: Path | None) -> Path:
    """Fetch a file unless the cache has it; returns it, under its own name in a folder of its address.

    Order: the file appears whole or not at all, its record (address, date, size, SHA-256) after it.
    Raises: ValueError for what is refused, too long, a page in place of a file, or not to be had; OSError of the disk.
    """
    shown = without_secrets(url)
    if cache is None:
        raise ValueError(f"data set {shown}: there is no cache folder to fetch it into; give --data-cache FOLDER")
    folder = cache / f"web-{hashlib.sha256(url.encode()).hexdigest()[:32]}"
    target = folder / name_in(url)
    if (record := _record_of(target)) is not None:
        logger.info(
            "data set %s: as it was fetched on %s (sha256 %s); `flexengine data clear-cache` has it fetched again",
            shown, record["fetched"], record["sha256"],
        )  # fmt: skip
        return target
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"data set {shown}: HF_HUB_OFFLINE is set and it was not fetched before; unset it, or give a file"
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        record = with_retries(lambda: _fetch(url, target), f"data set {shown}", RETRIES, logger.warning)
    except DownloadError as error:
        said = str(error)
        raise ValueError(said if said.startswith("data set") else f"data set {shown}: {said}") from None
    write_json(folder / RECORD_FILE, {"url": shown, **record})
    logger.info("data set %s: fetched %s, sha256 %s", shown, format_gib(record["size"]), record["sha256"])
    return target


def _record_of(target: Path) -> dict[str, Any] | None:
    """What is known of a file that was fetched; None where it is not there, or not as it was."""
    try:
        record = json.loads((target.parent / RECORD_FILE).read_text(encoding="utf-8"))
        whole = target.stat().st_size == record["size"] and isinstance(record["sha256"], str)
        return record if whole and isinstance(record["fetched"], str) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _fetch(url: str, target: Path) -> dict[str, Any]:
    """Bring a file to its place; returns its date, size and SHA-256."""
    digest, num_bytes = hashlib.sha256(), 0
    with get_session().stream("GET", url, timeout=TIMEOUT_S, follow_redirects=True) as response:
        check_answer(response)
        with atomic_file(target) as file:
            for block in response.iter_bytes():
                num_bytes += len(block)
                _check_size(num_bytes)
                digest.update(block)
                file.write(block)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"fetched": today, "size": num_bytes, "sha256": digest.hexdigest()}


def check_answer(response: Any) -> None:
    """Raise DownloadError for an answer that is no file, came over an open line, or is too long."""
    if not is_private(str(response.url)):
        raise DownloadError(f"it leads to {without_secrets(str(response.url))}, which anybody on the way may change")
    if response.is_error:
        raise DownloadError(f"the server answered HTTP {response.status_code}; check the address")
    if response.headers.get("content-type", "").startswith("text/html"):
        raise DownloadError("the answer is a web page, not a file; give the address of the file itself")
    _check_size(int(response.headers.get("content-length") or 0))


def _check_size(num_bytes: int) -> None:
    if num_bytes > MOST_FETCHED_BYTES:
        raise DownloadError(
            f"it is longer than {format_gib(MOST_FETCHED_BYTES)}, the most that is fetched; download it yourself"
        )


def is_private(url: str) -> bool:
    """Whether nobody on the way can change what an address gives: https, or this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname in LOOPBACK
