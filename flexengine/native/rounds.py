"""What many placements take and how long their rounds are, in C: csrc/rounds.cpp."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from flexengine.native import library

NUM_EDGES, NUM_EDGE_SECONDS = 2, 5


class RoundsCall(ctypes.Structure):
    """`FlexRounds` of csrc/rounds.cpp, field by field."""

    _fields_ = (
        ("num_placements", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("num_chunks", ctypes.c_int64),
        ("num_kinds", ctypes.c_int64),
        ("num_choices", ctypes.c_int64),
        ("choices", ctypes.c_void_p),
        ("kinds", ctypes.c_void_p),
        ("costs", ctypes.c_void_p),
        ("edges", ctypes.c_void_p * NUM_EDGES),
        ("edge_seconds", ctypes.c_double * (NUM_EDGES * NUM_EDGE_SECONDS)),
        ("slots", ctypes.c_void_p),
        ("flags", ctypes.c_void_p),
        ("pending", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("forward", ctypes.c_void_p),
        ("backward", ctypes.c_void_p),
        ("finish", ctypes.c_void_p),
        ("in_parts", ctypes.c_void_p),
        ("refill", ctypes.c_int64),
        ("forward_only", ctypes.c_int64),
        ("rates", ctypes.c_double * 7),
        ("end_out", ctypes.c_void_p),
        ("work_out", ctypes.c_void_p),
    )


@cache
def estimator() -> Callable[..., int] | None:
    """The function, which takes a `RoundsCall` by reference; None without the library."""
    return library.bind("flex_estimate_rounds", ctypes.POINTER(RoundsCall))


def estimate_rounds(call: RoundsCall, arrays: dict[str, Any]) -> None:
    """Fill in the addresses of arrays by field and run the call. Arrays are int64, float64 or bool, in C order; those
    of `edges` are a pair.

    Raises: MemoryError.
    """
    kept = {name: _in_order(array) for name, array in arrays.items() if name != "edges"}
    edges = [_in_order(array) for array in arrays["edges"]]
    for name, array in kept.items():
        setattr(call, name, array.ctypes.data)
    for i, array in enumerate(edges):
        call.edges[i] = array.ctypes.data
    run = estimator()
    assert run is not None, "asked for before"
    library.check(run(ctypes.byref(call)), "estimate of rounds")


def _in_order(array: np.ndarray) -> np.ndarray:
    """The array in C order, as it is where it has that."""
    return np.ascontiguousarray(array)


def reduce_blocks(columns: np.ndarray, num_sums: int, kinds: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """Sums [num_sums, P], then maxima, over blocks of what their choices take.

    columns: [F, C, K] int64 by kind and choice; kinds: [L] int64; choices: [P, L] int64.
    """
    run = _reducer()
    if run is None:
        found = [column[kinds, choices] for column in columns]
        return np.array([f.sum(axis=1) if i < num_sums else f.max(axis=1) for i, f in enumerate(found)])
    choices, (num_columns, num_kinds, num_choices) = np.ascontiguousarray(choices, dtype=np.int64), columns.shape
    out = np.empty((num_columns, len(choices)), dtype=np.int64)
    sizes = (*choices.shape, num_columns, num_sums, num_kinds, num_choices)
    library.check(run(*(a.ctypes.data for a in (columns, kinds, choices)), *sizes, out.ctypes.data), "sums over blocks")
    return out


@cache
def _reducer() -> Callable[..., int] | None:
    pointers, sizes = [ctypes.c_void_p] * 3, [ctypes.c_int64] * 6
    return library.bind("flex_reduce_blocks", *pointers, *sizes, ctypes.c_void_p)
