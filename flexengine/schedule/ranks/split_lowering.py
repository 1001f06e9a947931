"""A round of one of several ranks that walk the layers together, and their update: weights are fetched in shares."""

from __future__ import annotations

from collections.abc import Iterable

from flexengine.models.spec import LayerSpec
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import RoundContext, StagePart
from flexengine.schedule.lowering.drive import DriveParts
from flexengine.schedule.lowering.gradients import InRound
from flexengine.schedule.lowering.kinds import RoundKind, Wave
from flexengine.schedule.lowering.round import RoundLowering
from flexengine.schedule.lowering.shape import RoundShape
from flexengine.schedule.lowering.weights import WeightLowering
from flexengine.schedule.program_builder import ProgramBuilder, merge_regions
from flexengine.schedule.ranks.relay_lowering import SharedContext, SharedUpdate
from flexengine.schedule.ranks.split_commands import (
    GatherOwned,
    GatherShares,
    ShareOfFetch,
    ShareOfRead,
)
from flexengine.schedule.ranks.split_gradients import SplitGradients, add_squares
from flexengine.schedule.ranks.waves import (
    ALL_SQUARES,
    end_of,
    own_regions,
    shared_bytes,
)
from flexengine.schedule.shares import Share


def fetch_share(
    builder: ProgramBuilder, wave: Wave, name: CommandName, content: str, regions: list[CopyRegion]
) -> None:
    """Append the copy of this rank's share of what `regions` bring to a slot, and gather the others' shares."""
    whole = merge_regions(regions)
    own = merge_regions(own_regions(whole, wave.rank, wave.size))
    _gather_shares(builder, content, whole, own, (name, ShareOfFetch(wave.rank, wave.size, whole)), end_of(whole))


def _gather_shares(
    builder: ProgramBuilder, content: str, sources: Iterable[CopyRegion], own: tuple[CopyRegion, ...],
    copy: tuple[CommandName, ShareOfFetch | ShareOfRead], num_bytes: int,
) -> None:  # fmt: skip
    """Append a rank's copy of its share of so many bytes, which depends on `sources`, and gather all of them."""
    [target], (name, args) = {region.target for region in own}, copy
    share = shared_bytes(num_bytes, args.size)
    held = f"share of {content}" if share else content
    reads = [Access(source, content) for source in dict.fromkeys(region.source for region in sources)]
    builder.add_copy(name, Stream.H2D, reads, [Access(target, held)], own, args=args)
    if share:
        gathered, shares = name._replace(verb="gather"), GatherShares(args.rank, target, share, args.size)
        builder.add("gather", gathered, Stream.COMM, [Access(target, held)], [Access(target, content)], args=shares)


class SplitWeights(WeightLowering):
    """Fetches this rank's share of weights, and gathers the others'."""

    def __init__(self, context: RoundContext, wave: Wave) -> None:
        super().__init__(context)
        self._wave, self._drive = wave, DriveParts(context, Share(wave.rank, wave.size))

    def _fetch(self, group: int, at: StagePart, slot: int) -> None:
        """Gather shards from the GPUs; those of a round wait for each other's updates, as they come before it."""
        layout = self._layout
        if not layout.homes[group].sharded:
            super()._fetch(group, at, slot)
            return
        name, content = self._context.part_name(group, at.part), self._content(group, at.part, slot)
        own = Access(layout.plane_slot("weights", group), f"shard of {content}")
        self._builder.holds(*own)
        args = GatherOwned(self._wave.rank, own.slot, slot, layout.shards(group).bytes_of_ranks("weights"))
        label = CommandName("gather", "weights", name)
        self._builder.add("gather_owned", label, Stream.COMM, [own], [Access(slot, content)], args=args)

    def _bring(self, name: CommandName, content: str, regions: list[CopyRegion]) -> None:
        fetch_share(self._builder, self._wave, name, content, regions)

    def _bring_read(self, name: CommandName, content: str, regions: list[CopyRegion], part: int, group: int) -> None:
        """Send this rank's share, of which alone it has read the blocks, and gather the others'."""
        spans = tuple((b.target, b.held) for b, _ in self._layout.staged_part("weights", group, part))
        args, own = ShareOfRead(self._wave.rank, self._wave.size, spans), merge_regions(regions)
        _gather_shares(self._builder, content, regions, own, (name, args), max(map(sum, spans)))


class SplitRound(RoundLowering):
    """A round of one of several ranks that walk the layers together."""

    context: SharedContext
    gradients: SplitGradients

    def __init__(self, layout: Layout, shape: RoundShape, kind: RoundKind) -> None:
        ranks = layout.plan.request.ranks
        self._wave = kind.wave or Wave(0, ranks, ranks)
        super().__init__(layout, shape, kind)

    def make_context(self) -> SharedContext:
        return SharedContext(self.layout, self.shape, self.builder)

    def make_weights(self) -> WeightLowering:
        return SplitWeights(self.context, self._wave)

    def make_gradients(self, updated: InRound) -> SplitGradients:
        return SplitGradients(self.context, self.kind, self._wave)

    def _before_gradients_leave(self, index: int, layer: LayerSpec, at: StagePart) -> None:
        """Bring the weights of the stage that follows in backward, if one does.

        Ranks run collectives in program order, and an exchange waits for the stage that is at work. Slots of edges
        that lie over the blocks' would take the place of what is sent.
        """
        self.gradients.before_gradients_leave()
        if layer.kind != "block" and self.layout.plan.share_edge_slots:
            return
        later = [(index, stage) for stage in self._stages_of(index)]
        later = later[later.index((index, at)) + 1 :]
        if not later and index > 0 and self.model.layers[index - 1].has_backward:
            later = [(index - 1, stage) for stage in self._stages_of(index - 1)]
        if later:
            below = self.model.layers[later[0][0]]
            self.weights.acquire(below, later[0][1], below.backward_groups)


class SplitUpdate(SharedUpdate):
    """An update before which ranks have added up their tables of squares; several nodes have done so before."""

    def sums_of_squares(self) -> Access:
        layout, norms = self.layout, Access(self.layout.slot("norm_squares"), "norm squares")
        if self.kind.norm_known or layout.plan.request.nodes > 1:
            self.builder.holds(*norms)
        if layout.plan.request.nodes == 1:
            if self.kind.norm_known:
                self.builder.holds(layout.slot("run_squares"), ALL_SQUARES)
            else:
                add_squares(self.builder, layout)
        return norms

    def tile_sources(self) -> list[Access]:
        """The sum of the tables, which none has before all have stored their pieces."""
        one_node = self.layout.plan.request.nodes == 1
        return [Access(self.layout.slot("run_squares"), ALL_SQUARES)] if one_node else []
