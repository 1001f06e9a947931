"""Sizes that follow from a model and a plan alone: layer programs, stored groups, windows, scratch, tiles."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate

from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.attention import CausalAttention, block_workspace_bytes
from flexengine.plan import GroupPlan, Plan
from flexengine.schedule.drive import drive_kinds, staged_offsets
from flexengine.schedule.group_storage import DTYPE_BYTES, GroupStorage, group_storage, tile_offsets
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import LayerProgram, align
from flexengine.schedule.node_states import NodeStates, why_no_node_states
from flexengine.schedule.parts import Part
from flexengine.schedule.pieces import Piece, pieces_of
from flexengine.schedule.ranks.chunk_shares import most_kept
from flexengine.schedule.ranks.places import places_of, why_no_shards
from flexengine.schedule.ranks.waves import Section, sections_of
from flexengine.schedule.second_planes import may_speculate
from flexengine.schedule.segments import Segments
from flexengine.schedule.shares import DealtStates, FrozenShards
from flexengine.schedule.window import WindowPlaces, window_places

HIDDEN_SLOTS, HIDDEN_GRADIENTS = 6, 4
"""Chunks of the tensor between layers, and of its gradient, in transit where they wait on the host: layers read one and
write one while one more arrives and one leaves, each of both; backward writes gradients in place."""


class PlannedSizes:
    """A model under a plan, in bytes.

    given: the model as it was given. model: as the plan streams it, with experts whole or in parts. homes: where this
    rank finds what it needs of each group between uses, and what it updates; all ranks find the same but in stages.
    node_states: of groups whose states nodes divide, what a node keeps of these.
    pieces: by group and part, the pieces in which its gradient moves: of several ranks cut, of one the whole part.
    """

    def __init__(self, model: ModelSpec, plan: Plan) -> None:
        self.given, self.plan, self.homes = model, plan, self._homes_of(plan)
        self.model = model = in_parts(model) if plan.in_parts and may_be_in_parts(model) else model
        self.places = places_of(plan)
        check_frozen(model, plan)
        for group, home in zip(model.groups, plan.groups, strict=True):
            self.places.check_home(home, f"{group.name} of {model.name}")
        numerics = plan.request.numerics
        self.compute_bytes = DTYPE_BYTES[numerics.compute]
        self.acc_bytes = 8 if numerics.compute == "float64" else 4
        self.groups = tuple(group_storage(g, numerics) for g in model.groups)
        check_updates(model, self.groups, plan)
        self.node_states = {
            i: NodeStates(self.groups[i], plan.request.nodes)
            for i, home in enumerate(plan.groups)
            if home.states == "nodes"
        }
        self._check_shards()
        self.pieces = tuple(tuple(self._pieces_of(i, part) for part in g.parts) for i, g in enumerate(self.groups))
        self._sections: dict[tuple[int, int], list[Section]] = {}
        self.programs = tuple(self.layer_program(i) for i in range(len(model.layers)))
        self.segments = Segments(model, plan)
        if plan.request.hidden_on_host and plan.in_parts:
            raise ValueError(f"hidden states of {model.name} cannot wait on the host: its blocks run part by part")

    def _check_shards(self) -> None:
        for group, stored, home in zip(self.model.groups, self.groups, self.plan.groups, strict=True):
            reason = why_no_shards(stored, self.plan.request.ranks, self.acc_bytes) if home.sharded else ""
            if reason:
                raise ValueError(f"{group.name} of {self.model.name} cannot lie in shards: {reason}")

    def _homes_of(self, plan: Plan) -> tuple[GroupPlan, ...]:
        return plan.groups

    def trains(self, layer: int) -> bool:
        """Whether this rank runs a layer in training."""
        return True

    def is_handed(self, layer: int) -> bool:
        """Whether another rank hands a layer's input over through the node's memory, where it then lies."""
        return False

    def layer_program(self, layer: int) -> LayerProgram:
        """The compiled program of a layer under its save set."""
        kept = self.plan.layers[layer]
        return compile_layer(
            self.model.layers[layer], kept.keep_gpu, kept.keep_host, self.plan.chunk_tokens, self.compute_bytes
        )

    def evaluation_program(self, layer: int) -> LayerProgram:
        """The compiled program of a layer that keeps nothing."""
        return compile_layer(self.model.layers[layer], (), (), self.plan.chunk_tokens, self.compute_bytes)

    def piece_bytes(self, group: int) -> int:
        """Bytes of a slot for any piece of a group's stored gradient."""
        return self._largest_piece(group) * self.groups[group].element_bytes("grad")

    def spilled_piece_bytes(self, group: int) -> int:
        """Bytes of a slot for any piece of a group's accumulator."""
        return self._largest_piece(group) * self.acc_bytes

    def _largest_piece(self, group: int) -> int:
        return max(piece.numel for pieces in self.pieces[group] for piece in pieces)

    def _pieces_of(self, group: int, part: Part) -> tuple[Piece, ...]:
        return self.places.cut_gradient(self, group, part)

    def sections(self, group: int, part: int) -> list[Section]:
        """What ranks exchange at once of a part's accumulator in a split plan."""
        if (group, part) not in self._sections:
            self._sections[group, part] = sections_of(self.pieces[group][part], self.plan.request.ranks)
        return self._sections[group, part]

    def received_bytes(self, group: int) -> int:
        """Bytes of a slot for the pieces of all ranks that a rank receives of any section of a group."""
        parts = range(len(self.pieces[group]))
        return self.acc_bytes * max(s.received_elements for part in parts for s in self.sections(group, part))

    # -- activations -------------------------------------------------------------------------------------------------

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one chunk of the tensor between layers."""
        return self.model.hidden.num_bytes(self.plan.chunk_tokens, self.compute_bytes)

    @property
    def hidden_grad_bytes(self) -> int:
        """Bytes of the gradient of its rows."""
        return self.model.hidden_rows.num_bytes(self.plan.chunk_tokens, self.compute_bytes)

    @property
    def either_hidden_bytes(self) -> int:
        """Bytes of a place that holds the one and later the other."""
        return max(self.hidden_bytes, self.hidden_grad_bytes)

    def most_saved(self, layer: int) -> tuple[int, int]:
        """GPU and host bytes of a chunk that a layer keeps at most, or another that shares its slots."""
        return self._most_saved[self.segments.owner_of_saved(layer)]

    @cached_property
    def _most_saved(self) -> dict[int | str, tuple[int, int]]:
        found = dict[int | str, tuple[int, int]]()
        for layer, program in enumerate(self.programs):
            owner = self.segments.owner_of_saved(layer)
            gpu, host = found.get(owner, (0, 0))
            found[owner] = max(gpu, program.save_gpu_bytes), max(host, program.save_host_bytes)
        return found

    @property
    def num_hidden_slots(self) -> int:
        """Slots of the ring that carries hidden states: a round's chunks and two in transit, or those in transit."""
        return HIDDEN_SLOTS if self.plan.request.hidden_on_host else self.plan.num_chunks + 2

    @property
    def num_hidden_gradients(self) -> int:
        """Slots for their gradients: one for each of a round's chunks, or those in transit; chunk by chunk gradients
        take the slots of hidden states that the head has read."""
        if self.segments.by_chunk:
            return 0
        return HIDDEN_GRADIENTS if self.plan.request.hidden_on_host else self.plan.num_chunks

    @cached_property
    def all_programs(self) -> tuple[LayerProgram, ...]:
        """The programs of all layers, of training and of evaluation."""
        return (*self.programs, *(self.evaluation_program(i) for i in range(len(self.programs))))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of temporaries that some layer needs at one moment."""
        needs = [max(p.forward_scratch_bytes, p.backward_scratch_bytes, p.window_scratch_bytes) for p in self.programs]
        return max(*needs, *(p.forward_scratch_bytes for p in self.all_programs))

    @property
    def _block_workspace_bytes(self) -> int:
        """What blocks of a long sequence's earlier keys take beside that."""
        tokens = self.plan.chunk_tokens
        earlier = tokens * (self.window_slices - 1)
        ops = (op for layer in self.model.layers for op in layer.ops if isinstance(op, CausalAttention))
        return max((block_workspace_bytes(op, tokens, earlier, self.compute_bytes) for op in ops), default=0)

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the calls of ops may take from the device allocator at one moment.

        In float16 the plain path's, too: cards that are given that dtype have few kernels with products.
        """
        sliced = self.plan.slices_sequences
        by_kernels = max(p.workspace_bytes + sliced * p.window_workspace_bytes for p in self.programs)
        by_kernels += sliced * self._block_workspace_bytes
        return max(by_kernels, self.plain_workspace_bytes) if self.plan.request.numerics.scales_loss else by_kernels

    @property
    def plain_workspace_bytes(self) -> int:
        """Bytes that the calls of ops may take from the allocator at one moment on the CPU."""
        sliced = self.plan.slices_sequences
        return max(p.plain_workspace_bytes + sliced * p.plain_window_workspace_bytes for p in self.programs)

    @property
    def kept_chunks(self) -> int:
        """The most chunks whose activations a rank keeps from forward to backward."""
        return self._kept_of_cut if self.plan.cuts_rounds else self.plan.num_chunks

    @cached_property
    def _kept_of_cut(self) -> int:
        return most_kept(self)

    @property
    def window_slices(self) -> int:
        """The most chunks of one sequence."""
        return self.plan.request.slices(self.plan.chunk_tokens)

    @property
    def window_rows(self) -> int:
        """Rows of the key/value window: the longest sequence in whole chunks; 0 when no sequence is sliced."""
        if not self.plan.slices_sequences:
            return 0
        return self.window_slices * self.plan.chunk_tokens

    def window_of(self, layer: int) -> WindowPlaces:
        """Places of what a layer carries along a sliced sequence."""
        sizes = (self.window_rows, self.plan.chunk_tokens, self.compute_bytes)
        return window_places(self.model.layers[layer].ops, *sizes)

    # -- the optimizer -----------------------------------------------------------------------------------------------

    @cached_property
    def tile_offsets(self) -> dict[str, int]:
        """Byte offset of every plane kind within an optimizer tile, and its `end`."""
        return tile_offsets(self.groups, self.plan.optimizer_tile, self.plan.request.gpu_updates)

    @cached_property
    def staged_offsets(self) -> dict[str, int]:
        """Byte offset of every plane kind within a slot for a tile from a drive, and its `end`; 0 without a drive."""
        rows = ((g, drive_kinds(g, home)) for g, home in zip(self.groups, self.plan.groups, strict=True))
        return staged_offsets((row for row in rows if row[1]), self.plan.drive_tile)

    @cached_property
    def update_scratch_bytes(self) -> int:
        """Bytes of temporaries of the GPU's updates."""
        groups = (g for g, home in zip(self.groups, self.homes, strict=True) if home.update == "gpu")
        return max((group.update_scratch_bytes(self.plan.request.numerics) for group in groups), default=0)

    def dealt_states(self, stored: GroupStorage) -> DealtStates:
        """Where ranks keep the states of a group if they divide them."""
        return DealtStates(stored, self.plan.request.ranks, self.plan.optimizer_tile)

    def shards(self, group: int) -> DealtStates | FrozenShards:
        """Where ranks keep their shares of a group that they have in shards."""
        if self.model.groups[group].frozen:
            return FrozenShards(self.groups[group].plane_bytes["weights"], self.plan.request.ranks)
        return self.trained_shards(group)

    def trained_shards(self, group: int) -> DealtStates:
        """The same of one that is trained: ranks own what they add up gradients of."""
        [section] = self.sections(group, 0)
        cuts = accumulate(section.counts, initial=0)
        return DealtStates(self.groups[group], self.plan.request.ranks, self.plan.optimizer_tile, tuple(cuts))

    @property
    def tile_bytes(self) -> int:
        """Bytes of one optimizer tile slot."""
        return self.tile_offsets["end"]


def check_updates(model: ModelSpec, groups: Iterable[GroupStorage], plan: Plan) -> None:
    """Raise ValueError for an update by the CPU that only the GPU can do, one that is speculative and cannot be, or one
    from a gradient that adds up and has no place."""
    for group, use, stored, home in zip(model.groups, group_uses(model), groups, plan.groups, strict=True):
        if home.grads == "none" and (use.gradients > 1 or group.num_parts > 1):
            raise ValueError(
                f"{group.name} has its gradient from {use.gradients} layers in {group.num_parts} parts, which needs a"
                " place, but the plan has grads=none for it; give grads=host or gpu"
            )
        if home.grads == "drive" and len(stored.parts) > 1:
            raise ValueError(
                f"{group.name} crosses the link in {len(stored.parts)} parts, whose gradients begin inside a drive's"
                " blocks, but the plan has grads=drive for it; give grads=host"
            )
        if home.update == "cpu" and stored.on_gpu_only:
            raise ValueError(f"{group.name} has matrices that are updated by products on the GPU, not by the CPU")
        if home.speculative and not may_speculate(stored, home):
            raise ValueError(f"{group.name} cannot be updated speculatively: its states are in blocks")
        if home.states == "nodes" and (reason := why_no_node_states(stored)):
            raise ValueError(f"nodes cannot divide the optimizer states of {group.name}: {reason}")


def check_frozen(model: ModelSpec, plan: Plan) -> None:
    """Raise ValueError unless a plan updates what the model trains, and nothing else."""
    for group, home in zip(model.groups, plan.groups, strict=True):
        if home.trained == group.frozen:
            state = "frozen" if group.frozen else "trained"
            raise ValueError(f"{group.name} of {model.name} is {state}, but the plan has update={home.update} for it")


def spilled_bytes(groups: Iterable[GroupStorage], acc_bytes: int) -> tuple[int, int]:
    """GPU and host bytes for accumulators of groups that two layers of one of several ranks add to."""
    gpu_bytes = host_bytes = 0
    for group in groups:
        pieces = pieces_of(group.parts[0], group.element_bytes("grad"))
        gpu_bytes += align(acc_bytes * max(piece.numel for piece in pieces))
        host_bytes += align(acc_bytes * group.part_numel)
    return gpu_bytes, host_bytes
