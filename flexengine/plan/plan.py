"""The Plan: every decision of the planner as a frozen value, JSON both ways, validating itself.

It stands alone: it imports nothing of the package, so planner and runtime meet here without knowing each other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from flexengine.plan.group_plan import GroupPlan
from flexengine.plan.prediction import CacheBytes, Prediction
from flexengine.plan.request import SHARES_DRIVE, TRANSPORTS, Numerics, Request, TransportName

Home = Literal["gpu", "host"]
DECIDED = ("graphs", "gpu_updates", "segment_blocks", "segments", "segment_order", "hidden_home")
"""Fields of a request that say in a plan's request what the planner decided."""
MOST_ROUNDED = 64
"""Rounds of a step whose sum in 16 bits is within 1% of the exact one: each rounds it again. Random gradients are off
by 0.95% after 64 rounds, 1.7% after 256 and 6.5% after 1024; gradients of one sign lose more."""


def rounds_of_step(longest: int, batch_tokens: int, chunk_tokens: int, chunks_per_round: int) -> int:
    """Count the rounds of a full step of sequences of `longest` tokens, which chunks take whole or rounds in slices."""
    if longest > chunk_tokens:
        sequences = chunks_per_round // -(-longest // chunk_tokens)
    else:
        sequences = chunks_per_round * (chunk_tokens // longest)
    return max(1, -(-batch_tokens // (max(1, sequences) * longest)))


@dataclass(frozen=True)
class LayerPlan:
    """What one layer keeps of every chunk from forward to backward.

    `keep_gpu` and `keep_host` name ops whose outputs are kept on the GPU or in host memory; what is in neither is
    recomputed. `input_home` says where the layer's input waits. input_again: it is not kept from forward; backward
    makes it again from the layer before, and it waits there only until then. on_drive: what would wait on the host from
    forward lies on a drive.
    """

    keep_gpu: tuple[str, ...] = ()
    keep_host: tuple[str, ...] = ()
    input_home: Home = "gpu"
    input_again: bool = False
    on_drive: bool = False

    def __post_init__(self) -> None:
        both = set(self.keep_gpu) & set(self.keep_host)
        if both:
            raise ValueError(f"ops {sorted(both)} are planned to be kept on the GPU and in host memory at once")
        if self.on_drive and not (self.keep_host or (self.input_home == "host" and not self.input_again)):
            raise ValueError("on_drive is about what a layer keeps on the host, and this one keeps nothing there")


@dataclass(frozen=True)
class Plan:
    """Every decision about one training step of one model under one request.

    Chunks hold up to `chunk_tokens` packed tokens; a round is up to `chunks_per_round` chunks. Slot counts are prefetch
    depths: `weight_slots` for streamed block weights, `save_slots` for kept outputs on their way to and from the
    host, `drive_slots` for states of `drive_tile` elements on their way from and to a drive, `window_slots` for what
    layers carry along sequences that ranks cut. `share_edge_slots` lays the embedding's and head's slots over the
    blocks' slots, `grads_over_weights` their gradients' slots over their weights', which nobody reads once the gradient
    is made. in_parts: blocks whose experts may be cut stream them part by part, and slots hold and count parts.
    touched_only: of such parts cross the link only weights of experts that some token of the round goes to, K of E for
    each. That helps rounds of few tokens alone: of more than a few times E / K all experts are touched. transport: how
    several ranks of a node share weights and gradients. relay: they take rounds in turn and relay gradients through the
    host. split: they walk the layers together, each moving a share of weights and gradients over its link, and the rest
    between GPUs. stages: they walk the layers together, as many rounds at a time as there are ranks, and block b
    belongs to rank b % ranks: it runs the block for all of these rounds, and alone may keep its weights, gradients and
    states on its GPU. context: every rank runs some chunks of each round, one after the other, and hands what a layer
    carries along a sequence, its gradients and the accumulators to its neighbour.
    """

    model: str
    request: Request
    chunk_tokens: int
    chunks_per_round: int
    layers: tuple[LayerPlan, ...]
    groups: tuple[GroupPlan, ...]
    weight_slots: int = 2
    grad_slots: int = 2
    save_slots: int = 2
    optimizer_slots: int = 2
    optimizer_tile: int = 1 << 24
    share_edge_slots: bool = False
    grads_over_weights: bool = False
    in_parts: bool = False
    touched_only: bool = False
    transport: TransportName = "relay"
    drive_slots: int = 4
    drive_tile: int = 1 << 24
    window_slots: int = 1
    predicted: Prediction = field(default_factory=Prediction)

    def __post_init__(self) -> None:
        if self.chunk_tokens <= 0 or self.chunks_per_round <= 0:
            raise ValueError(
                f"chunk_tokens={self.chunk_tokens} and chunks_per_round={self.chunks_per_round} must be > 0"
            )
        slots = self.weight_slots, self.grad_slots, self.save_slots, self.optimizer_slots, self.drive_slots
        if min(*slots, self.window_slots) < 1:
            raise ValueError("every kind of slot needs at least one")
        _check_homes_of_ranks(self)
        if any(home.speculative for home in self.groups) and not self.may_speculate:
            raise ValueError("one rank updates speculatively, or ranks that walk layers together with whole states")
        if self.touched_only and not self.in_parts:
            raise ValueError("touched_only is about experts that cross the link in parts, so it needs in_parts")
        if self.touched_only and self.reads_weights:
            raise ValueError("touched_only fetches experts from the host's memory, and weights lie on a drive")
        self._check_transport()
        if self.makes_inputs_again and (self.owns_blocks or self.replays):
            raise ValueError("inputs are made again neither in stages nor where commands are replayed as graphs")
        longest = self.request.slices(self.chunk_tokens)
        if longest > self.chunks_per_round:
            raise ValueError(
                f"a sequence of {self.request.max_seq_len} tokens needs {longest} chunks of {self.chunk_tokens} tokens"
                f" in one round, but a round has {self.chunks_per_round}"
            )

    def _check_transport(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r}; choose {', '.join(TRANSPORTS)}")
        rules = TRANSPORTS[self.transport]
        if rules.together and (self.request.ranks == 1 or self.touched_only):
            raise ValueError(f"transport={self.transport} is of several ranks of a node, which fetch all experts")
        if self.shards and (self.transport != "split" or self.request.nodes > 1):
            raise ValueError("ranks of one node keep shards, with transport=split")
        if not (self.owns_blocks or self.cuts_rounds):
            return
        if self.request.nodes > 1:
            raise ValueError(f"transport={self.transport} is of several ranks of one node")
        if self.in_parts or self.deals_states:
            raise ValueError(f"with transport={self.transport} experts are streamed whole, and no states are divided")
        edges = (self.groups[0], self.groups[len(self.layers) - 1]) if self.owns_blocks else ()
        if any("gpu" in (home.weights, home.grads, home.states) for home in edges):
            raise ValueError(
                f"with transport={self.transport} all ranks update the embedding and the head, which lie on the host"
            )

    @property
    def makes_inputs_again(self) -> bool:
        """True when some block's input is not kept from forward, but made again in backward."""
        return any(kept.input_again for kept in self.layers)

    @property
    def round_tokens(self) -> int:
        """Tokens that pass through all layers together."""
        return self.chunk_tokens * self.chunks_per_round

    @property
    def owns_blocks(self) -> bool:
        """True when each of several ranks runs blocks of its own."""
        return TRANSPORTS[self.transport].owns_blocks

    @property
    def cuts_rounds(self) -> bool:
        """True when each of several ranks runs some chunks of every round."""
        return TRANSPORTS[self.transport].cuts_rounds and self.request.ranks > 1

    @property
    def num_chunks(self) -> int:
        """Chunks that a rank runs together: of a round, or in stages of as many rounds as there are ranks."""
        return self.chunks_per_round * (self.request.ranks if self.owns_blocks else 1)

    @property
    def num_rounds(self) -> int:
        """Rounds of a full step of sequences of max_seq_len tokens."""
        longest, batch = self.request.max_seq_len, self.request.max_global_batch_tokens
        return rounds_of_step(longest, batch, self.chunk_tokens, self.chunks_per_round)

    @property
    def updates_on_cpu(self) -> bool:
        """True when the CPU updates some group."""
        return any(home.update == "cpu" for home in self.groups)

    @property
    def deals_states(self) -> bool:
        """True when ranks divide the optimizer states of some group over their GPUs, or nodes over their hosts."""
        return any(home.states in ("dealt", "nodes") for home in self.groups)

    @property
    def divides_states(self) -> bool:
        """True when nodes divide the optimizer states of some group over their hosts."""
        return any(home.states == "nodes" for home in self.groups)

    @property
    def shards(self) -> bool:
        """True when ranks keep shares of some group on their GPUs."""
        return any(home.sharded for home in self.groups)

    @property
    def uses_drive(self) -> bool:
        """True when planes of some group lie on a drive, or what some layer keeps."""
        return any(kept.on_drive for kept in self.layers) or any(home.uses_drive for home in self.groups)

    @property
    def reads_weights(self) -> bool:
        """True when weights of some group lie on a drive."""
        return any(home.weights == "drive" for home in self.groups)

    @property
    def updates_in_backward(self) -> bool:
        """True when updates begin inside the last round's backward pass."""
        return self.request.may_update_in_round and self.updates_without_norm

    @property
    def updates_without_norm(self) -> bool:
        """True when something is updated inside the last round of a step that does not wait for its norm."""
        return (self.updates_on_cpu or self.gpu_updates_in_round) and not self.shares_node

    @property
    def gpu_updates_in_round(self) -> bool:
        """True when the GPU updates inside the last round's backward pass."""
        return self.request.updates_in_round

    @property
    def stores_gradients(self) -> bool:
        """False when some gradient has no home, so that a step is one `train_step` of one round."""
        return all(home.grads != "none" for home in self.groups)

    @property
    def is_bounded(self) -> bool:
        """Whether the speed of light is of plans like this: each rank moves all weights, and states, over its link."""
        return not (TRANSPORTS[self.transport].together or self.deals_states or self.touched_only)

    @property
    def may_speculate(self) -> bool:
        """Whether the CPU may update before it knows that nothing is clipped: each rank finds all of some gradients."""
        rules = TRANSPORTS[self.transport]
        whole = rules.together and not (rules.cuts_rounds or self.divides_states)
        return self.request.waits_for_norm and (whole or not self.shares_node)

    @property
    def speculates(self) -> bool:
        """True when the CPU updates some group inside the last backward pass, before it knows that nothing is
        clipped."""
        return self.request.clipping and any(home.speculative for home in self.groups)

    def after_clipping(self) -> Plan:
        """Tell what runs after a step that was clipped: the same plan, which waits for the norm before it updates."""
        groups = tuple(replace(home, speculative=False) for home in self.groups)
        predicted = replace(self.predicted, step_s=self.predicted.after_clipping_s, after_clipping_s=0.0)
        return replace(self, groups=groups, predicted=predicted) if self.speculates else self

    def unclipped(self) -> Plan:
        """The same plan for steps in which nothing is clipped."""
        return replace(self, request=replace(self.request, clipping=False))

    @property
    def shares_node(self) -> bool:
        """True when several ranks train on one host copy per node of weights, gradients and optimizer states."""
        return self.request.shares_node

    @property
    def round_multiple(self) -> int:
        """Batches are packed into a multiple of so many rounds."""
        return self.request.round_multiple or (1 if self.cuts_rounds else self.request.ranks * self.request.nodes)

    @property
    def uses_tiles(self) -> bool:
        """True when the update of some group passes through tile slots."""
        return any(home.uses_tiles for home in self.groups)

    @property
    def slices_sequences(self) -> bool:
        """True when a sequence may be longer than a chunk, so that layers need a key/value window."""
        return self.request.max_seq_len > self.chunk_tokens

    @property
    def replays(self) -> bool:
        """True when blocks' commands are replayed as CUDA graphs."""
        return self.request.replays(self.chunk_tokens)

    def for_request(self, request: Request) -> Plan:
        """The plan for a request that differs in budgets; what the planner decided of a request stays decided."""
        return replace(self, request=replace(request, **{name: getattr(self.request, name) for name in DECIDED}))

    def with_caches(self, caches: CacheBytes) -> Plan:
        """The plan with caches of sequences beside its slots."""
        return replace(self, predicted=self.predicted.with_caches(caches))

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` gives it back equal."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """A plan from `to_json`. Raises ValueError for unknown or missing fields."""
        raw = json.loads(text)
        flags = {name: raw.pop(name, False) for name in ("split", "stages")}  # plans had these before `transport`
        for name in (name for name, holds in flags.items() if holds):
            raw["transport"] = name
        request = _build(Request, {**raw["request"], "numerics": _build(Numerics, raw["request"]["numerics"])})
        layers = tuple(
            _build(LayerPlan, {**x, "keep_gpu": tuple(x["keep_gpu"]), "keep_host": tuple(x["keep_host"])})
            for x in raw["layers"]
        )
        groups = tuple(_build(GroupPlan, g) for g in raw["groups"])
        told = dict(raw["predicted"])
        if alone_s := told.pop("one_gpu_step_s", 0.0):  # as older plans tell it
            told |= {"fewer_gpus": 1, "fewer_gpus_step_s": alone_s}
        predicted = _build(Prediction, told)
        return _build(Plan, {**raw, "request": request, "layers": layers, "groups": groups, "predicted": predicted})


def _build(cls: Any, values: dict[str, Any]) -> Any:
    known = {f.name for f in fields(cls)}
    if set(values) - known:
        raise ValueError(f"{cls.__name__} has no field {sorted(set(values) - known)}; known: {sorted(known)}")
    return cls(**values)


def _check_homes_of_ranks(plan: Plan) -> None:
    """Raise ValueError where so many ranks and nodes do not keep things so."""
    if plan.request.nodes == 1 and plan.divides_states:
        raise ValueError("several nodes divide optimizer states, but the plan is for one")
    if plan.deals_states and not plan.shares_node:
        raise ValueError("optimizer states are dealt over the GPUs of several ranks, but the plan is for one")
    if plan.uses_drive and plan.shares_node:
        _check_drive_of_ranks(plan)


def _check_drive_of_ranks(plan: Plan) -> None:
    if plan.request.nodes > 1 or plan.owns_blocks or plan.cuts_rounds:
        raise ValueError(f"planes lie on a drive on ranks of one node that {' or '.join(SHARES_DRIVE)}")
    if any(home.grads == "drive" for home in plan.groups):
        raise ValueError("several ranks add up gradients in the node's memory, so none lie on a drive")
    early = any(home.speculative and home.states == "drive" for home in plan.groups)
    if early or any(kept.on_drive for kept in plan.layers):
        raise ValueError("of one rank alone activations lie on a drive, and updates before the norm reach it")
