"""Images of a record: where its data are, and at which places of its texts they stand.

| in a record | is |
|---|---|
| a part {"type": "image", "image" (url, path, base64): ...} or {"type": "image_url", "image_url": ...} | an image |
| "images" or "image" beside the texts, `<image>` in these (or a part {"type": "image"}) | the next of these images |
| the same without any place | images before the first text |

An image is a path (relative to the file of the record), a data URL, or {"bytes", "path"} as Parquet files have it. In
texts U+FFFC, the character of Unicode for an object, takes its place until a template writes the image's token.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.wording import shown

PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
MARK = "<image>"
"""What data sets write in a text where an image stands."""
IMAGES = ("images", "image")
PARTS = ("image", "image_url", "input_image")
"""Types of parts of a turn that are images."""
PAYLOADS = ("image", "image_url", "url", "path", "base64", "bytes", "data")
"""Keys of an image's part, or of an image, that hold what it is."""
TEXT_ORDER = ("system", "history", "instruction", "prompt", "question", "query", "problem", "context", "input")
"""Texts of a record in the order in which a conversation has them; others follow."""
GUESSED = "images have no place in their texts, and stand before the first of a user"


class ImageSource(NamedTuple):
    """Where an image's data are: in a file, or in the record. name: for messages."""

    name: str
    path: str | None = None
    data: bytes | None = None


def take_images(
    raw: dict[str, Any], folder: Path, where: str, counts: Counter[str] | None
) -> tuple[dict[str, Any], tuple[ImageSource, ...]]:
    """Take the images out of a record; in its texts PLACE stands for each, in their order.

    folder: that paths are relative to. counts: takes a remark where the places are guessed.
    Raises: ValueError for what is no image, or as many places as there are no images for.
    """
    listed = [value for key in IMAGES for value in _listed(raw.get(key))]
    taken = _Taken([source_of(value, folder, where) for value in listed], folder, where)
    order = {key: i for i, key in enumerate(TEXT_ORDER)}
    texts = sorted((key for key in raw if key not in IMAGES), key=lambda key: order.get(key, len(order)))
    found = {key: taken.without(raw[key]) for key in texts}
    rest = taken.waiting
    if rest and not taken.used:
        found = _before_first(found, PLACE * len(rest), where)
        if counts is not None:
            counts[f"places, since {GUESSED},"] += 1
        return {key: found[key] for key in raw if key in found}, tuple(rest)
    if rest:
        raise ValueError(
            f"{where}: {len(listed)} images beside {len(listed) - len(rest)} places for them ({MARK}); give each one"
        )
    return {key: found[key] for key in raw if key in found}, tuple(taken.images)


class _Taken:
    """The images of a record as its texts are walked. waiting: those beside the texts that have no place yet."""

    def __init__(self, listed: list[ImageSource], folder: Path, where: str) -> None:
        self.images, self.waiting, self.used = list[ImageSource](), listed, False
        self._any_listed, self._folder, self._where = bool(listed), folder, where

    def without(self, value: Any) -> Any:
        """A value of a record with PLACE where its images stood."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self.without(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") in PARTS:
            return self._part(value)
        return {key: self.without(item) for key, item in value.items()}

    def _text(self, text: str) -> str:
        if PLACE in text:
            raise ValueError(f"{self._where}: a text holds U+FFFC, which stands for an image here; leave it out")
        if not self._any_listed or MARK not in text:
            return text
        for _ in range(text.count(MARK)):
            self._next()
        return text.replace(MARK, PLACE)

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        payload = next((part[key] for key in PAYLOADS if part.get(key) is not None), None)
        if payload is None:
            self._next()
        else:
            given = {"base64": payload} if part.get("base64") is payload else payload
            self.images.append(source_of(given, self._folder, self._where))
        self.used = True
        return {"type": "text", "text": PLACE}

    def _next(self) -> None:
        if not self.waiting:
            places = "more places for images than images"
            raise ValueError(f"{self._where}: {places}; give an image for each {MARK} and each part of type image")
        self.images.append(self.waiting.pop(0))
        self.used = True


def _before_first(found: dict[str, Any], places: str, where: str) -> dict[str, Any]:
    """Put the places before the first text of a user, or the first text there is."""
    for key, value in found.items():
        if isinstance(value, str) and key not in ("system", "system_prompt"):
            return {**found, key: places + value}
        turns = value if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value) else []
        for i, turn in enumerate(turns):
            if turn.get("role", turn.get("from")) in ("user", "human"):
                name = "content" if "content" in turn else "value"
                text = turn.get(name)
                text = [{"type": "text", "text": places}, *text] if isinstance(text, list) else f"{places}{text or ''}"
                return {**found, key: [*turns[:i], {**turn, name: text}, *turns[i + 1 :]]}
    raise ValueError(f"{where}: the record has images and no turn of a user for them; write {MARK} where they stand")


def _listed(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from (item for item in value if item is not None)
    elif value is not None and value != "":
        yield value


def source_of(value: Any, folder: Path, where: str) -> ImageSource:
    """Where an image is. Raises: ValueError for an address of the web, and for what is no image."""
    if isinstance(value, Mapping):
        inner = next((value[key] for key in ("bytes", *PAYLOADS) if value.get(key) is not None), None)
        if isinstance(inner, str) and inner is value.get("base64"):
            return ImageSource(where, data=_decoded(inner, where))
        return source_of(inner, folder, where)
    if isinstance(value, bytes):
        return ImageSource(where, data=value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: an image is a path, a data URL or {{bytes, path}}, found {shown(value)}")
    if value.startswith("data:"):
        kind, _, written = value.partition(",")
        if not kind.endswith(";base64"):
            raise ValueError(f"{where}: an image as a data URL is written as data:image/png;base64,..., found {kind}")
        return ImageSource(where, data=_decoded(written, where))
    if value.startswith(("http://", "https://")):
        raise ValueError(
            f"{where}: the image {shown(value)} is on the web, where training fetches nothing; `flexengine download"
            " dataset` puts images into the records that it writes, or give paths"
        )
    path = Path(value.removeprefix("file://"))
    return ImageSource(str(path), path=str(path if path.is_absolute() else folder / path))


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{where}: an image's base64 is damaged ({error}); write it again") from None
