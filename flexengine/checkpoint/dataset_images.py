"""Images of a data set that is downloaded: they are written into its records, so that one file holds all of it."""

from __future__ import annotations

import base64
import logging
from typing import Any

from huggingface_hub.utils import get_session

from flexengine.checkpoint.bounded_process import report_alive
from flexengine.checkpoint.hub_errors import with_retries
from flexengine.checkpoint.manifest import DownloadError
from flexengine.checkpoint.web_file import RETRIES, TIMEOUT_S, check_answer

logger = logging.getLogger(__name__)

IMAGE_STARTS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}
"""How files of images begin -> what they are."""
IMAGE_KEYS = ("image", "images", "image_url")
MOST_IMAGE_BYTES = 2**26
"""Largest image that is fetched: 64 MiB, as one that training reads."""


def with_images(value: Any, where: str, is_image: bool = False) -> Any:
    """A row with its images as data URLs: bytes, as the image feature of `datasets` has them, and what is on the web.

    Raises: DownloadError for an image that is not to be had.
    """
    if isinstance(value, str):
        is_on_web = is_image and value.startswith(("http://", "https://"))
        return _data_url(_fetched(value, where)) if is_on_web else value
    if isinstance(value, dict):
        data = value.get("bytes")
        if isinstance(data, bytes) and value.keys() <= {"bytes", "path"}:
            return _data_url(data)
        is_part = is_image or value.get("type") in IMAGE_KEYS
        names = (*IMAGE_KEYS, "url") if is_part else IMAGE_KEYS
        return {key: with_images(item, where, key in names) for key, item in value.items()}
    return [with_images(item, where, is_image) for item in value] if isinstance(value, list) else value


def _data_url(data: bytes) -> str:
    kind = next((kind for start, kind in IMAGE_STARTS.items() if data.startswith(start)), "*")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _fetched(url: str, where: str) -> bytes:
    def fetch() -> bytes:
        report_alive(where)
        found = b""
        with get_session().stream("GET", url, timeout=TIMEOUT_S, follow_redirects=True) as response:
            check_answer(response)
            for block in response.iter_bytes():
                found += block
                if len(found) > MOST_IMAGE_BYTES:
                    raise DownloadError(f"it is longer than {MOST_IMAGE_BYTES >> 20} MiB")
        return found

    try:
        return with_retries(fetch, f"{where}: the image {url}", RETRIES, logger.warning)
    except DownloadError as error:
        said = str(error)
        raise DownloadError(said if said.startswith(where) else f"{where}: the image {url}: {said}") from None
