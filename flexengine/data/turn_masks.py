"""Which turns a record says not to train, under the names that tools have for it.

`weight` is OpenAI's, `loss` ms-swift's, `training` axolotl's, `loss_mask` and `loss_weight` verl's, `masked`
torchtune's. A key that may be such a mask and is none of these (`train_detail`, `loss_scale`) is refused by name: to
pass it over would train what the data mask.
"""

import re
from collections.abc import Container, Mapping
from typing import Any

from flexengine.wording import shown

TRAINED = ("weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_mask", "loss_weight")
"""Keys of a turn: 1 or true says that it is trained, 0 or false that it is not."""
MASKED = ("masked",)
"""Keys of a turn that say the reverse."""
TURN_MASKS = (*TRAINED, *MASKED)

_MAY_MASK = re.compile(r"mask|(?<![a-z])(un|no|non)?(train|loss|weight|learn|supervis|ignor|backprop)|grad(?![a-z])")
_CAPITAL_INSIDE = re.compile(r"(?<=[a-z])(?=[A-Z])")
_SAID = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True}


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
        says_nothing = value in ("", [], {}) or (isinstance(value, str) and _said(value) is None)
        if key not in read and not says_nothing and _may_mask(str(key)):
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
        name = str(key)
        if key in read or not _may_mask(name):
            continue
        said = _said(value)
        is_whole = "weight" in name.lower() and _is_number(value) and value == 1
        if is_whole or (name in TURN_MASKS and said is (name in TRAINED)):
            says_trained.add(name)
        elif _is_switch(value) or (_is_number(value) and (said is not None or re.search("mask|weight", name.lower()))):
            raise ValueError(
                f"{where}: {shown(name)[1:-1]} of the record, {shown(value)}, may say what is trained, and is not read;"
                " mask turns by train (0 or 1) and tokens by labels, leave out what is not to be trained, or rename"
                " the key if it says something else"
            )
    return says_trained


def _said(value: Any) -> bool | None:
    """What a value says: yes, no, or None for neither. Tables and spreadsheets hold both as texts."""
    value = value.strip().lower() if isinstance(value, str) else value
    return _SAID.get(value) if isinstance(value, (str, int, float)) else None


def _may_mask(key: str) -> bool:
    return _MAY_MASK.search(_CAPITAL_INSIDE.sub("_", key).lower()) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _is_switch(value: Any) -> bool:
    """Whether a value is yes or no, or a list of numbers, one a turn or token."""
    if isinstance(value, list):
        return value != [] and all(map(_is_number, value))
    return isinstance(value, bool) or (isinstance(value, str) and _said(value) is not None)
