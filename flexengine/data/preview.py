"""What a run would learn from its data, for people: sequences with their trained tokens marked, counts, lengths."""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice

import numpy as np

from flexengine.data.batches import Sequenced, num_targets
from flexengine.data.prepare import Prepared
from flexengine.data.records import IGNORE
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.data.tokenizer_process import TokenizerProcess

MARKS = ("[[", "]]")
"""Around trained tokens."""
COUNTED_SEQUENCES = 10_000
"""Of how many sequences the trained tokens are counted; the share hardly changes after."""
BAR_CHARACTERS = 40
LONGEST_LINE = 600


def marked_text(tokenizer: ChatTokenizer | TokenizerProcess, sequence: Sequenced) -> str:
    """A sequence as text, special tokens written out, with MARKS around what has a loss."""
    pieces = []
    tokens = zip(sequence.input_ids, [IGNORE, *sequence.labels[1:]], strict=True)  # nothing predicts the first
    for trained, run in groupby(tokens, key=lambda token: token[1] != IGNORE):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        pieces.append(f"{MARKS[0]}{text}{MARKS[1]}" if trained else text)
    return "".join(pieces)


def shortened(text: str) -> str:
    """A text on one line, its middle left out where it is long."""
    line, half = text.replace("\n", "\\n"), LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


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
            tokens = f"{len(sequence.input_ids)} tokens, {num_targets(sequence.labels)} trained"
            yield from ("", f"---- sequence {i}: {tokens}", marked_text(tokenizer, sequence))
        yield from ("", _trained_share(part), "lengths in tokens:", *_histogram(part.cut.lengths))


def _trained_share(part: Prepared) -> str:
    rows = list(islice(part.sequences, COUNTED_SEQUENCES))
    tokens, trained = sum(len(row.input_ids) for row in rows), sum(num_targets(row.labels) for row in rows)
    which = (
        f"all {len(rows)}" if len(rows) == len(part.sequences) else f"the first {len(rows)} of {len(part.sequences)}"
    )
    return f"trained: {trained} of {tokens} tokens ({100 * trained / tokens:.0f}%) of {which} sequences"


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """A line for each power of two."""
    counts = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    for power in range(int(np.flatnonzero(counts)[0]), len(counts)):
        bar = "#" * -(-BAR_CHARACTERS * int(counts[power]) // int(counts.max()))
        yield f"  {2 ** (power - 1) + 1 if power else 1:>9} to {2**power:<9} {counts[power]:>9}  {bar}".rstrip()
