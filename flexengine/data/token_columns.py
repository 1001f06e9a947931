"""Records that hold tokens: columns of ids, labels and masks, as tokenizers and collators write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flexengine.wording import shown

if TYPE_CHECKING:
    from flexengine.data.kept_images import KeptImage

IGNORE = -100
"""Label of a token without loss, as in Hugging Face."""
MASKS = ("assistant_masks", "completion_mask", "loss_mask")
"""Columns whose 0 says that a token has no loss."""
COLUMNS = ("input_ids", "labels", "attention_mask", *MASKS)
TOKEN_KEYS = frozenset({*COLUMNS, "token_type_ids", "special_tokens_mask", "length"})
"""Keys of such a record that are read, or follow from the others."""


class TokenizedRecord(NamedTuple):
    """One training sequence: one entry per token in both lists; labels unshifted, IGNORE where there is no loss."""

    input_ids: list[int]
    labels: list[int]


class ValuedRecord(NamedTuple):
    """The same with a number that the record has beside its tokens, such as its label or the margin of a pair."""

    input_ids: list[int]
    labels: list[int]
    value: float


class TokenizedPair(NamedTuple):
    """Two sequences that are compared.

    wanted: whether the answer of the first is a good one. value: that of the first. images: those of their prompt.
    """

    first: TokenizedRecord | ValuedRecord
    second: TokenizedRecord | ValuedRecord
    wanted: bool
    value: float = 0.0
    images: Sequence[KeptImage] = ()

    @property
    def input_ids(self) -> list[int]:
        """The tokens of both."""
        return self.first.input_ids + self.second.input_ids

    @property
    def labels(self) -> list[int]:
        """The labels of both; the first token of either has none."""
        return [label for row in self[:2] for label in (IGNORE, *row.labels[1:])]


def tokens_of(raw: Mapping[str, Any], where: str) -> TokenizedRecord:
    """Token ids with their labels: a token has a loss where neither labels nor any mask say that it has none.

    What attention_mask leaves out is padding.
    """
    columns = {key: _integers(raw[key], key, where) for key in COLUMNS if key in raw}
    ids = columns["input_ids"]
    for key, values in columns.items():
        if len(values) != len(ids):
            raise ValueError(f"{where}: {key} has {len(values)} entries, input_ids has {len(ids)}")
    if any(token < 0 for token in ids):
        raise ValueError(f"{where}: input_ids holds a negative number; labels alone may hold {IGNORE}")
    labels = list(columns.get("labels", ids))
    wrong = next((i for i, (a, b) in enumerate(zip(ids, labels, strict=True)) if b not in (a, IGNORE)), None)
    if wrong is not None:
        raise ValueError(
            f"{where}: label {labels[wrong]} at position {wrong} is neither the token {ids[wrong]} nor {IGNORE};"
            " labels are not shifted"
        )
    for mask in (columns[key] for key in MASKS if key in columns):
        labels = [label if m else IGNORE for label, m in zip(labels, mask, strict=True)]
    kept = columns.get("attention_mask", [1] * len(ids))
    rows = [(token, label) for token, label, keep in zip(ids, labels, kept, strict=True) if keep]
    return TokenizedRecord([token for token, _ in rows], [label for _, label in rows])


def _integers(values: Any, key: str, where: str) -> list[int]:
    """A column of token ids, labels or a mask. Bools are 0 and 1 of a mask, and no token."""
    values = values.tolist() if hasattr(values, "tolist") else values
    is_mask = key not in ("input_ids", "labels")
    wanted = (int, bool) if is_mask else (int,)
    if not isinstance(values, list) or not all(type(value) in wanted for value in values):
        raise ValueError(f"{where}: {key} must be a flat list of integers, found {shown(values)}")
    other = next((value for value in values if value not in (0, 1)), None) if is_mask else None
    if other is not None:
        raise ValueError(f"{where}: {key} holds 0 and 1, found {other}")
    return values
