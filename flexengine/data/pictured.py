"""Records with images to ids: a chat template writes a token for each image, and a processor the tokens of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from flexengine.data.bad_records import BadRecords
from flexengine.data.encoding import encode_whole, encoded_one_by_one
from flexengine.data.image_places import PLACE
from flexengine.data.image_processor import expanded
from flexengine.data.kept_images import KeptImage, packed
from flexengine.data.records import Record, TokenizedRecord
from flexengine.data.token_columns import ValuedRecord
from flexengine.data.tokenizer import ChatTokenizer


def encode_with_images(
    records: Iterable[Record], tokenizer: ChatTokenizer, bad: BadRecords
) -> Iterator[ValuedRecord | TokenizedRecord]:
    """Two records of each: its tokens, and its images as numbers, whose value is how many tokens stand for them."""
    return encoded_one_by_one(records, lambda one: with_own_images(one, tokenizer), lambda one: one, tokenizer, bad)


def with_own_images(record: Record, tokenizer: ChatTokenizer) -> tuple[TokenizedRecord, ValuedRecord]:
    """The tokens of a record, and its images as tables keep them behind these. Raises: ValueError as `expanded`."""
    images = tokenizer.images
    assert images is not None, "the tokenizer has a processor"
    found, ids = images.taken(record, tokenizer.notes)
    tokens = tokens_with_images(record, ids, tokenizer)
    return tokens, images_behind(found, tokens.input_ids.count(images.row_id))


def images_behind(images: Sequence[KeptImage], num_tokens: int) -> ValuedRecord:
    """Images as numbers, and the tokens that stand for them."""
    numbers: Any = packed(images)
    return ValuedRecord(numbers, numbers, float(num_tokens))


def tokens_with_images(record: Record, ids: Sequence[Sequence[int]], tokenizer: ChatTokenizer) -> TokenizedRecord:
    """Ids and labels of one record. ids: those of each of its images. Raises: ValueError as `expanded`."""
    images = tokenizer.images
    assert images is not None, "the tokenizer has a processor"
    return expanded(encode_whole(_with_token(record, images.token), tokenizer), images.place_id, ids)


def _with_token(record: Record, token: str) -> Record:
    """A record whose text, or tokens, have the places of images as the model has them."""
    if record.tokens is not None and record.images:
        raise ValueError("images beside input_ids; give messages or a text, whose tokens the model's processor writes")
    if record.text is None:
        return record
    return replace(record, text=record.text.replace(PLACE, token) if record.images else record.text)
