"""Chooses the rule of every kind of parameters by the optimizer's name and the dtype of its states."""

from __future__ import annotations

from functools import cache

from flexengine.optim.adamw import adamw_rule
from flexengine.optim.adamw_blocks import adamw_in_blocks_rule
from flexengine.optim.lion import lion_rule
from flexengine.optim.muon import muon_rule
from flexengine.optim.rule import Rule
from flexengine.optim.sgd import sgd_rule

IN_BLOCKS = "int8"
"""The name of states in 8 bits, as codes in blocks."""


@cache
def rule_of(optimizer: str, param_kind: str, state: str, compute: str) -> Rule:
    """The rule of an optimizer for the matrices or vectors (norms and biases) of a model; `hidden` matrices are Muon's,
    and `edge` ones those outside of blocks: embedding and head, whose states have 16 bits where others have 8.

    state: dtype of stored states. Vectors keep theirs in float32, and float64 computation keeps all in float64.
    Raises: ValueError for an optimizer that there is not, or states in 8 bits that it does not have.
    """
    wide = "float64" if compute == "float64" else "float32"
    dtype = state if param_kind != "vector" and wide == "float32" else wide
    if param_kind == "edge" and dtype == IN_BLOCKS and optimizer in ("adamw", "muon"):
        dtype = "bfloat16"  # rows of rare tokens have moments far below their block's largest, which codes lose
    if optimizer == "muon" and param_kind == "hidden":
        return muon_rule("bfloat16" if state == IN_BLOCKS and wide == "float32" else dtype)
    if optimizer in ("adamw", "muon"):
        return adamw_in_blocks_rule() if dtype == IN_BLOCKS else adamw_rule(dtype)
    if dtype == IN_BLOCKS:
        raise ValueError(f"optimizer={optimizer!r} has no states in 8 bits; only adamw and muon have")
    if optimizer == "lion":
        return lion_rule(dtype)
    if optimizer == "sgd":
        return sgd_rule(dtype)
    raise ValueError(f"optimizer={optimizer!r} is not known; there are adamw, muon, lion and sgd")
