"""What a run would learn from its data, for people: sequences with their trained tokens marked, counts, lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from flexengine.data.batches import Sequenced, num_targets
from flexengine.data.kept_images import KeptImage, PicturedRecord
from flexengine.data.prepare import Prepared
from flexengine.data.prompts import TokenizedPrompt
from flexengine.data.records import IGNORE, TokenizedRecord
from flexengine.data.token_columns import TokenizedPair
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.data.tokenizer_process import TokenizerProcess

MARKS = ("[[", "]]")
"""Around trained tokens."""
COUNTED_SEQUENCES, COUNTED_TOKENS = 10_000, 2**24
"""Of how many sequences and tokens the trained ones are counted; the share hardly changes after."""
BAR_CHARACTERS = 40
LONGEST_LINE = 600
REPEATED = 4
"""How often a token stands one behind the other before it is counted instead, in sequences with images."""


class Piece(NamedTuple):
    """A part of a sequence as text, and whether it has a loss."""

    text: str
    trained: bool


def pieces_of(tokenizer: ChatTokenizer | TokenizerProcess, sequence: Sequenced) -> Iterator[Piece]:
    """A sequence as text, special tokens written out; of an image's tokens their number."""
    tokens = zip(sequence.input_ids, [IGNORE, *sequence.labels[1:]], strict=True)  # nothing predicts the first
    for trained, run in groupby(tokens, key=lambda token: token[1] != IGNORE):
        ids = [token for token, _ in run]
        runs = _image_runs(ids) if _images_of(sequence) is not None and not trained else [(ids, 1)]
        for own, times in runs:
            text = tokenizer.decode(own, skip_special_tokens=False)
            yield Piece(f"{text} x {times} " if times > 1 else text, trained)


def _image_runs(ids: list[int]) -> Iterator[tuple[list[int], int]]:
    """Ids in pieces: a token that stands many times one behind the other, as that of an image, and how often."""
    others = list[int]()
    for token, run in groupby(ids):
        count = len(list(run))
        if count < REPEATED:
            others += [token] * count
            continue
        yield from [(others, 1)] if others else ()
        yield [token], count
        others = []
    yield from [(others, 1)] if others else ()


def marked_text(tokenizer: ChatTokenizer | TokenizerProcess, sequence: Sequenced) -> str:
    """A sequence as text, special tokens written out, with MARKS around what has a loss."""
    pieces = pieces_of(tokenizer, sequence)
    return "".join(f"{MARKS[0]}{piece.text}{MARKS[1]}" if piece.trained else piece.text for piece in pieces)


def shown_sequences(part: Prepared, tokenizer: TokenizerProcess, num_shown: int) -> Iterator[SeenSequence]:
    """The first sequences of a source for a page, with small pictures of their images."""
    for i, sequence in enumerate(islice(part.sequences, num_shown), start=1):
        pictures = [(image.name, tokenizer.picture_of(image, is_small=True)) for image in _images_of(sequence) or ()]
        yield SeenSequence(_heading(i, sequence), [*pieces_of(tokenizer, sequence)], pictures)


class SeenSequence(NamedTuple):
    """A sequence for a page: a heading, its text in pieces, names and data URLs of its images."""

    heading: str
    pieces: Sequence[tuple[str, bool]]
    pictures: Sequence[tuple[str, str]]


def _images_of(sequence: Sequenced) -> Sequence[KeptImage] | None:
    """The images of a sequence, or of a pair; None of one that is read without."""
    if isinstance(sequence, (TokenizedPair, TokenizedPrompt)):
        return sequence.images or None
    return sequence.images if isinstance(sequence, PicturedRecord) else None


def _heading(number: int, sequence: Sequenced) -> str:
    tokens = f"{len(sequence.input_ids)} tokens, {num_targets(sequence.labels)} trained"
    images = len(_images_of(sequence) or ())
    return f"sequence {number}: {tokens}" + (f", {images} image{'s' if images > 1 else ''}" if images else "")


def shortened(text: str) -> str:
    """A text on one line, its middle left out where it is long."""
    line, half = text.replace("\n", "\\n"), LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


def first_line(tokenizer: ChatTokenizer | TokenizerProcess, sequence: Sequenced) -> str:
    """The marked text of a sequence, shortened. Of a long one its beginning and its end alone are decoded."""
    ids, labels = sequence.input_ids, sequence.labels
    if len(ids) <= 2 * LONGEST_LINE or _images_of(sequence) is not None:
        return shortened(marked_text(tokenizer, sequence))
    ends = slice(LONGEST_LINE), slice(-LONGEST_LINE, None)
    return shortened(" ... ".join(marked_text(tokenizer, TokenizedRecord(ids[end], labels[end])) for end in ends))


def date_line(tokenizer: ChatTokenizer | TokenizerProcess) -> str:
    """Tell which day the chat template writes."""
    return f"the chat template writes the date {tokenizer.date}; --template-date gives another"


def preview(prepared: Sequence[Prepared], tokenizer: ChatTokenizer | TokenizerProcess, num_shown: int) -> Iterator[str]:
    """Lines about each source: its first sequences, how much of them is trained, and how long all are."""
    if tokenizer.date is not None:
        yield date_line(tokenizer)
    for part in prepared:
        yield from ("", part.describe(), *(f"  {line}" for line in part.bad_lines))
        for i, sequence in enumerate(islice(part.sequences, num_shown), start=1):
            yield from ("", f"---- {_heading(i, sequence)}", marked_text(tokenizer, sequence))
        yield from ("", _trained_share(part), "lengths in tokens:", *_histogram(part.cut.lengths))


def _trained_share(part: Prepared) -> str:
    num_rows = tokens = trained = 0
    for row in islice(part.sequences, COUNTED_SEQUENCES):
        num_rows, tokens, trained = num_rows + 1, tokens + len(row.input_ids), trained + num_targets(row.labels)
        if tokens >= COUNTED_TOKENS:
            break
    which = f"all {num_rows}" if num_rows == len(part.sequences) else f"the first {num_rows} of {len(part.sequences)}"
    return f"trained: {trained} of {tokens} tokens ({100 * trained / tokens:.0f}%) of {which} sequences"


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """A line for each power of two."""
    counts = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    for power in range(int(np.flatnonzero(counts)[0]), len(counts)):
        bar = "#" * -(-BAR_CHARACTERS * int(counts[power]) // int(counts.max()))
        yield f"  {2 ** (power - 1) + 1 if power else 1:>9} to {2**power:<9} {counts[power]:>9}  {bar}".rstrip()
