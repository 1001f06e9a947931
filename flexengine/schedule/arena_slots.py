"""Lays slots one after the other in the two arenas: what is resident, a round's slots, optimizer tiles, the host's.

Overlaps save GPU memory: optimizer tiles lie over the slots of forward and backward, which are idle then unless the
GPU updates inside a round. An untied embedding's and head's slots lie over each other, with `share_edge_slots` over the
blocks' as well. With `grads_over_weights` their gradients lie over their weights, which nobody reads once the gradient
is made. Overlap is safe: hazards follow addresses, not names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flexengine.models.spec import BLOCK_CLASSES
from flexengine.plan import Plan
from flexengine.schedule.drive import (
    all_blocks,
    drive_bytes,
    drive_kinds,
    drive_slots,
    frozen_on_drive,
    in_blocks,
    reading_shares,
    staged_part_bytes,
)
from flexengine.schedule.fixed_slots import (
    PARTIAL_SQUARES,
    SCALAR_BYTES,
    batch_offsets,
    host_scalar_bytes,
    norm_square_bytes,
)
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.kept_on_drive import add_staged, keeps_input, keeps_saved, kept_slots
from flexengine.schedule.layer_program import align
from flexengine.schedule.planned_sizes import PlannedSizes
from flexengine.schedule.region import Region
from flexengine.schedule.second_planes import SECOND, second_kinds
from flexengine.schedule.slots import Memory, PlaneKind, Role, Slot

STAGED_WEIGHTS, STAGED_GRADS = 2, 3
"""Slots of the host for weights from a drive: one is read while another is sent, as a drive is slower than the link.
For gradients: one more is written."""
ADAPTER_SLOTS = 2
"""Slots for weights of adapters that stream, and for their gradients: one at work, one on its way."""


def lay_out(sizes: PlannedSizes) -> tuple[tuple[Slot, ...], dict[Memory, int]]:
    """All slots of a plan, and the bytes of each memory's arena."""
    slots: list[Slot] = []
    gpu_bytes = _GpuSlots(sizes, slots).lay_out()
    host = _HostSlots(sizes, slots)
    host_bytes = host.lay_out()
    drive_bytes = _add_drive(sizes, slots)
    return tuple(slots), {"gpu": gpu_bytes, "host": host_bytes, "node": host.node_bytes, "drive": drive_bytes}


def _add_drive(sizes: PlannedSizes, slots: list[Slot]) -> int:
    """Append the slots of what lies on a drive; returns its bytes."""
    end = 0
    for spec, stored, home in zip(sizes.model.groups, sizes.groups, sizes.plan.groups, strict=True):
        kinds = drive_kinds(stored, home)
        if kinds:
            slots += drive_slots(spec.name, stored, kinds, end, sizes.plan)
            end += drive_bytes(stored, kinds)
            if home.speculative and sizes.plan.speculates:
                second = tuple(second_kinds(stored))
                slots += drive_slots(spec.name, stored, second, end, sizes.plan, index=SECOND)
                end += drive_bytes(stored, second)
        elif home.weights == "drive":
            slots += frozen_on_drive(spec.name, stored, end, sizes.plan)
            end += in_blocks(stored.plane_bytes["weights"])
    for key, num_bytes in kept_slots(sizes):
        slots.append(Slot(key, end, num_bytes, "offloaded activations"))
        end += num_bytes
    return end


def host_memory(plan: Plan) -> Memory:
    """Where planes lie that a plan keeps on the host: several ranks have one copy."""
    return "node" if plan.shares_node else "host"


def _add_batch(sizes: PlannedSizes, region: Region) -> None:
    """Append token ids, labels, positions and lengths of one round's chunks."""
    region.add(
        "batch", batch_offsets(sizes.plan.num_chunks, sizes.plan.chunk_tokens, sizes.model.num_axes)["end"], "batch"
    )


class _HostSlots:
    """The host arena: the batch, the homes of planes, and offloaded activations.

    Of several ranks the planes lie in an arena of the node, with the sums of squares that the last round leaves.
    """

    def __init__(self, sizes: PlannedSizes, slots: list[Slot]) -> None:
        self._sizes, self._region = sizes, Region(slots, "host")
        self._homes = Region(slots, "node") if sizes.plan.shares_node else self._region

    @property
    def node_bytes(self) -> int:
        """Bytes of the node's arena; 0 for one rank. Order: after `lay_out`."""
        return self._homes.end if self._homes is not self._region else 0

    def lay_out(self) -> int:
        """Append all slots; returns the bytes of the arena."""
        sizes, region = self._sizes, self._region
        if sizes.model.given is not None:  # first, so that a change of plan leaves it where it is
            for role in ("given_rows", *(["given_grads"] if sizes.model.trains_tower else [])):
                region.add(role, math.prod(sizes.model.rows_shape) * sizes.compute_bytes, "batch")
        _add_batch(sizes, region)
        if sizes.plan.updates_on_cpu:
            region.add("scalars", host_scalar_bytes(len(sizes.groups), sizes.acc_bytes), "scalars")
        self._planes()
        self._staged_states()
        self._staged_parts("weights", "staged_weights", STAGED_WEIGHTS)
        self._staged_parts("grad", "staged_grads", STAGED_GRADS)
        add_staged(sizes, region)
        sizes.places.add_on_host(sizes, region, self._homes)
        self._offloaded_activations()
        return region.end

    def _planes(self) -> None:
        categories = {"weights": "weights", "grad": "gradients"}
        rows = zip(self._sizes.model.groups, self._sizes.groups, self._sizes.plan.groups, strict=True)
        for group, (spec, stored, home) in enumerate(rows):
            for kind, num_bytes in stored.plane_bytes.items():
                on_host = home.home_of(kind) in ("host", "shard")
                if not num_bytes or not self._sizes.places.has_place(kind, on_host):
                    continue
                category = categories.get(kind, "optimizer states")
                if kind == "grad" and self._sizes.plan.shares_node:
                    self._homes.add(kind, num_bytes, category, spec.name)
                    self._homes.add_pieces(self._places_of_pieces(group))
                elif group in self._sizes.node_states and kind in stored.state_kinds:
                    self._homes.add(kind, self._sizes.node_states[group].num_bytes(kind), category, spec.name)
                else:
                    self._homes.add_plane(kind, spec.name, stored, category)
            if home.speculative and self._sizes.plan.speculates and home.states == "host":
                for kind in second_kinds(stored):
                    self._homes.add(kind, stored.plane_bytes[kind], "second planes", spec.name, SECOND)

    def _staged_states(self) -> None:
        """Append slots for states on their way from and to a drive, at borders of its blocks."""
        num_bytes = self._sizes.staged_offsets["end"]
        for k in range(self._sizes.plan.drive_slots if num_bytes else 0):
            self._region.end = in_blocks(self._region.end)
            self._region.add("staged", num_bytes, "drive slots", index=k)

    def _staged_parts(self, kind: PlaneKind, role: Role, most: int) -> None:
        """Append slots of each class for weights or gradients on their way between a drive and the GPU, at borders of
        its blocks."""
        rows = zip(self._sizes.model.groups, self._sizes.groups, self._sizes.plan.groups, strict=True)
        classes: dict[str, list[tuple[GroupStorage, bool]]] = {}
        for spec, stored, home in rows:
            if home.home_of(kind) == "drive":
                classes.setdefault(spec.slot_class, []).append((stored, home.trained))
        shares = reading_shares(self._sizes.plan, kind)
        for name, groups in classes.items():
            sizes = (staged_part_bytes(stored, kind, trained=trained, shares=shares) for stored, trained in groups)
            num_bytes = max(sizes)
            for k in range(min(most, sum(len(stored.parts) for stored, _ in groups))):
                self._region.end = in_blocks(self._region.end)
                self._region.add(role, num_bytes, "drive slots", name, k)
                self._region.add_places(
                    (blocks.place, blocks.held)
                    for stored, trained in groups
                    for part in all_blocks(stored, kind, trained=trained, shares=shares)
                    for blocks in part
                )

    def _places_of_pieces(self, group: int) -> Iterator[tuple[int, int, int]]:
        """Ranges of the pieces of a gradient, in bytes."""
        width = self._sizes.groups[group].element_bytes("grad")
        for piece in (piece for pieces in self._sizes.pieces[group] for piece in pieces):
            for found in piece.ranges:
                yield found.first, found.first * width, found.numel * width

    def _offloaded_activations(self) -> None:
        sizes, region = self._sizes, self._region
        for c in range(sizes.plan.num_chunks) if sizes.plan.request.hidden_on_host else ():
            region.add("hidden", sizes.either_hidden_bytes, "offloaded activations", index=c)
        for layer, (kept, program) in enumerate(zip(sizes.plan.layers, sizes.programs, strict=True)):
            if not (sizes.model.layers[layer].keeps and sizes.trains(layer)):
                continue
            for c in range(sizes.kept_chunks):
                on_host = kept.input_home == "host" and not keeps_input(sizes, layer)
                if on_host and not sizes.is_handed(layer):
                    key = sizes.segments.key_of_input(layer, c, "host")
                    region.add_once(key, sizes.hidden_bytes, "offloaded activations", sizes.hidden_bytes)
                if (num_bytes := program.save_host_bytes) and not keeps_saved(sizes, layer):
                    key = sizes.segments.key_of_saved("save", layer, c, "host", num_bytes)
                    region.add_once(key, num_bytes, "offloaded activations", sizes.most_saved(layer)[1])


class _GpuSlots:
    """The GPU arena: batch, scalars, what is resident; then one region used by a round and by the update in turn."""

    def __init__(self, sizes: PlannedSizes, slots: list[Slot]) -> None:
        self._sizes, self._slots = sizes, slots
        self._model, self._plan, self._groups = sizes.model, sizes.plan, sizes.groups

    def lay_out(self) -> int:
        """Append all slots; returns the bytes of the arena."""
        region = Region(self._slots, "gpu")
        _add_batch(self._sizes, region)
        region.add("losses", 8 * self._plan.num_chunks * self._plan.chunk_tokens, "batch")
        region.add("norm_squares", norm_square_bytes(self._groups), "scalars")
        region.add("partial_squares", 4 * PARTIAL_SQUARES, "scalars")
        region.add("scales", self._sizes.acc_bytes * len(self._groups), "scalars")
        region.add("grad_norm", SCALAR_BYTES, "scalars")
        self._sizes.places.add_scalars(self._sizes, region)
        self._resident_planes(region)
        end = self._round_slots(region.end)
        return max(end, self._optimizer_tiles(end if self._plan.gpu_updates_in_round else region.end))

    def _resident_planes(self, region: Region) -> None:
        rows = zip(self._model.groups, self._groups, self._sizes.homes, strict=True)
        for group, (spec, stored, home) in enumerate(rows):
            if home.sharded:
                shards = self._sizes.shards(group)
                for kind in (kind for kind, num_bytes in stored.plane_bytes.items() if num_bytes):
                    region.add(kind, shards.num_bytes(kind), "shards", spec.name)
            if home.weights == "gpu":
                # no runs: whoever computes with resident weights reads the whole plane
                region.add("weights", stored.plane_bytes["weights"], "resident weights", spec.name)
            if home.grads == "gpu":
                region.add_plane("grad", spec.name, stored, "resident gradients")
            if home.states == "gpu":
                for kind in stored.state_kinds:
                    region.add_plane(kind, spec.name, stored, "resident optimizer states")
            if home.states == "dealt":
                dealt = self._sizes.dealt_states(stored)
                for kind in stored.rule_states:
                    region.add(kind, dealt.num_bytes(kind), "dealt optimizer states", spec.name)

    def _optimizer_tiles(self, start: int) -> int:
        """Append tiles of the update from `start` on, over a round's slots unless it updates, too; returns where they
        end."""
        region = Region(self._slots, "gpu", start)
        for k in range(self._plan.optimizer_slots if self._plan.uses_tiles else 0):
            region.add("tile", self._sizes.tile_bytes, "optimizer slots", index=k)
        if self._sizes.update_scratch_bytes:
            region.add("update_scratch", self._sizes.update_scratch_bytes, "optimizer slots")
        return region.end

    # -- a round -----------------------------------------------------------------------------------------------------

    def _round_slots(self, start: int) -> int:
        """Append slots of forward and backward; returns where they end."""
        region = Region(self._slots, "gpu", start)
        self._parameter_slots(region, set(BLOCK_CLASSES), grads_over_weights=False)
        edge_start = start if self._plan.share_edge_slots else region.end
        for classes in self._edge_classes():
            edge = Region(self._slots, "gpu", edge_start)
            self._parameter_slots(edge, classes, self._plan.grads_over_weights)
            region.end = max(region.end, edge.end)
        self._activation_slots(region)
        return region.end

    def _edge_classes(self) -> list[set[str]]:
        """Slot classes of embedding and head, those that one layer uses together in one set.

        An untied embedding and head are never at work at the same time, so their slots lie over each other.
        """
        found: list[set[str]] = []
        for layer in self._model.layers:
            used = {self._model.groups[g].slot_class for g in layer.groups} - set(BLOCK_CLASSES)
            together = [classes for classes in found if classes & used]
            found = [classes for classes in found if not classes & used]
            if used:
                found.append(used.union(*together))
        return found

    def _parameter_slots(self, region: Region, slot_classes: set[str], grads_over_weights: bool) -> None:
        """Append weight, accumulator and gradient staging slots of the given slot classes."""
        members: dict[str, list[int]] = {}
        for i, group in enumerate(self._model.groups):
            if group.slot_class in slot_classes:
                members.setdefault(group.slot_class, []).append(i)
        for name, groups in members.items():
            self._slots_of_class(region, name, groups, grads_over_weights)

    def _slots_of_class(self, region: Region, name: str, groups: list[int], grads_over_weights: bool) -> None:
        homes = self._sizes.homes
        trained = [i for i in groups if homes[i].trained]
        streamed = [i for i in groups if homes[i].weights != "gpu"]
        staged = [i for i in trained if homes[i].grads != "gpu"]
        accumulated = max((self._groups[i].part_numel for i in trained), default=0) * self._sizes.acc_bytes
        weights_start = region.end
        lends = self._sizes.places.lends_accumulator(self._sizes, streamed)
        if not lends:
            self._ring(region, name, streamed)
        if grads_over_weights:
            weights_end, region.end = region.end, weights_start
            self._grad_ring(region, name, staged)
            region.end = max(weights_end, region.end)
        self._accumulators(region, name, accumulated, self._num_parts(trained))
        if lends:
            lent = Region(self._slots, "gpu", weights_start)
            self._ring(lent, name, streamed, accumulated)
            region.end = max(region.end, lent.end)
        decoded = max((self._groups[i].part_numel for i in groups if self._groups[i].decoded is not None), default=0)
        if decoded:  # one is enough: the stream that decodes is the one that computes
            region.add("decoded", decoded * self._sizes.compute_bytes, "decoded weights", name)
        if not grads_over_weights:
            self._grad_ring(region, name, staged)
        spilled = self._sizes.places.spilled_slot_bytes(self._sizes, staged)
        if spilled:
            region.add("spilled", spilled, "gradient slots", name)

    def _accumulators(self, region: Region, name: str, num_bytes: int, num_parts: int) -> None:
        """Append the slots that gradients of a class are added up in: one, or a ring of several."""
        count = max(self._sizes.places.accumulators, self._sizes.segments.accumulators if name == "block" else 1)
        for k in range(min(count, num_parts)) if count > 1 else (-1,):
            region.add("accumulator", num_bytes, "gradient accumulators", name, k)

    def _ring(self, region: Region, name: str, groups: list[int], most_bytes: int | None = None) -> None:
        """Append a slot class's slots for parts of weights: as large as the largest, no more than there are parts.

        most_bytes: of all of them.
        """
        largest = max((self._groups[i].part_bytes("weights") for i in groups), default=0)
        most = self._at_most(groups, self._plan.weight_slots)
        if most_bytes is not None and largest:
            most = max(1, min(most, most_bytes // align(largest)))
        for k in range(min(self._num_parts(groups), most)):
            region.add("weights", largest, "weight slots", name, k)

    def _at_most(self, groups: list[int], slots: int) -> int:
        """How many slots the parts of some groups have of a plan's `slots`. Adapters are small beside their blocks."""
        return ADAPTER_SLOTS if any(self._model.groups[i].adapter for i in groups) else slots

    def _grad_ring(self, region: Region, name: str, groups: list[int]) -> None:
        """Append the same for gradients."""
        largest = max((self._groups[i].part_bytes("grad") for i in groups), default=0)
        num_bytes = align(largest) * min(self._num_parts(groups), self._at_most(groups, self._plan.grad_slots))
        self._sizes.places.add_gradient_ring(self._sizes, region, name, groups, num_bytes)

    def _num_parts(self, groups: list[int]) -> int:
        return sum(len(self._groups[i].parts) for i in groups)

    def _activation_slots(self, region: Region) -> None:
        sizes, chunks = self._sizes, range(self._plan.num_chunks)
        hidden_bytes = sizes.either_hidden_bytes if sizes.segments.by_chunk else sizes.hidden_bytes
        for k in range(sizes.num_hidden_slots):
            region.add("hidden", hidden_bytes, "hidden states", index=k)
        for k in range(sizes.places.head_inputs(self._plan)):
            region.add("head_input", sizes.hidden_bytes, "hidden states", index=k)
        carried = max(p.carry_bytes for p in sizes.all_programs)
        for k in range(sizes.num_hidden_gradients):
            region.add("grad_hidden", sizes.hidden_grad_bytes, "hidden states", index=k)
            if carried:
                region.add("carry", carried, "hidden states", index=k)
        bounds = max(p.bounds_bytes for p in sizes.all_programs)
        for c in chunks if bounds else ():
            region.add("bounds", bounds, "hidden states", index=c)
        staged = max(p.save_host_bytes for p in sizes.programs)
        for k in range(self._plan.save_slots if staged else 0):
            region.add("save_host", staged, "offload slots", index=k)
        self._kept_activations(region)
        self._window_slots(region)
        region.add("scratch", sizes.scratch_bytes, "scratch")

    def _kept_activations(self, region: Region) -> None:
        for layer, (kept, program) in enumerate(zip(self._plan.layers, self._sizes.programs, strict=True)):
            if not (self._model.layers[layer].keeps and self._sizes.trains(layer)):
                continue
            for c in range(self._sizes.kept_chunks):
                if kept.input_home == "gpu":
                    key = self._sizes.segments.key_of_input(layer, c)
                    region.add_once(key, self._sizes.hidden_bytes, "kept activations", self._sizes.hidden_bytes)
                if num_bytes := program.save_gpu_bytes:
                    key = self._sizes.segments.key_of_saved("save_gpu", layer, c, "gpu", num_bytes)
                    region.add_once(key, num_bytes, "kept activations", self._sizes.most_saved(layer)[0])

    def _window_slots(self, region: Region) -> None:
        """Append slots for what layers in work carry along a sliced sequence, as large as the largest layer's."""
        if self._sizes.window_rows:
            layers = [i for i, layer in enumerate(self._model.layers) if layer.kind == "block"]
            windows = [self._sizes.window_of(layer) for layer in layers]
            for k in range(self._plan.window_slots):
                region.add("window", max(w.num_bytes for w in windows), "key/value window", index=k)
            for k in range(self._plan.window_slots):
                region.add("grad_window", max(w.grad_bytes for w in windows), "key/value window", index=k)
