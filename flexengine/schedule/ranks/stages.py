"""Stages: ranks of a node walk the layers together, as many rounds at a time as ranks, and each has blocks of its own.

These rounds are a *wave*. Block b belongs to rank b % size, which runs it for the chunks of all rounds of a wave. So
its weights cross one link once, and its state may lie on one GPU. Frozen blocks with adapters are as others: both
groups of a block are its rank's. The embedding runs on the rank of block 0. The head of each round runs on a rank of
its own, the n-th round's on rank n, and its gradient is relayed from round to round.
Hidden states and their gradients pass through places in the node's memory, one for each layer's input and chunk of a
wave: a place holds the input, until the rank that has read it leaves its gradient there.

Every rank has a wave's last gradient of its blocks, and all update equal shares of embedding and head, so sums of
squares are exchanged through the node's memory before an update.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.schedule.commands import Signal


class Stage(NamedTuple):
    """What one of `size` ranks runs of `num_layers` layers: embedding, blocks and head."""

    rank: int
    size: int
    num_layers: int

    @property
    def head(self) -> int:
        """The layer that is divided by rounds."""
        return self.num_layers - 1

    def owner(self, layer: int, round_number: int) -> int:
        """The rank that runs a layer for a round of a wave."""
        return round_number if layer == self.head else max(0, layer - 1) % self.size

    def owns(self, layer: int) -> bool:
        """Whether all rounds of a layer are this rank's."""
        return layer != self.head and self.owner(layer, 0) == self.rank

    def runs(self, layer: int) -> bool:
        """Whether this rank runs a layer in training, for some round at least."""
        return layer == self.head or self.owns(layer)


class HandedOver(NamedTuple):
    """Arguments of a copy to or from the place where a chunk's input of a layer is handed over, or then its gradient.

    taken: the copy brings what another rank has left there.
    """

    layer: int
    chunk: int
    back: bool
    taken: bool


class StageSemaphores:
    """Numbers of those that ranks raise: for chunks handed over, the norm, updates of edges, relays of the head."""

    def __init__(self, num_layers: int, num_chunks: int, head_pieces: int) -> None:
        self._layers, self._chunks, self._pieces = num_layers, num_chunks, head_pieces

    @property
    def count(self) -> int:
        """How many semaphores there are."""
        return self._first_piece + self._pieces

    @property
    def _norm(self) -> int:
        return 2 * self._layers * self._chunks

    @property
    def _first_piece(self) -> int:
        return self._norm + 3

    def handed(self, place: HandedOver) -> Signal:
        """The rank that runs the layer before, or after, has left a chunk in its place."""
        return Signal(2 * (place.layer * self._chunks + place.chunk) + place.back, "own", "round")

    def taken(self, place: HandedOver, giver: int) -> Signal:
        """The same, awaited: `giver` has left it in this wave."""
        return self.handed(place)._replace(of=giver)

    def relayed(self, piece: int) -> Signal:
        """This rank has stored a piece of the head's gradient in this wave."""
        return Signal(self._first_piece + piece, "own", "round")

    def relayed_before(self, piece: int, rank: int, last_before: int) -> Signal:
        """The rank of the round before has stored a piece, for rank 0 in the wave before: `last_before` is its last."""
        signal = self.relayed(piece)
        return signal._replace(of=rank - 1) if rank else signal._replace(of=last_before, lag=1)

    def updated(self, head: bool) -> Signal:
        """This rank has updated its share of the embedding or the head."""
        return Signal(self._norm + 1 + head, "own", "update")

    def updated_before(self, head: bool) -> Signal:
        """All ranks have updated the embedding or the head in the step before."""
        return self.updated(head)._replace(of="all", lag=1)

    def norm(self) -> Signal:
        """This rank has stored the sums of squares of the gradients that it has."""
        return Signal(self._norm, "own", "update")

    def all_norms(self) -> tuple[Signal, ...]:
        """All ranks have."""
        return (self.norm()._replace(of="all"),)


def head_group(model: ModelSpec) -> int:
    """The number of the head's group, which those of adapters come behind."""
    return model.layers[-1].groups[0]


def why_no_stages(model: ModelSpec, ranks: int) -> str:
    """Why so many ranks cannot train a model in stages, in words; empty where they can."""
    blocks, edges = len(model.blocks), (model.layers[0], model.layers[-1])

    def trained(layer: LayerSpec) -> bool:
        return any(not model.groups[group].frozen for group in layer.groups)

    reasons = {
        "it has a tower, whose rows come with the embedding": model.given is not None,
        "its head is tied to the embedding": model.tie_word_embeddings,
        "a loss balances its experts": model.balancing is not None,
        f"it has {blocks} block(s) for {ranks} ranks": blocks < ranks,
        "some layers share parameters": max(Counter(g for layer in model.layers for g in layer.groups).values()) > 1,
        "nothing is trained of some block": any(not trained(layer) for layer in model.blocks),
        "a part of its embedding or head is trained alone": any(len(layer.groups) > 1 for layer in edges),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
