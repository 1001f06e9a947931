"""A batch of several ranks: every rank gives the whole, or each gives a part of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexengine.models.spec import ModelSpec
from flexengine.parallel.control import Control
from flexengine.plan import Request
from flexengine.runtime.batch_input import Sequences, checked_batch, read_call, read_part

Batches = Literal["global", "local"]
"""What each of several ranks gives to a call: the batch of all ranks, or its own part of it."""


def read_on_ranks(
    control: Control, batches: Batches, call: tuple[Request, ModelSpec, object, Mapping[str, object]], own_loss: bool
) -> Sequences:
    """Read the batch of a call that all ranks make; parts are joined in the order of ranks.

    call: the arguments of `read_call` on this rank. own_loss: the call has a loss of the caller's own.
    Raises: on all ranks, ValueError where whole batches differ or only some ranks have such a loss, and what reading
    raises on one.
    """
    with control.all_or_none():
        given = read_call(*call) if batches == "global" else read_part(*call)
    if batches == "global":
        control.agree(_digest(given, own_loss), "batch")
        return given
    control.agree(bytes([own_loss]), "kind of loss")
    parts = control.gather(_Part.of(given), _Part)
    first = sum(len(part.lengths) for part in parts[: control.ranks.rank])
    with control.all_or_none():
        whole = checked_batch(call[0], _joined(parts))
    return replace(whole, given=slice(first, first + len(given.lengths)), shift=given.shift)


class _Part(NamedTuple):
    """Sequences as they cross to other ranks: one array for all of them."""

    lengths: list[int]
    input_ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None

    @staticmethod
    def of(part: Sequences) -> _Part:
        weights = None if part.weights is None else torch.cat(part.weights).numpy()
        return _Part(part.lengths, torch.cat(part.input_ids).numpy(), torch.cat(part.labels).numpy(), weights)

    def weights_or_ones(self) -> np.ndarray:
        return np.ones(len(self.labels)) if self.weights is None else self.weights


def _joined(parts: list[_Part]) -> Sequences:
    """All parts, one behind the other. Tokens of a part without weights have weight 1 where another has some."""
    lengths = [length for part in parts for length in part.lengths]

    def rows(arrays: list[np.ndarray]) -> list[Tensor]:
        return list(torch.from_numpy(np.concatenate(arrays)).split(lengths))

    weighted = any(part.weights is not None for part in parts)
    return Sequences(
        rows([part.input_ids for part in parts]),
        rows([part.labels for part in parts]),
        rows([part.weights_or_ones() for part in parts]) if weighted else None,
    )


def _digest(batch: Sequences, own_loss: bool) -> bytes:
    digest = hashlib.blake2b(repr(batch.lengths).encode(), digest_size=16)
    columns = () if batch.rows is None else batch.rows.columns.values()
    for row in (*batch.input_ids, *batch.labels, *(batch.weights or ()), *columns):
        digest.update(row.contiguous().view(torch.uint8).numpy().data)
    digest.update(repr((batch.weights is None, own_loss)).encode())
    return digest.digest()
