"""What every plan of a request must compute, hold and move, by chunk and round size: the numbers of the speed of light.

Bytes are those of the tensors, without padding; seconds are those of the cost model, without waiting.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import GroupSpec, LayerSpec, ModelSpec
from flexengine.ops.base import Op, Work
from flexengine.ops.joined import Joined
from flexengine.plan import Numerics, Request
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.memory import GPU_SLACK_BYTES
from flexengine.planner.cost.save_sets import Keeping, lower_hull, save_choices, totals
from flexengine.schedule.group_storage import DTYPE_BYTES, group_storage
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import LayerProgram
from flexengine.schedule.packing import full_round, full_rounds, rounds_per_step
from flexengine.schedule.save_sets import halves_of, in_pairs, leaving_out, recomputed, savable_ops
from flexengine.schedule.stored_pieces import total_work
from flexengine.schedule.window import window_places


@dataclass(frozen=True)
class ParameterBytes:
    """All parameter groups of one slot class that are treated alike: bytes of their planes, a rank's share of states.

    twice: a layer reads their weights forward and backward, so that a round needs them twice. head: the head reads
    them. trained: they have gradients and are updated.
    """

    name: str
    weights: int
    grads: int
    states: int
    twice: bool
    head: bool
    trained: bool

    @property
    def touched(self) -> int:
        """Bytes that an update reads and writes."""
        return 2 * (self.weights + self.states) + self.grads if self.trained else 0


@dataclass(frozen=True)
class BlockKind:
    """Blocks with the same ops: how many, and for one of them, over a step, the bytes of its inputs and its choices.

    again_s: seconds for which its input need not be kept, as another such block runs forward again; None where it must.
    """

    count: int
    input_bytes: float
    keeps: tuple[Keeping, ...]
    again_s: float | None = None


class Unavoidable:
    """The numbers that hold for all sizes of one model, request and machine."""

    def __init__(self, model: ModelSpec, request: Request, profile: HardwareProfile) -> None:
        self.model, self.request, self.profile = model, request, profile
        self.compute_bytes = DTYPE_BYTES[request.numerics.compute]
        self._chunk_work: dict[tuple[tuple[Op, ...], int, int], np.ndarray] = {}

    @cached_property
    def parameters(self) -> tuple[ParameterBytes, ...]:
        """Groups of parameters by slot class, trained or not, and read by a block's backward or not."""
        twice = {group for block in self.model.blocks if block.has_backward for group in block.groups}
        classes: dict[tuple[str, bool, bool], list[int]] = {}
        for index, group in enumerate(self.model.groups):
            classes.setdefault((group.slot_class, not group.frozen, index in twice), []).append(index)
        return tuple(self._parameter_bytes(*key, members) for key, members in classes.items())

    def _parameter_bytes(self, slot_class: str, trained: bool, twice: bool, members: list[int]) -> ParameterBytes:
        planes = Counter[str]()
        for index in members:
            planes.update(plane_bytes(self.model.groups[index], self.request.numerics))
        head = bool(set(members) & set(self.model.layers[-1].groups))
        states = sum(num for kind, num in planes.items() if kind not in ("weights", "grad")) // self.request.ranks
        name = slot_class if trained else f"{slot_class} frozen{' twice' if twice else ''}"
        grads = 0 if self.request.gpu_updates == "unstored" else planes["grad"]
        return ParameterBytes(name, planes["weights"], grads, states, twice, head, trained)

    @cached_property
    def layer_counts(self) -> tuple[tuple[LayerSpec, int], ...]:
        """One layer of each sort, and how many there are."""
        first = {(layer.kind, layer.ops): layer for layer in reversed(self.model.layers)}
        counts = Counter((layer.kind, layer.ops) for layer in self.model.layers)
        return tuple((first[key], count) for key, count in counts.items())

    @cached_property
    def stored_gradients(self) -> tuple[int, int, int]:
        """(elements, bytes, number) of the gradients that layers store in a round."""
        read = (self.model.groups[g] for layer in self.model.layers for g in layer.groups)
        stored = [group for group in read if not group.frozen]
        grads = sum(plane_bytes(group, self.request.numerics)["grad"] for group in stored)
        return sum(group.numel for group in stored), grads, len(stored)

    @cached_property
    def decoding(self) -> tuple[Work, Work]:
        """Work of a round that decodes weights in fewer bytes, forward and backward.

        What the last block has decoded in forward may still be there in backward.
        """
        blocks = self.model.blocks
        forward = total_work(self._decode_work(block) for block in blocks)
        return forward, total_work(self._decode_work(block) for block in blocks[:-1] if block.has_backward)

    def _decode_work(self, layer: LayerSpec) -> Work:
        storages = (group_storage(self.model.groups[group], self.request.numerics).decoded for group in layer.groups)
        return total_work(stored.decode_work(self.compute_bytes) for stored in storages if stored is not None)

    def work(self, ops: tuple[Op, ...], tokens: int, seq_len: int) -> np.ndarray:
        """[ops + 2, kinds of work] of a chunk: forward of every op, what it saves where two are one, and in the last
        row backward of all."""
        key = (ops, tokens, seq_len)
        if key not in self._chunk_work:
            sizes = (tokens, seq_len, self.compute_bytes)
            halves = list(halves_of(ops))[::-1]
            backward = [Work(), *(each.input.backward_input_work(*sizes) for each in halves if each.input is not None)]
            backward += [op.backward_weight_work(*sizes) for each in halves for op in each.weight[::-1]]
            rows = [*(op.forward_work(*sizes) for op in ops), _saved_forward(ops, sizes), np.sum(backward, axis=0)]
            self._chunk_work[key] = np.array(rows)
        return self._chunk_work[key]


class SizeWork:
    """A step in chunks of `chunk_tokens` tokens, `chunks_per_round` to a round."""

    def __init__(self, step: Unavoidable, chunk_tokens: int, chunks_per_round: int) -> None:
        self.step, self.chunk_tokens = step, chunk_tokens
        self.shape = full_round(step.request, chunk_tokens, chunks_per_round)
        self.rounds, self.full_rounds = rounds_per_step(step.request, self.shape), full_rounds(step.request, self.shape)
        self.cost = CostModel.of(step.request, step.profile, chunk_tokens)

    @property
    def first_share(self) -> float:
        """Of a full round, what the step's first one has."""
        return min(1.0, self.full_rounds)

    @property
    def round_share(self) -> float:
        """The least part of a step's tokens that its largest round has: a long sequence is never split."""
        batch = self.step.request.max_global_batch_tokens
        whole = self.step.request.max_seq_len if self.shape.chunks[0].is_slice else 0
        return min(1.0, max(1 / self.rounds, whole / batch))

    @cached_property
    def compute_s(self) -> float:
        """Seconds of forward, backward, gradients and update of a step, without recomputation."""
        layers_s = sum(count * self._layer_s(layer) for layer, count in self.step.layer_counts)
        decode_s = sum(map(self.cost.work_s, self.step.decoding))
        return (layers_s + decode_s) * self.full_rounds + self._gradient_s() + self.update_s

    @property
    def norm_s(self) -> float:
        """Seconds that a run for the norm computes, where the round runs twice; else 0."""
        return self.compute_s - self.update_s if self.step.request.norm_first else 0.0

    def _layer_s(self, layer: LayerSpec) -> float:
        """Forward and backward of a layer in a round; the head's forward is what its backward recomputes."""
        work, runs = self._round_work(layer.ops), _forward_ops(layer)
        if layer.kind == "head":
            again = recomputed(layer.ops, layer.input, ())
            runs = [i for i in runs if layer.ops[i].name in again]
            return self._seconds(work[runs].sum(axis=0) + work[-1])
        return self._seconds(work[runs].sum(axis=0) - work[-2] + work[-1])

    @cached_property
    def forward_s(self) -> float:
        """Forward of a full round up to its head."""
        layers = [(layer, count) for layer, count in self.step.layer_counts if layer.kind != "head"]
        layers_s = sum(count * self._forward_s(layer) for layer, count in layers)
        return layers_s + self.cost.work_s(self.step.decoding[0])

    def _forward_s(self, layer: LayerSpec) -> float:
        """Forward of a layer in a round that keeps nothing."""
        work = self._round_work(layer.ops)
        return self._seconds(work[_forward_ops(layer)].sum(axis=0) - work[-2])

    @cached_property
    def head_s(self) -> float:
        """The head of a full round."""
        return sum(count * self._layer_s(layer) for layer, count in self.step.layer_counts if layer.kind == "head")

    def _round_work(self, ops: tuple[Op, ...]) -> np.ndarray:
        chunks = Counter((c.tokens, c.seq_len) for c in self.shape.chunks)
        return np.sum([n * self.step.work(ops, tokens, length) for (tokens, length), n in chunks.items()], axis=0)

    def _seconds(self, work: np.ndarray) -> float:
        return self.cost.work_s(Work(*work.tolist()))

    def _gradient_s(self) -> float:
        """Accumulators are rounded into stored gradients, once per round and layer, earlier ones read and added."""
        numel, grads, layers = self.step.stored_gradients
        moved = self.rounds * numel * self.cost.acc_bytes + (2 * self.rounds - 1) * grads
        return self.cost.work_s(Work(memory_bytes=float(moved), kernels=2 * self.rounds * layers))

    @cached_property
    def update_s(self) -> float:
        """The update of all parameters by the GPU."""
        return sum(self.update_s_of(p) for p in self.step.parameters)

    def update_s_of(self, parameters: ParameterBytes) -> float:
        """The update of some by the GPU, which reads all planes and writes all but the gradients."""
        return self.cost.work_s(Work(memory_bytes=float(parameters.touched) / self.cost.ranks))

    def cpu_update_s_of(self, parameters: ParameterBytes) -> float:
        """The same by the CPU, with an idle link."""
        return parameters.touched / self.step.profile.host.adamw_bytes_per_s(self.step.request.numerics.cpu_update)

    # -- what blocks keep ----------------------------------------------------------------------------------------------

    @cached_property
    def blocks(self) -> tuple[BlockKind, ...]:
        """The blocks that have a backward, by their ops."""
        tokens = self.step.request.max_global_batch_tokens
        blocks = [(layer, count) for layer, count in self.step.layer_counts if layer.keeps]
        inputs = float(self.step.model.hidden.num_bytes(tokens, self.step.compute_bytes))
        return tuple(BlockKind(count, inputs, self._keeps(block), self._again_s(blocks)) for block, count in blocks)

    def _again_s(self, blocks: list[tuple[LayerSpec, int]]) -> float | None:
        """Seconds of a step to run the shortest block forward again, which may then keep all until its own backward."""
        if not self.step.request.may_make_inputs_again:
            return None
        return self.full_rounds * min(self._forward_s(block) for block, _ in blocks)

    def _keeps(self, block: LayerSpec) -> tuple[Keeping, ...]:
        """The lower convex hull of (bytes, recompute seconds) over all save sets that the request allows."""
        kept, again, _ = save_choices(block.ops, block.input)
        if self.step.request.recompute == "full":
            kept, again = kept[:, :1], again[:, :1]
        *rows, saved, _ = self._round_work(block.ops)
        seconds = [self._seconds(row) * self.full_rounds for row in rows]
        # What ops as one save in forward they may save again where they are recomputed.
        joined = any(isinstance(op, Joined) for op in in_pairs(block.ops))
        spared = self._seconds(saved) * self.full_rounds if joined else 0.0
        sizes = [self._output_bytes(op) * self.full_rounds for op in block.ops]
        hull = lower_hull(_ever_faster(totals(sizes, kept), np.maximum(totals(seconds, again) - spared, 0.0)))
        return hull[-1:] if self.step.request.recompute == "none" else hull

    def _output_bytes(self, op: Op) -> int:
        """Bytes that are kept of an op in a round."""
        chunks, width = Counter(c.tokens for c in self.shape.chunks), self.step.compute_bytes
        return sum(n * output.num_bytes(tokens, width) for tokens, n in chunks.items() for output in op.kept_outputs)

    # -- GPU bytes that must be there ----------------------------------------------------------------------------------

    @property
    def gpu_overhead_bytes(self) -> int:
        """GPU bytes of the process beside the arena."""
        profile = self.step.profile
        if profile.device_type != "cuda":
            return 0
        ops = (op for layer, _ in self.step.layer_counts for op in layer.ops)
        workspace = max(op.workspace_bytes(self.chunk_tokens, self.step.compute_bytes) for op in ops)
        return profile.memory.gpu_context_bytes + GPU_SLACK_BYTES + workspace

    @property
    def head_bytes(self) -> int:
        """Operands of the head beside its weights: accumulators, a chunk's states and their gradient, one op's
        buffers."""
        head = self.step.model.layers[-1]
        program = compile_layer(head, (), (), self._largest_chunk, self.step.compute_bytes)
        hidden = self.step.model.hidden.num_bytes(self._largest_chunk, self.step.compute_bytes)
        return self._accumulator_bytes(head) + hidden + self._hidden_grad_bytes + self._widest_step(program)

    @property
    def block_bytes(self) -> int:
        """Operands of the last block's backward, if there is one: accumulators, decoded weights, a chunk's gradient,
        one op's buffers, the key/value window."""
        block, width = self.step.model.blocks[-1], self.step.compute_bytes
        if not block.has_backward:
            return 0
        program = compile_layer(block, savable_ops(block.ops), (), self._largest_chunk, width)
        window = 0
        if self.shape.chunks[0].is_slice:
            window = window_places(block.ops, self.step.request.max_seq_len, self.chunk_tokens, width).total_bytes
        operands = self._accumulator_bytes(block) + self._decoded_bytes(block) + self._hidden_grad_bytes
        return operands + window + self._widest_step(program)

    def _decoded_bytes(self, layer: LayerSpec) -> int:
        """Bytes of a part of a layer's weights in the compute dtype, where they are stored in fewer bytes."""
        numerics = self.step.request.numerics
        storages = (group_storage(self.step.model.groups[group], numerics) for group in layer.groups)
        return sum(s.part_numel for s in storages if s.decoded is not None) * self.step.compute_bytes

    def _accumulator_bytes(self, layer: LayerSpec) -> int:
        groups = (self.step.model.groups[g] for g in layer.groups)
        numerics = self.step.request.numerics
        return sum(group_storage(g, numerics).part_numel for g in groups if not g.frozen) * self.cost.acc_bytes

    @property
    def _largest_chunk(self) -> int:
        return max(c.tokens for c in self.shape.chunks)

    @property
    def _hidden_grad_bytes(self) -> int:
        return self.step.model.hidden_rows.num_bytes(self._largest_chunk, self.step.compute_bytes)

    def _widest_step(self, program: LayerProgram) -> int:
        """Scratch bytes of the op call in backward that has the most operands there, whatever else is kept."""
        widest = 0
        for step in program.backward:
            if not step.recompute:
                sizes: dict[int, int] = {}
                for _, place in (*step.tensors, *step.grads):
                    if place.area == "scratch":
                        num_bytes = place.spec.num_bytes(self._largest_chunk, self.step.compute_bytes)
                        sizes[place.offset] = max(sizes.get(place.offset, 0), num_bytes)
                widest = max(widest, sum(sizes.values()))
        return widest


@lru_cache(maxsize=4096)
def plane_bytes(group: GroupSpec, numerics: Numerics) -> Counter[str]:
    """Bytes of a group's planes by kind, without padding."""
    planes, stored = Counter[str](), group_storage(group, numerics)
    for segment in stored.segments:
        for plane in segment.planes:
            planes[plane.kind] += plane.num_bytes(segment.numel)
    if stored.stored is not None:
        planes["weights"] += sum(piece.total_bytes for piece in stored.stored.pieces)
    return planes


def _ever_faster(num_bytes: np.ndarray, seconds: np.ndarray) -> list[Keeping]:
    """Of many choices those that recompute for less time than all of fewer bytes: others are on no hull."""
    order = np.lexsort((seconds, num_bytes))
    num_bytes, seconds = num_bytes[order], seconds[order]
    faster = seconds < np.concatenate(([np.inf], np.minimum.accumulate(seconds)[:-1]))
    return list(map(Keeping, num_bytes[faster].tolist(), seconds[faster].tolist()))


def _saved_forward(ops: tuple[Op, ...], sizes: tuple[int, int, int]) -> np.ndarray:
    """Work that forward of ops by themselves has beyond that of those two as one that leave out what they can."""
    alone = [op for op in ops if not op.for_backward]
    left_out = frozenset(spec.name for op in ops for spec in op.outputs)
    together = [leaving_out(op, left_out) for op in in_pairs(alone)]
    found, wanted = (np.sum([op.forward_work(*sizes) for op in each], axis=0) for each in (alone, together))
    return np.maximum(found - wanted, 0.0)


def _forward_ops(layer: LayerSpec) -> list[int]:
    """Places of the ops that forward runs in any case: all but those that backward alone needs."""
    return [i for i, op in enumerate(layer.ops) if not op.for_backward]
