"""Which turns a record says not to train, under the names that tools have for it.

`weight` is OpenAI's, `loss` ms-swift's, `training` axolotl's, `loss_mask` and `loss_weight` verl's, `masked`
torchtune's. A key that may be such a mask and is none of these (`train_detail`, `loss_scale`) is refused by name: to
pass it over would train what the data mask.
"""

import contextlib
import functools
import json
import re
from collections.abc import Container, Mapping
from typing import Any

from flexengine.data.token_columns import IGNORE
from flexengine.wording import shown

TRAINED = ("weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_mask", "loss_weight")
"""Keys of a turn: 1 or true says that it is trained, 0 or false that it is not."""
MASKED = ("masked",)
"""Keys of a turn that say the reverse."""
TURN_MASKS = (*TRAINED, *MASKED)

_MAY_MASK = re.compile(r"mask|(?<![a-z])(un|no|non)?(train|loss|weight|learn|supervis|ignor|backprop)|grad(?![a-z])")
_CAPITAL_INSIDE = re.compile(r"(?<=[a-z])(?=[A-Z])")
_NO_MASKS = ("attention_mask", "special_tokens_mask")


def is_trained(turn: Mapping[str, Any], role: str, where: str) -> bool | None:
    """Whether a turn is trained, by its own keys; None where it says nothing. turn: without nulls.

    Raises ValueError for a value that is neither yes nor no, for keys that contradict each other, and where a turn
    that is not the assistant's is to be trained.
    """
    says: dict[str, bool] = {}
    for key in (key for key in TURN_MASKS if key in turn):
        said = _said(turn[key])
        if said is None:
            raise ValueError(
                f"{where}: {key} of a message is 0 or 1, found {shown(turn[key])}; other weights are not read"
            )
        says[key] = said is (key in TRAINED)
        if says[key] and role != "assistant" and key != "weight":  # OpenAI's files may have weight 1 on every turn
            raise ValueError(f"{where}: {key} is set on a turn of {role}; only turns of the assistant can be trained")
    if len(set(says.values())) > 1:
        raise ValueError(f"{where}: {' and '.join(says)} of a message contradict each other; keep one of them")
    return next(iter(says.values()), None)


def refuse_masks(given: Mapping[Any, Any], read: Container[Any], owner: str, where: str) -> None:
    """Raise ValueError where a key of a turn, of a part of it or of its calls may be a mask that is not read."""
    for key, value in given.items():
        if key in read or not _may_mask(str(key)):
            continue
        if value not in ("", [], {}) and not isinstance(_plain(value), str):
            raise ValueError(
                f"{where}: {shown(key)[1:-1]} of a {owner} may say what is trained, and is not read; say it of the"
                " whole message as train (0 or 1), or rename the key if it says something else"
            )


def masks_of_record(raw: Mapping[Any, Any], read: Container[Any], where: str) -> set[str]:
    """The keys beside a conversation, text or tokens that say that the record is trained, as all are. raw: no nulls.

    Raises ValueError for one that may say otherwise. Numbers that measure something (a loss of 2.31) do not.
    """
    says_trained: set[str] = set()
    for key, value in raw.items():
        if key in read or not (_may_mask(str(key)) or key == "labels"):
            continue
        name, plain, said = str(key), _plain(value), _said(value)
        is_whole = "weight" in name.lower() and said is True
        if is_whole or (name in TURN_MASKS and said is (name in TRAINED)):
            says_trained.add(name)
        elif _may_say_otherwise(name, plain):
            raise ValueError(
                f"{where}: {shown(name)[1:-1]} of the record, {shown(value)}, may say what is trained, and is not read;"
                " mask turns by train (0 or 1) and tokens by labels, leave out what is not to be trained, or rename"
                " the key if it says something else"
            )
    return says_trained


def _may_say_otherwise(name: str, plain: Any) -> bool:
    """Whether a key of a record may say what is not trained: yes or no, a number for each token, or a weight."""
    if isinstance(plain, list):
        numbers = bool(plain) and all(isinstance(item, (int, float)) for item in plain)
        return IGNORE in plain if name == "labels" else numbers
    if name == "labels" or not isinstance(plain, (int, float)):
        return False
    return plain in (0, 1) or re.search("mask|weight", name.lower()) is not None


def _said(value: Any) -> bool | None:
    """What a value says: yes, no, or None for neither."""
    plain = _plain(value)
    return bool(plain) if isinstance(plain, (int, float)) and plain in (0, 1) else None


def _plain(value: Any) -> Any:
    """The number, bool or list that a text stands for, as those of a spreadsheet do; other values as they are."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value.strip().lower())
    return value


@functools.lru_cache(4096)
def _may_mask(key: str) -> bool:
    return key not in _NO_MASKS and _MAY_MASK.search(_CAPITAL_INSIDE.sub("_", key).lower()) is not None
