"""Which outputs of a layer's ops can be kept from forward to backward, and which ops run again for the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from flexengine.ops.base import Op
from flexengine.ops.joined import Joined


@lru_cache(maxsize=1024)
def savable_ops(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """Names of ops with an output that some backward reads: the only ones worth keeping."""
    needed, kept = {t for op in ops for t in (*op.needs_input, *op.needs_weight)}, set(keepable_ops(ops))
    return tuple(op.name for op in ops if op.name in kept and any(o.name in needed for o in op.outputs))


@lru_cache(maxsize=1024)
def keepable_ops(ops: tuple[Op, ...]) -> tuple[str, ...]:
    """Names of ops whose outputs can be kept: neither ops in parts, nor ops whose outputs these read, nor ops that say
    so.

    Backward recomputes what parts read once for all parts, in a stage of its own, and the stages after it do not have
    a chunk's kept outputs at hand.
    """
    read = read_by_parts(ops) | {name for op in ops if op.num_parts > 1 for name in op.inputs}
    keepable = (op for op in ops if op.num_parts == 1 and op.keepable)
    return tuple(op.name for op in keepable if not any(o.name in read for o in op.outputs))


@lru_cache(maxsize=1024)
def read_by_parts(ops: tuple[Op, ...]) -> frozenset[str]:
    """Tensors of other ops that backward of ops in parts reads, also to recompute those ops' own outputs."""
    producer = {spec.name: op for op in ops if op.num_parts > 1 for spec in op.outputs}
    waiting = [name for op in ops if op.num_parts > 1 for name in (*op.needs_input, *op.needs_weight)]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += producer[name].inputs if name in producer else ()
    return frozenset(found - set(producer))


def save_sets(ops: tuple[Op, ...]) -> list[tuple[str, ...]]:
    """Every subset of the savable ops, the empty one first."""
    names = savable_ops(ops)
    return [subset for count in range(len(names) + 1) for subset in combinations(names, count)]


def makers(name: str, producer: Mapping[str, Op], at_hand: set[str]) -> Iterator[Op]:
    """Ops to run, in order, for a tensor to be at hand; `producer` makes each tensor. Adds to `at_hand` what they make.

    at_hand: tensors that are there.
    """
    if name not in at_hand:
        op = producer[name]
        for source in op.inputs:
            yield from makers(source, producer, at_hand)
        yield op
        at_hand.update(output.name for output in op.outputs)


def in_pairs(ops: Iterable[Op], again: bool = False) -> list[Op]:
    """Ops that forward runs, two as one where they can be. again: in backward, for which ops that it alone needs run by
    themselves."""
    found: list[Op] = []
    for op in ops:
        both = found[-1].with_next(op) if found and not (again and found[-1].for_backward) else None
        if both is not None:
            found[-1] = both
        else:
            found.append(op.alone())
    return found


class Halves(NamedTuple):
    """What backward runs together: the input half of one op, or of several as one; and these ops, whose weight halves
    follow."""

    input: Op | None
    ops: tuple[Op, ...]

    @property
    def weight(self) -> tuple[Op, ...]:
        """The ops that have weight halves."""
        return tuple(op for op in self.ops if op.has_weight_half)

    @property
    def needs(self) -> tuple[str, ...]:
        """The tensors that all of them read."""
        return tuple(name for op in self.ops for name in (*op.needs_input, *op.needs_weight))


def halves_of(ops: tuple[Op, ...]) -> Iterator[Halves]:
    """The halves of backward, last op first."""
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        together, first = [op], op
        while waiting and op.has_input_half:
            wider = waiting[-1].with_next(first)
            if wider is None or not wider.has_input_half:
                break
            together.append(waiting.pop())
            first = wider
        yield Halves(None if not op.has_input_half else op.alone() if first is op else first, tuple(together))


@lru_cache(maxsize=1024)
def remade(ops: tuple[Op, ...]) -> frozenset[str]:
    """Tensors that an input half writes again for weight halves alone. Where they are not kept, backward does not
    recompute them, but for what input halves read (`needed_by_input_halves`)."""
    read = {name for op in ops for name in op.needs_input}
    wanted = {name for op in ops if op.has_weight_half for name in op.needs_weight} - read
    return frozenset(name for op in ops if op.has_input_half for name in op.remakable if name in wanted)


def leaving_out(op: Op, unread: frozenset[str]) -> Op:
    """An op where nothing reads these tensors."""
    return op.leaving_out(unread) if isinstance(op, Joined) else op


def without_unread(ops: Sequence[Op], later: Sequence[Op], names: Iterable[str]) -> list[Op]:
    """The ops of a forward, which leave out those of these tensors that neither they nor later ones read."""
    read = {name for op in (*ops, *later) for name in (*op.inputs, *op.part_inputs)}
    return [leaving_out(op, frozenset(names) - read) for op in ops]


def needed_by_backward(ops: tuple[Op, ...]) -> list[str]:
    """Names of the tensors that the backwards of a layer's ops read, in their order."""
    return [name for op in reversed(ops) for name in (*op.needs_input, *op.needs_weight)]


def needed_by_input_halves(ops: tuple[Op, ...]) -> list[str]:
    """Names of the tensors that input halves read, in the order of backward."""
    return [name for op in reversed(ops) for name in op.needs_input]


def needed_by_window(ops: tuple[Op, ...]) -> list[str]:
    """Names of the tensors that the key/value window of a sliced sequence is filled from."""
    return [name for op in ops if op.carried for name in op.inputs]


def recomputed(ops: tuple[Op, ...], layer_input: str | None, kept: tuple[str, ...]) -> list[str]:
    """Names of the ops whose forward runs again in a backward that finds the outputs of the ops named in `kept`."""
    producer = {output.name: op for op in ops for output in op.outputs}
    at_hand = {layer_input or "", *(output.name for op in ops if op.name in kept for output in op.kept_outputs)}
    if written := remade(ops):  # an op between the writer and the weight half may be recomputed from it
        made, early = set(at_hand), needed_by_input_halves(ops)
        again = {output.name for name in early for op in makers(name, producer, made) for output in op.outputs}
        at_hand |= written - again
    return [op.name for name in needed_by_backward(ops) for op in makers(name, producer, at_hand)]
