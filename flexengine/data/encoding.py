"""Records to ids, many at once: while one batch is tokenized, the templates of the next are rendered."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from flexengine.checkpoint.bounded_process import report_alive
from flexengine.data.bad_records import BadRecords
from flexengine.data.masks import LeftOutError, Marked
from flexengine.data.records import Record, TokenizedRecord
from flexengine.data.tokenizer import ChatTokenizer

BATCH_CHARACTERS, BATCH_RECORDS = 2**21, 2**14
"""Text and records that are tokenized at once: enough for every core, and small beside a host budget."""
LONGEST_TEXT = 2**23
"""Characters of the longest record: a tokenizer takes about 100 bytes for each, so this is a GiB at most."""
SLOWEST_CHARACTERS_PER_S = 2**17
"""Of what is tokenized in a CPU second: the slowest tokenizers, without a split into words, take two to ten times."""

T = TypeVar("T")
E = TypeVar("E")
Batch = list[tuple[Record, Marked | None]]
"""Records with their texts and trained spans; None for those of tokens."""


def encode_records(
    records: Iterable[Record], tokenizer: ChatTokenizer, bad: BadRecords | None = None
) -> Iterator[TokenizedRecord]:
    """Ids and labels of all records but those left out, in order; many are tokenized at once, on all cores.

    bad: takes the records that cannot be encoded; without it the first of them raises ValueError.
    """
    bad = bad or BadRecords()
    with ThreadPoolExecutor(1) as executor:
        running: tuple[Batch, Future[list[TokenizedRecord]]] | None = None
        for batch in _marked_batches(records, tokenizer, bad):
            following = batch, executor.submit(_encode_batch, batch, tokenizer)
            yield from _checked(*running, tokenizer, bad) if running else ()
            running = following
        yield from _checked(*running, tokenizer, bad) if running else ()


def encode_whole(record: Record, tokenizer: ChatTokenizer) -> TokenizedRecord:
    """Ids and labels of one record, as `encode_record`, which may take the time that its text needs."""
    num_characters = len(record.text or "") + sum(len(message.content or "") for message in record.messages)
    report_alive(record.where, num_characters / SLOWEST_CHARACTERS_PER_S)
    return tokenizer.encode_record(record)


def encoded_one_by_one(
    items: Iterable[T], encode: Callable[[T], Iterable[E]], record_of: Callable[[T], Record], tokenizer: ChatTokenizer,
    bad: BadRecords,
) -> Iterator[E]:  # fmt: skip
    """All that `encode` makes of each item, but of those that are left out. record_of: the one that errors name."""
    for item in items:
        try:
            found = encode(item)
        except LeftOutError as error:
            tokenizer.left_out[str(error)] += 1
        except ValueError as error:
            bad.leave_out(_named(record_of(item), error))
        else:
            yield from found


def _checked(
    batch: Batch, encoded: Future[list[TokenizedRecord]], tokenizer: ChatTokenizer, bad: BadRecords
) -> Iterator[TokenizedRecord]:
    """The tokens of a batch, without records that use a token for which the model has no row."""
    if batch:
        num_characters = sum(len(found.text) for _, found in batch if found)
        report_alive(batch[0][0].where, num_characters / SLOWEST_CHARACTERS_PER_S)
    for (record, _), tokens in zip(batch, encoded.result(), strict=True):
        try:
            tokenizer.check_ids(tokens)
        except ValueError as error:
            bad.leave_out(_named(record, error))
        else:
            yield tokens


def _marked_batches(records: Iterable[Record], tokenizer: ChatTokenizer, bad: BadRecords) -> Iterator[Batch]:
    """Records with their text and spans, about BATCH_CHARACTERS at a time, without those that are left out."""
    batch: Batch = []
    num_characters = 0
    for record in records:
        report_alive(record.where)
        try:
            found = tokenizer.mark(record)
            if found and len(found.text) > LONGEST_TEXT:
                size = f"a text of {len(found.text)} characters"
                raise ValueError(f"{size}; the longest is {LONGEST_TEXT}: split it into several records")
        except LeftOutError as error:
            tokenizer.left_out[str(error)] += 1
            continue
        except ValueError as error:
            bad.leave_out(_named(record, error))
            continue
        batch.append((record, found))
        num_characters += len(found.text) if found else BATCH_CHARACTERS // BATCH_RECORDS
        if num_characters >= BATCH_CHARACTERS or len(batch) >= BATCH_RECORDS:
            yield batch
            batch, num_characters = [], 0
    yield batch


def _encode_batch(batch: Batch, tokenizer: ChatTokenizer) -> list[TokenizedRecord]:
    texts = [found.text for record, found in batch if record.text is not None and found]
    chats = [found.text for record, found in batch if record.messages and found]
    encoded = {True: iter(tokenizer.encode_texts(texts, offsets=False)), False: iter(tokenizer.encode_texts(chats))}
    return [
        tokenizer.tokenized(record, found, next(encoded[record.text is not None]) if found else None)
        for record, found in batch
    ]


def _named(record: Record, error: ValueError) -> ValueError:
    """The error, with the place of the record."""
    return ValueError(f"{record.where}: {error}" if record.where else str(error))
