"""What rounding has lost of the gradients that this rank exchanges between nodes, kept for the next step."""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.runtime.arena import DTYPES
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.node_exchange import ERROR_DTYPE, NodePiece, own_pieces, sent_as
from flexengine.schedule.shares import Share


class KeptErrors:
    """One error for each element of a rank's pieces, in the memory of its process.

    Gradients are those of a sum over tokens, of which a step's update takes the mean: what is kept of one step counts
    in the next one by the ratio of what the sums are divided by. weight: by what the kept ones would be, 0 at first.
    pieces: of this rank, in order.
    """

    def __init__(self, layout: Layout, share: Share) -> None:
        pieces = own_pieces(layout, share)
        self.pieces = pieces
        self._flat = torch.zeros(sum(piece.numel for piece in pieces), dtype=DTYPES[ERROR_DTYPE])
        found = self._flat.split([piece.numel for piece in pieces])
        self._of = {(piece.group, piece.first): error for piece, error in zip(pieces, found, strict=True)}
        self.weight = 0.0

    def of(self, piece: NodePiece) -> Tensor:
        """The errors of a piece."""
        return self._of[piece.group, piece.first]

    def check_takes(self, layout: Layout, share: Share) -> None:
        """Raise ValueError unless another layout gives this rank the same pieces."""
        if set(self.pieces) != set(own_pieces(layout, share)):
            raise ValueError("the new plan divides what ranks exchange between nodes otherwise")

    def factor(self, weight: float) -> float:
        """What is kept counts so much in a step whose sums are divided by `weight`, from which on it is of that."""
        factor = weight / self.weight if self.weight else 1.0
        self.weight = weight
        return factor

    def begin(self, weight: float | None) -> None:
        """Go on from a checkpoint: with the errors of that weight, which have been read, or None with nothing kept."""
        if weight is None:
            self._flat.zero_()
        self.weight = weight or 0.0


def kept_errors(layout: Layout, share: Share) -> KeptErrors | None:
    """What a rank keeps under a layout before its first step; None where nothing is lost, or lost for good."""
    return KeptErrors(layout, share) if layout.plan.request.nodes > 1 and sent_as(layout).keeps_errors else None
