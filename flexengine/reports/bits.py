"""A short digest of everything in a plan that sets the bits of a run: equal digests promise equal bits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan

NAMES = {
    "name", "sources", "fused", "matrices", "slot_class", "divisions", "num_parts", "cost", "longest",
    "multiplied_as_stored",
}  # fmt: skip
"""Fields of a model that say what something is called in a checkpoint, how it lies and crosses the link, or what it
costs; ops say what they multiply."""


def bits_digest(model: ModelSpec, plan: Plan) -> str:
    """Digest what a model computes, its dtypes, and the sizes that set the order of sums.

    Runs also need the same weights, data, seed, learning rates and clipping limit, and machines of one kind: cards (or
    processors with as many threads), torch and flexengine of the same version.
    """
    request = plan.request
    facts = {
        "model": {"layers": model.layers, "groups": model.groups, "balancing": model.balancing},
        "tables": [(table.scaling, table.values_for(request.max_seq_len)) for table in model.tables],
        "numerics": asdict(request.numerics),
        "clipping": request.clipping,
        "sizes": (plan.chunk_tokens, plan.chunks_per_round, plan.round_multiple, request.nodes),
    }
    if request.nodes > 1 and request.exchanged != request.numerics.grad:
        facts["exchanged"] = request.exchanged
    text = json.dumps(_plain(facts, {}), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def _plain(value: Any, known: dict[int, Any]) -> Any:
    """Any part of a model as JSON values: an object is its class and its fields. known: what was told already."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one, known) for key, one in value.items()}
    if isinstance(value, tuple | list):
        if id(value) not in known:  # blocks share their ops
            known[id(value)] = value, [_plain(one, known) for one in value]
        return known[id(value)][1]
    if isinstance(value, type) or callable(value):
        return value.__qualname__
    if isinstance(value, slice | range):
        return repr(value)
    names = [field.name for field in fields(value)] if is_dataclass(value) else list(vars(value))
    return [type(value).__qualname__, {n: _plain(getattr(value, n), known) for n in names if n not in NAMES}]


def bits_line(model: ModelSpec, plan: Plan) -> str:
    """Tell the digest, and whether another budget has the same."""
    request, digest = plan.request, bits_digest(model, plan)
    if request.chunk_tokens is None or request.round_tokens is None:
        return f"bits: {digest}; another budget may have others, unless --reproducible chooses the sizes"
    several = f"on any number of GPUs with --round-multiple {plan.round_multiple}"
    return f"bits: {digest}, the same within any budget, and {several}"
