"""What rounding has lost of the gradients that this rank exchanges between nodes, kept for the next step."""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch import Tensor

from flexengine.optim.clipping import kept_share
from flexengine.runtime.arena import DTYPES
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.node_exchange import ERROR_DTYPE, NodePiece, own_pieces, sent_as
from flexengine.schedule.shares import Share


class KeptErrors:
    """One error for each element of a rank's pieces, in the memory of its process.

    Gradients are those of a sum over tokens, of which a step's update takes the mean: what is kept of one step counts
    in the next one by the ratio of what the sums are divided by. weight: by what the kept ones would be, 0 at first.
    usual: the share of gradients that clipping is expected to keep in the next step, 0 at first. Of a step in which it
    kept less, the errors count less too: they would else bring a part of what it took away. pieces: of this rank, in
    order.
    """

    def __init__(self, layout: Layout, share: Share) -> None:
        pieces = own_pieces(layout, share)
        self.pieces = pieces
        self._flat = torch.zeros(sum(piece.numel for piece in pieces), dtype=DTYPES[ERROR_DTYPE])
        found = self._flat.split([piece.numel for piece in pieces])
        self._of = {(piece.group, piece.first): error for piece, error in zip(pieces, found, strict=True)}
        self.weight = self.usual = 0.0

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

    def end_step(self, grad_norm: float, max_grad_norm: float | None, bad: Container[int]) -> None:
        """Count what a step has lost as its update counts the gradients, and nothing of what that has skipped.

        Steps that are clipped alike owe all that they lose. bad: the groups whose gradients are not finite.
        """
        skips_all = max_grad_norm is not None and not math.isfinite(grad_norm)
        for piece in self.pieces:
            if skips_all or piece.group in bad:
                self.of(piece).zero_()
        if not skips_all:
            share = kept_share(grad_norm, max_grad_norm)
            self.usual = max(share, self.usual / 2)
            self.weight *= self.usual / share

    def begin(self, weight: float, usual: float) -> None:
        """Go on from a checkpoint: with errors that have been read, or with nothing kept where they have no weight."""
        if not weight:
            self._flat.zero_()
        self.weight, self.usual = weight, usual


def kept_errors(layout: Layout, share: Share) -> KeptErrors | None:
    """What a rank keeps under a layout before its first step; None where nothing is lost, or lost for good."""
    return KeptErrors(layout, share) if layout.plan.request.nodes > 1 and sent_as(layout).keeps_errors else None
