"""Arguments of the commands of a split plan, in which ranks walk the layers together: see `waves`."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.schedule.commands import CopyRegion, StoredRun


class ShareOfFetch(NamedTuple):
    """Arguments of a copy that one of `size` ranks makes of what all of them need.

    regions: what they fetch together, into one slot. Each rank fetches an equal share of the slot, and all of the bytes
    that are left over.
    """

    rank: int
    size: int
    regions: tuple[CopyRegion, ...]


class ShareOfRead(NamedTuple):
    """Arguments of a copy of one of `size` ranks, each of which has read its share from a drive.

    spans: (first byte, bytes) of what they bring together to a slot.
    """

    rank: int
    size: int
    spans: tuple[tuple[int, int], ...]


class GatherShares(NamedTuple):
    """Arguments of `gather`: a slot that begins with a share of `share_bytes` bytes from each of `size` ranks."""

    rank: int
    slot: int
    share_bytes: int
    size: int

    @property
    def peer_bytes(self) -> int:
        """Bytes that a rank receives from the others."""
        return (self.size - 1) * self.share_bytes


class GatherOwned(NamedTuple):
    """Arguments of `gather_owned`: every rank sends all of them its shard, which lies at the beginning of a slot.

    source: the slot of its own. slot: of those of all ranks, one after the other, of `counts` bytes.
    """

    rank: int
    source: int
    slot: int
    counts: tuple[int, ...]

    @property
    def brings_own(self) -> bool:
        """The rank's own shard lies elsewhere, too."""
        return True

    @property
    def peer_bytes(self) -> int:
        """Bytes that a rank sends to the others, or receives from them if that is more, on the slowest rank."""
        most = max(self.counts)
        return max((len(self.counts) - 1) * most, sum(self.counts) - min(self.counts))


class ExchangeParts(NamedTuple):
    """Arguments of `exchange`: every rank sends each rank's piece of its accumulator, and receives all of its own.

    first: the first element of the accumulator's slot that is sent. counts: elements of each rank's piece, one after
    the other. received: the slot for the pieces of all ranks, `counts[rank]` elements of `element_bytes` each.
    brings_own: whether the rank's own piece has to be there, too.
    """

    rank: int
    accumulator: int
    first: int
    counts: tuple[int, ...]
    received: int
    element_bytes: int
    brings_own: bool

    @property
    def own(self) -> OwnPiece:
        """What the rank need not receive."""
        return OwnPiece(self.rank, self.accumulator, self.first + sum(self.counts[: self.rank]))

    @property
    def peer_bytes(self) -> int:
        """Bytes that a rank sends to the others, or receives from them if that is more."""
        own = self.counts[self.rank]
        return self.element_bytes * max(sum(self.counts) - own, (len(self.counts) - 1) * own)


class OwnPiece(NamedTuple):
    """A rank's piece of its own accumulator: the rank of its wave, a slot, and the first element there."""

    rank: int
    slot: int
    first: int


class AddTables(NamedTuple):
    """Arguments of `add_squares`: every rank gets the sum of all ranks' slots of `num_bytes` bytes of float64."""

    slot: int
    num_bytes: int
    size: int

    @property
    def peer_bytes(self) -> int:
        """Bytes that a rank sends to the others, around a ring."""
        return 2 * (self.size - 1) * self.num_bytes // self.size


class ReceivedParts(NamedTuple):
    """Pieces of ranks' accumulators that follow each other in a slot, `numel` elements each."""

    slot: int
    numel: int


class FoldParts(NamedTuple):
    """Arguments of `fold`: stored = round(part + stored), part by part in the order of rounds.

    received: where the parts lie; of several entries, each round's part of the first comes before that of the second.
    rounds: how many ranks' parts count. own: where this rank's part of the first lies instead. runs: as of
    FinishGradient, `start` counted from the beginning of a part.
    """

    group: int
    received: tuple[ReceivedParts, ...]
    rounds: int
    own: OwnPiece | None
    runs: tuple[StoredRun, ...]
    has_previous: bool
