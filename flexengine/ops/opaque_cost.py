"""What a call of an opaque block costs: FLOPs, traffic and memory, counted on tensors without storage.

A call is traced at lengths that are powers of two. What lies between them lies on lines between these: time and memory
of a layer grow at most with the square of the length, and a line between two points of such a curve is above it.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from flexengine.ops.base import Work

TRACED_BYTES = 2
"""Bytes of an element of what is traced: bfloat16, which all functions take. Wider ones take more in proportion."""
SHORTEST, LONGEST = 16, 4096
"""Lengths that are traced; beyond the longest one a parabola through the last three goes on."""
LONGEST_LOOP = 128
"""The longest one of layers that go from token to token, which take as many calls as there are tokens."""
STEP = 256
"""Tokens to whose multiples scans pad a sequence, at the most."""
LARGE = 1 << 14
"""Elements of tensors of floats beyond which `traced` computes none."""
ALLOCATION_BYTES = 64
"""The allocator's granularity on the CPU."""

TracedCall = Callable[[dict[str, Tensor], Tensor], Tensor]
"""(weights by name, x [T, D]) -> y, on the meta device."""


class CallCost(NamedTuple):
    """Work of a call's forward and of its backward, which begins with another forward; most bytes that either takes."""

    forward: Work
    backward: Work
    peak_bytes: int

    def combined(self, other: CallCost, share: float) -> CallCost:
        """The sum of this and `share` of another."""
        return CallCost(
            self.forward.plus(other.forward.times(share)),
            self.backward.plus(other.backward.times(share)),
            int(self.peak_bytes + share * other.peak_bytes),
        )


class CostCurve:
    """Costs of calls by length. traced: gives that of so many sequences of a length, in elements of TRACED_BYTES.

    longest: tokens of the longest sequence that the model has positions for; of more tokens there are more calls.
    """

    def __init__(
        self, traced: Callable[[int, int], CallCost], longest: int | None = None, sequences: int = 1,
        of_one: CostCurve | None = None,
    ) -> None:  # fmt: skip
        self._traced = lru_cache(maxsize=None)(lambda tokens: traced(tokens, sequences))
        self._limit, self._of_one = longest or sys.maxsize, of_one
        self._of_more = lru_cache(maxsize=None)(lambda count: CostCurve(traced, longest, count, self))

    def at(self, tokens: int, compute_bytes: int, sequences: int = 1) -> CallCost:
        """The cost of a call on sequences of so many tokens each, where an element takes compute_bytes."""
        if sequences > 1:
            return self._of_more(sequences).at(tokens, compute_bytes)
        found, padded = self._between(tokens), self._between(self._padded(tokens))
        wider = compute_bytes / TRACED_BYTES
        forward, backward = (w._replace(memory_bytes=wider * w.memory_bytes) for w in found[:2])
        return CallCost(forward, backward, math.ceil(max(1.0, wider) * padded.peak_bytes))

    @staticmethod
    def _padded(tokens: int) -> int:
        """A length whose memory is no less than that of any length up to `tokens`."""
        power = 1 << max(0, tokens - 1).bit_length()
        return min(tokens + STEP, max(power, SHORTEST))

    @cached_property
    def _longest(self) -> int:
        """The longest length that is traced, of one sequence or of several."""
        if self._of_one is not None:
            return self._of_one._longest
        lengths = (min(length, self._limit) for length in (SHORTEST, 2 * SHORTEST))
        short, double = (self._traced(length).forward.kernels for length in lengths)
        return min(LONGEST_LOOP if double > 1.5 * short else LONGEST, self._limit)

    def _between(self, tokens: int) -> CallCost:
        tokens = min(tokens, self._limit)
        if tokens > self._longest:
            return self._beyond(tokens)
        power = max(SHORTEST, 1 << (tokens - 1).bit_length())
        low, high = power // 2, min(power, self._limit)
        if tokens == high or tokens <= SHORTEST:
            return self._traced(high)
        share, nothing = (tokens - low) / (high - low), CallCost(Work(), Work(), 0)
        return nothing.combined(self._traced(low), 1.0 - share).combined(self._traced(high), share)

    def _beyond(self, tokens: int) -> CallCost:
        """Lagrange's parabola through three long lengths. Of short ones the gradients of weights are the peak, and of
        long ones what grows with them: a parabola through both sorts is far off."""
        lengths = [self._longest // 2, 3 * self._longest // 4, self._longest]
        total = CallCost(Work(), Work(), 0)
        for length in lengths:
            others = [other for other in lengths if other != length]
            share = math.prod((tokens - other) / (length - other) for other in others)
            total = total.combined(self._traced(length), share)
        return total


class TimedCall(NamedTuple):
    """A call as a machine ran it: tokens of each of its sequences, seconds of forward and backward, and most bytes
    taken (0: not known)."""

    tokens: int
    forward_s: float
    backward_s: float
    peak_bytes: int
    sequences: int = 1


class TimedCosts:
    """Costs of calls by length where one was timed: calls of other lengths take as much more as `curve` says.

    seconds: what the machine is taken to need for work; bytes_per_s: the rate of its memory.
    """

    def __init__(self, curve: CostCurve, call: TimedCall, seconds: Callable[[Work], float], bytes_per_s: float) -> None:
        self.curve, self.call, self._seconds, self._bytes_per_s = curve, call, seconds, bytes_per_s

    def at(self, tokens: int, compute_bytes: int, sequences: int = 1) -> CallCost:
        """The cost of a call on sequences of so many tokens each, where an element takes compute_bytes."""
        known = self.curve.at(self.call.tokens, compute_bytes, self.call.sequences)
        cost = self.curve.at(tokens, compute_bytes, sequences)
        return CallCost(
            self._timed(cost.forward, known.forward, self.call.forward_s),
            self._timed(cost.backward, known.backward, self.call.backward_s),
            math.ceil(cost.peak_bytes * max(1.0, self.call.peak_bytes / max(1, known.peak_bytes))),
        )

    def _timed(self, work: Work, known: Work, known_s: float) -> Work:
        seconds = known_s * self._seconds(work) / self._seconds(known)
        return Work(memory_bytes=seconds * self._bytes_per_s, timed_flops=work.flops)


def traced_call(
    call: TracedCall, shapes: Mapping[str, tuple[int, ...]], width: int, tokens: int, trained: Collection[str],
    device: str = "meta",
) -> CallCost:  # fmt: skip
    """Trace forward and backward of a call. shapes: of the weights. trained: the names of those that have gradients.

    On the meta device tensors have no storage. On the CPU, for calls that look at numbers, weights have one element's.
    """
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    if device == "meta":
        weights = {name: torch.empty(shape, **made) for name, shape in shapes.items()}
    else:
        weights = {name: torch.zeros((), **made).expand(shape) for name, shape in shapes.items()}
    wanted = [weight.requires_grad_() for name, weight in weights.items() if name in trained]
    x = torch.zeros(tokens, width, **made, requires_grad=True)
    with _Counted() as forward, torch.no_grad():
        call(weights, x)
    with _Counted() as both, torch.enable_grad():
        y = call(weights, x)
        grads = torch.autograd.grad(y, [x, *wanted], torch.empty_like(y), allow_unused=True)
    del y, grads
    return CallCost(forward.work(), both.work(), max(forward.peak_bytes, both.peak_bytes))


def traced(run: Callable[[], object]) -> tuple[Work, int]:
    """Trace what runs; returns its work, and most bytes that were alive at once.

    It runs on the CPU, for calls that look at numbers, but large tensors of floats are never computed.
    """
    with _Uncomputed(), _Counted() as counted:
        run()
    return counted.work(), counted.peak_bytes


class _Uncomputed(TorchDispatchMode):
    """Leaves large tensors of floats as the allocator gives them: their shapes are those that were computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or not (large := _large_on_meta(func, args, kwargs)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype) if isinstance(t, Tensor) else t, large[0])


def _large_on_meta(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What a call gives, without storage, where that is floats, and some of them or of what it reads are many.

    Empty where it is not: numbers that decide something are few, or no floats.
    """
    args, kwargs = tree_map(lambda v: v.to("meta") if isinstance(v, Tensor) else v, (args, kwargs))
    try:
        found = func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
    except (NotImplementedError, RuntimeError):  # its shape depends on numbers
        return []
    given, made = ([t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in ((args, kwargs), found))
    is_large = any(t.is_floating_point() and t.numel() > LARGE for t in (*given, *made))
    return [found] if is_large and all(t.is_floating_point() for t in made) else []


class _Counted:
    """Counts what runs inside: attention as the fused kernels that run it, everything else call by call."""

    def __init__(self) -> None:
        self._traffic = _Traffic()
        self._attention = _FusedAttention()

    def __enter__(self) -> _Counted:
        self._traffic.__enter__()
        self._attention.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._attention.__exit__(*error)
        self._traffic.__exit__(*error)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were alive at once."""
        return self._traffic.peak

    def work(self) -> Work:
        """What ran."""
        traffic, attention = self._traffic, self._attention
        return Work(
            matmul_flops=traffic.flops,
            attention_forward_flops=attention.forward_flops,
            attention_backward_flops=attention.backward_flops,
            memory_bytes=traffic.moved,
            kernels=traffic.kernels,
            grouped_flops=traffic.grouped_flops,
        )


class _Traffic(TorchDispatchMode):
    """Counts FLOPs of products, bytes of operands, calls, and the most bytes of storages alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.kernels = 0
        self.flops = self.grouped_flops = self.moved = 0.0
        self._seen: set[int] = set()

    def _free(self, size: int, key: int) -> None:
        self.live -= size
        self._seen.discard(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and not func.is_view and self._is_new(t)]
        packet = func._overloadpacket
        if packet is torch.ops.aten._grouped_mm:
            self.grouped_flops += _grouped_flops(*args)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        if made:
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.moved += sum(t.numel() * t.element_size() for t in (*read, *made))
            self.kernels += 1
        self.peak = max(self.peak, self.live)
        return out

    def _is_new(self, tensor: Tensor) -> bool:
        """Count a storage that was not seen before, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return False
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self._seen.add(key)
        self.live += size
        weakref.finalize(storage, self._free, size, key)
        return True


def _grouped_flops(a: Tensor, b: Tensor, *others: Any, **options: Any) -> float:
    """FLOPs of products of groups of rows of a [M, K] with matrices of b [E, K, N], or of a [M, K] and b [K, N]."""
    if a.dim() == 2:
        return 2.0 * a.shape[0] * a.shape[1] * b.shape[-1]
    return 2.0 * a.shape[-2] * a.shape[-1] * b.shape[-1]


class _FusedAttention:
    """Stands for kernels that make no matrix of scores, which is what runs; counts their FLOPs.

    It takes the function's place for its thread: a mode of torch would not see what backward recomputes.
    """

    def __init__(self) -> None:
        self.forward_flops = self.backward_flops = 0.0
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        self._own = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = self._count

    def __exit__(self, *error: Any) -> None:
        torch.nn.functional.scaled_dot_product_attention = self._own

    def _count(self, *args: Any, **kwargs: Any) -> Tensor:
        if threading.get_ident() != self._thread:
            return self._own(*args, **kwargs)
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        q, k, v = (named[name] for name in ("query", "key", "value"))
        pairs = math.prod(q.shape[:-1]) * k.shape[-2] * (0.5 if named.get("is_causal") else 1.0)
        self.forward_flops += 2.0 * pairs * (q.shape[-1] + v.shape[-1])
        return _Attention.apply(q, k, v, self, 2.0 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1]))


class _Attention(torch.autograd.Function):
    """An attention that computes nothing and has the tensors of one that does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, counts: _FusedAttention, flops: float) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        ctx.counts, ctx.flops = counts, flops
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.counts.backward_flops += ctx.flops
        q, k, v = ctx.saved_tensors[:3]
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None
