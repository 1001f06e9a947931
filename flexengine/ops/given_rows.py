"""Rows that a tower gives to tokens of one kind: in the place of those of the embedding, and added behind blocks.

A tower is what makes rows of the hidden state from something that is no text. Its parameters are the embedding
layer's. It runs when the first chunk asks for rows of a call, and its backward, which runs it again, when all rows of
the call have their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import Op, OpEnv, TensorSpec, Work
from flexengine.ops.opaque import OpaqueLinear

Columns = Mapping[str, Tensor]
"""What a tower reads of a batch, by the names that a processor of transformers gives."""
AddGrad = Callable[[str, Tensor], object]
"""Takes the gradient of a weight, by its name."""


class TowerCall(NamedTuple):
    """Columns that a tower reads at once, and how many rows it gives for them."""

    columns: Columns
    rows: int


class Tower(Protocol):
    """What makes rows from columns of a batch. It knows nothing of where its weights lie."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what it reads, of which the first must be there."""
        ...

    def example(self, rows: int) -> Columns:
        """Columns of one thing, or of equal ones, that give at least so many rows."""
        ...

    @property
    def linears(self) -> tuple[OpaqueLinear, ...]:
        """Its linear layers that may have adapters."""
        ...

    def adapted(self, adapters: Sequence[Adapters]) -> Tower:
        """The same, whose linear layers of these names have adapters. They add where A and B are among the weights."""
        ...

    def calls(self, columns: Columns, borders: Collection[int] = ()) -> list[TowerCall]:
        """Divide a batch's columns into those of single calls, in order.

        borders: numbers of rows before which a call ends, where a thing does.
        Raises: ValueError for columns that do not go together, or for one thing of more rows than a call may have.
        """
        ...

    def positions(self, ids: Sequence[Tensor], columns: Columns) -> list[Tensor]:
        """Positions [axes, T] of sequences of these tokens, where positions have several axes.

        Raises: ValueError where tokens and columns do not go together.
        """
        ...

    def __call__(self, weights: Mapping[str, Tensor], columns: Columns) -> Tensor:
        """The rows [depth, n, D] of a call, where the weights are."""
        ...

    def backward(
        self, weights: Mapping[str, Tensor], trained: Sequence[str], columns: Columns, grads: Tensor, add: AddGrad
    ) -> None:
        """Run a call again, and give `add` the gradients of the trained weights for those of its rows."""
        ...


class TowerCost(NamedTuple):
    """What rows cost: most device bytes of a call beside its weights, work of a row forward, and of one backward."""

    peak_bytes: int
    forward: Work
    backward: Work


@dataclass(frozen=True)
class GivenRows:
    """Which tokens get their rows from a tower, and how many a batch may have of them.

    token_id: the token that stands for a row. name: what people call its things, for messages. max_tokens: most such
    tokens of a batch; share: the share of a full batch's tokens that these are. cost_of: what rows of a tower cost
    where these parameters are trained. row_bytes: of columns on the host for a row. depth: rows for a token: that of
    the embedding, and what is added behind each of the first blocks. num_axes: axes that positions have. block_rows: of
    a typical thing whose tokens see each other; 0: they see no later ones.
    """

    name: str
    token_id: int
    max_tokens: int
    share: float
    tower: Tower
    cost_of: Callable[[Tower, tuple[str, ...]], TowerCost]
    row_bytes: int
    depth: int = 1
    num_axes: int = 1
    block_rows: int = 0

    @property
    def column_bytes(self) -> int:
        """Host bytes of the columns of the largest batch."""
        return self.max_tokens * self.row_bytes

    def cost(self, trained: tuple[str, ...]) -> TowerCost:
        """What rows cost where these parameters are trained."""
        return self.cost_of(self.tower, trained)


def placing(ops: Iterable[Op]) -> PlaceRows:
    """The op of an embedding layer that places rows."""
    return next(op for op in ops if isinstance(op, PlaceRows))


class PlaceRows(Op):
    """y <- y with rows of a tower for tokens that stand for them, of which the embedding gets no gradient.

    weights: names of the tower's parameters. Backward computes with them, and so they are there.
    """

    adapters: tuple[Adapters, ...] = ()

    def __init__(self, x: str, y: str, width: int, given: GivenRows, weights: tuple[str, ...]) -> None:
        self.name, self.x, self.y, self.width, self.given = "place_rows", x, y, width, given
        self.inputs, self.outputs, self.in_place = (x,), (TensorSpec(y, (width,)),), (x, y)
        self.grad_inputs, self.params, self.weights = (x,), weights, weights

    @property
    def cost(self) -> TowerCost:
        """What rows cost."""
        return self.given.cost(self.params if self.has_weight_half else ())

    @property
    def linears(self) -> tuple[OpaqueLinear, ...]:
        """The tower's linear layers that may have adapters."""
        return self.given.tower.linears

    def adapted(self, adapters: Sequence[Adapters]) -> Self:
        """The same op whose tower's linear layers of these names have adapters, as parameters beside its own."""
        given = replace(self.given, tower=self.given.tower.adapted(adapters))
        names = (*self.weights, *(name for one in adapters for name in one.params))
        return self.changed(given=given, adapters=tuple(adapters), params=names, weights=names)

    @property
    def backward_params(self) -> tuple[str, ...]:
        """Parameters that backward reads."""
        return self.weights if self.has_weight_half else ()

    def training(self, params: tuple[str, ...]) -> Self:
        """The same op of whose parameters these alone are trained."""
        return (self if params else self.untrained()).changed(params=params)

    def forward(self, env: OpEnv) -> None:
        if env.chunk.given is not None:
            rows, y = env.chunk.given, env.t[self.y]
            added = {name for one in self.adapters for name in one.params} if not env.adapters else ()
            rows.store.make({name: p for name, p in env.p.items() if name not in added}, rows.pieces)
            y.index_copy_(0, rows.at, rows.values(0, y.device))

    def backward_input(self, env: OpEnv) -> None:
        rows, grad, trained = env.chunk.given, env.g[self.x], self.params if self.has_weight_half else ()
        if env.first:
            for name in trained:
                env.gp[name].zero_()
        if rows is None:
            return
        if trained:
            rows.take(0, grad)
        grad.index_fill_(0, rows.at, 0.0)
        if trained:
            rows.store.backward(env.p, rows.pieces, trained, lambda name, found: env.gp[name].add_(found))

    def backward_weight(self, env: OpEnv) -> None:
        """Do nothing: the tower's backward gave both halves."""

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        # kernels of a call are launched for many rows at once, which the work of a row does not tell
        placed = tokens * self.given.share
        copies = Work(memory_bytes=2.0 * placed * self.given.depth * self.width * compute_bytes, kernels=1)
        return copies.plus(self.cost.forward.times(placed))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        placed = tokens * self.given.share
        zeros = Work(memory_bytes=1.0 * placed * self.width * compute_bytes, kernels=1)
        return zeros.plus(self.cost.backward.times(placed)) if self.has_weight_half else zeros

    def model_flops(self, seq_len: int) -> float:
        return 0.0  # what a text of this length takes; images are not known by its length: see `flops_of_rows`

    def flops_of_rows(self, count: int) -> float:
        """FLOPs of the tower's forward, and of its backward without running it again, for so many rows."""
        forward = self.cost.forward.flops
        # layers run once more in each of the two forwards that backward takes beside the first one
        gradients = max(0.0, self.cost.backward.flops - 2 * forward) if self.has_weight_half else 0.0
        return count * (forward + gradients)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return self.cost.peak_bytes + _placed_bytes(self.given, tokens, self.width, compute_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return self.workspace_bytes(tokens, compute_bytes)


class AddRows(Op):
    """y <- y + the rows of one depth, for tokens that stand for rows. The gradient of x is that of y."""

    replays = False

    def __init__(self, x: str, y: str, width: int, given: GivenRows, depth: int) -> None:
        self.name, self.x, self.y, self.width, self.given, self.depth = "add_rows", x, y, width, given, depth
        self.inputs, self.outputs, self.in_place = (x,), (TensorSpec(y, (width,)),), (x, y)
        self.grad_inputs = (x,)

    def forward(self, env: OpEnv) -> None:
        if env.chunk.given is not None:
            rows, y = env.chunk.given, env.t[self.y]
            y.index_add_(0, rows.at, rows.values(self.depth, y.device))

    def backward_input(self, env: OpEnv) -> None:
        if env.chunk.given is not None and env.chunk.given.store.trained:
            env.chunk.given.take(self.depth, env.g[self.x])

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=4.0 * tokens * self.given.share * self.width * compute_bytes, kernels=2)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return _placed_bytes(self.given, tokens, self.width, compute_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return self.workspace_bytes(tokens, compute_bytes)


def _placed_bytes(given: GivenRows, tokens: int, width: int, compute_bytes: int) -> int:
    """Bytes of a chunk's rows on the device, twice: as they come in pieces, and as one."""
    return 2 * min(tokens, given.max_tokens) * width * compute_bytes
