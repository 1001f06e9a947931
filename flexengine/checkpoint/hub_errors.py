"""What to do about a failed request: try again, or say in words what was found and what would help."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import hf_raise_for_status

from flexengine.checkpoint.manifest import DownloadError

# HfHubHTTPError derives from the base of all errors of the HTTP library in use (httpx in 1.x, httpx2 in 2.x), and
# from OSError; naming it this way avoids importing either library.
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
MAX_WAIT_S = 8.0  # longest pause between attempts
MAX_LINE_CHARACTERS = 300  # of what a server said, in a message

_PASSWORD = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY = re.compile(r"(https?://[^\s'\"?]+)\?[^\s'\"]+")

Result = TypeVar("Result")


def with_retries(
    action: Callable[[], Result],
    asked: str,
    num_retries: int,
    log: Callable[[str], None],
    progressed: Callable[[], bool] = lambda: False,
    stopped: Callable[[], bool] = lambda: False,
) -> Result:
    """Run `action` until it succeeds; transient failures are tried again num_retries times in a row without progress.

    asked: what the messages say was being done. progressed() tells whether anything arrived since it was last asked;
    once stopped() is true nothing is tried again.
    Raises: DownloadError that explains the last failure; other errors (disk, interrupt) as they are.
    """
    failures = 0
    while True:
        try:
            return action()
        except (HTTP_ERROR, HFValidationError, OfflineModeIsEnabled, EntryNotFoundError) as error:
            failures = 1 if progressed() else failures + 1
            if not _is_transient(error) or failures > num_retries or stopped():
                raise DownloadError(f"{asked}: {explain(error)}") from error
            wait_s = min(2.0 ** (failures - 1), MAX_WAIT_S)
            log(f"  {asked}: {_first_line(error)}; trying again in {wait_s:.0f} s")
            time.sleep(wait_s)


def _is_transient(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return _status(error) in TRANSIENT_STATUS
    return isinstance(error, HTTP_ERROR)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return without_secrets(line)[:MAX_LINE_CHARACTERS]


def without_secrets(text: str) -> str:
    """A text without passwords in addresses and without their queries: those of the hub's storage are signed."""
    return _QUERY.sub(r"\1", _PASSWORD.sub("", text))


def raise_for_status(response: Any) -> None:
    """Raise the error of the hub that a response stands for, if it is one.

    Its status and headers say which; its body, which may be anything of any length, is not read.
    """
    if response.is_error:
        headers = {name: value for name, value in response.headers.items() if name.startswith("x-")}
        hf_raise_for_status(type(response)(response.status_code, headers=headers, request=response.request))


def explain(error: Exception) -> str:
    """What was found and what to do, for the error that ended a request; the first case that applies speaks."""
    status, line = _status(error), _first_line(error)
    token = "the token in HF_TOKEN was used" if os.environ.get("HF_TOKEN") else "no HF_TOKEN is set"
    cases = [
        (
            isinstance(error, OfflineModeIsEnabled),
            "HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, so nothing is fetched; unset it to download.",
        ),
        (isinstance(error, HFValidationError), f"not a valid repository name ({line}); expected ORG/NAME."),
        (
            isinstance(error, GatedRepoError),  # before RepositoryNotFoundError, from which it derives
            f"access is gated ({token}). Accept the terms on the repository's page, then set HF_TOKEN to your token.",
        ),
        (
            isinstance(error, RevisionNotFoundError),
            "the repository exists, the revision does not; check --revision (branch, tag or commit hash).",
        ),
        (
            isinstance(error, EntryNotFoundError),
            f"file not found (HTTP {status}) although it was listed; run the download again.",
        ),
        (
            isinstance(error, RepositoryNotFoundError) or status in (401, 404),  # the hub says 401 for both
            f"not found or not accessible (HTTP {status}). Check ORG/NAME; if it is private, HF_TOKEN must be set to a "
            f"token that may read it ({token}).",
        ),
        (
            status == 403,
            f"access refused (HTTP {status}, {token}). Set HF_TOKEN to a token that may read this repository.",
        ),
        (
            status == 429,
            "the hub limits the rate of requests (HTTP 429). Wait some minutes and run again; it continues.",
        ),
        (
            status is not None,
            f"the hub answered HTTP {status} ({line}). Run the download again later; it continues.",
        ),
    ]
    otherwise = (
        f"the connection failed ({line}). Check the network, proxy settings and HF_ENDPOINT, then run the download "
        "again; it continues."
    )
    return next((text for applies, text in cases if applies), otherwise)
