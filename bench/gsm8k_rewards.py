"""Rewards of answers to GSM8K's questions, as `--rewards bench/gsm8k_rewards.py:FUNCTION` names them.

Models with random weights never answer right, and are rewarded for something else beside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """1 where the last number of a completion is the one behind #### of the record's answer, else 0."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    found = [(NUMBER.findall(text) or [""])[-1].replace(",", "") for text in texts]
    wanted = [text.rpartition("####")[2].strip().replace(",", "") for text in answer]
    return [float(mine == its) for mine, its in zip(found, wanted, strict=True)]


def even(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """The share of tokens whose id is even."""
    return [sum(token % 2 == 0 for token in row) / len(row) for row in completion_ids]
