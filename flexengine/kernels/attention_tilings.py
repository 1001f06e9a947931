"""How kernels of attention are called: scores, widths of heads, and the tiles that a card's shared memory holds.

The tiles are the fastest of some 200 that were timed on an H100 with Triton 3.6: Llama's heads, Gemma 2's, those of
gpt-oss and of latent attention, in sequences of 2048 and 8192 tokens. Those of more than 256 columns follow from memory
alone: sums of 64 rows fill half the registers of eight warps, and operands the rest of shared memory.
Cards with less shared memory get smaller ones.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.kernels.counts import next_power_of_2

LOG2_E = math.log2(math.e)
SHORT_WINDOW = 256
"""Keys of a window for which narrow tiles of keys are faster: wider ones would mostly hold hidden keys."""
MANY_COLUMNS = 256
"""Wider heads have tiles of half the rows."""
STATISTICS_BYTES = 1024  # of shared memory, for rows' sums
OWN_KEYS, MOST_FAR_KEYS = 16, 128
"""Of a tile in `attention_short.py`: those of its queries, and those before them, whose scores fill a warp's registers
at 128."""
HOPPER_BYTES = 227 * 1024  # of shared memory: for tensors on a CPU, whose kernels are only looked at or interpreted


class Scoring(NamedTuple):
    """Scores are scale * q.k, bounded by soft_cap where that is not 0; a query sees its last `window` keys, 0: all.

    Not causal: every query sees all keys of its sequence.
    """

    scale: float
    soft_cap: float = 0.0
    window: int = 0
    causal: bool = True

    def check(self) -> None:
        """Raises: ValueError on a scale that is not positive, or a window of a call that is not causal."""
        if not self.scale > 0.0:
            raise ValueError(f"attention: scale is {self.scale}, expected more than 0")
        if self.window and not self.causal:
            raise ValueError("attention: a window is for causal calls; give window=0 or causal=True")

    def factors(self) -> tuple[float, float]:
        """(factor on q.k, unit of the values) as `attention_tiles.values_of` takes them."""
        if self.soft_cap:
            return 2.0 * LOG2_E * self.scale / self.soft_cap, LOG2_E * self.soft_cap
        return LOG2_E * self.scale, LOG2_E * self.scale

    @property
    def short(self) -> bool:
        """Whether a query sees few keys only."""
        return 0 < self.window <= SHORT_WINDOW

    def constants(self) -> dict[str, bool]:
        """What kernels are compiled for."""
        return {"CAUSAL": self.causal, "WINDOW": self.window > 0, "CAPPED": self.soft_cap > 0}


class Widths(NamedTuple):
    """How a kernel holds heads: keys of width H as FIRST + SECOND columns (SECOND 0: none), values of V as VALUES, all
    powers of two of at least 16."""

    H: int
    V: int
    FIRST: int
    SECOND: int
    VALUES: int

    @classmethod
    def of(cls, head_dim: int, value_dim: int) -> "Widths":
        """192 columns are 128 and 64, not 256."""
        first = max(16, 1 << (head_dim.bit_length() - 1))
        second = 0 if head_dim <= first else max(16, next_power_of_2(head_dim - first))
        if second == first:
            first, second = 2 * first, 0
        return cls(head_dim, value_dim, first, second, max(16, next_power_of_2(value_dim)))

    @property
    def columns(self) -> int:
        """Of a key, padding included."""
        return self.FIRST + self.SECOND

    @property
    def widest(self) -> int:
        """Columns of a key or a value, whichever has more."""
        return max(self.columns, self.VALUES)


class Tiling(NamedTuple):
    """Rows of queries and of keys of a program's tile, warps, and how many tiles its loop has in flight.

    apart: steps that hide nothing from anyone have a loop of their own, without masks. passes: a program of keys makes
    both gradients in one pass, or each in a pass of its own, which leaves registers for larger tiles. registers: most
    of a thread, so that more programs run at once; 0: as many as it wants.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    apart: bool = True
    passes: int = 1
    registers: int = 0

    def launch(self) -> dict[str, int]:
        """Keywords of a launch."""
        return _launch(self.warps, self.stages, self.registers)


def _launch(warps: int, stages: int, registers: int) -> dict[str, int]:
    bounded = {"maxnreg": registers} if registers else {}
    return {"num_warps": warps, "num_stages": stages, **bounded}


class ShortTiling(NamedTuple):
    """Query heads of a tile in `attention_short.py`, the keys before its own that it takes, how many tiles a program
    takes, tiles in flight, and most registers of a thread, as of a `Tiling`; own: queries of a tile.

    A tile reads far + own keys for own queries. Twice as many queries (32) therefore read 0.56 times the keys per query
    for a window of 128, and compute 1.25 instead of 1.125 times the scores that are seen.
    """

    pack: int
    far: int
    tiles: int = 1
    stages: int = 1
    registers: int = 0
    own: int = OWN_KEYS

    @property
    def queries(self) -> int:
        """Of a program."""
        return self.own * self.tiles

    def constants(self) -> dict[str, int]:
        """What kernels are compiled for, and keywords of a launch: a warp has 16 rows."""
        constants = {"PACK": self.pack, "OWN": self.own, "FAR": self.far, "TILES": self.tiles}
        return constants | _launch(self.pack * self.own // 16, self.stages, self.registers)


def short_tiling(
    widths: Widths, scoring: Scoring, members: int, backward: bool, device: torch.device
) -> ShortTiling | None:
    """The tile of a kernel for short windows; None where a tile would see more keys or have fewer rows than it has room
    for (matrix products of Hopper cards take 64 rows), and where two tiles do not fit into shared memory: one at a time
    is slower than what `forward_tiling` and `query_tiling` give."""
    far = max(OWN_KEYS, next_power_of_2(max(scoring.window - 1, 1)))
    if not scoring.window or far > MOST_FAR_KEYS or members % 4 or widths.SECOND or widths.widest > 64:
        return None
    tiling = ShortTiling(4, far, tiles=8, stages=2)
    rows, keys = tiling.pack * OWN_KEYS, 2 * (OWN_KEYS + far)
    held = rows + tiling.stages * ((2 if backward else 1) * rows + keys)  # a result, and what is loaded
    return tiling if 2 * held * widths.widest + STATISTICS_BYTES <= _shared_memory_bytes(device) else None


def forward_tiling(widths: Widths, scoring: Scoring, device: torch.device) -> Tiling:
    """The tile of the forward kernel, whose loop goes over keys and values."""
    if widths.widest > MANY_COLUMNS:
        tiling = Tiling(64, 32, 8, 2)
    elif widths.widest > 128:
        tiling = Tiling(128, 64, 8, 2) if widths.widest > 192 else Tiling(128, 64, 8, 3)
    else:
        tiling = Tiling(64, 32, 4, 3) if scoring.short else Tiling(64, 64, 4, 3)
    return _fitted(tiling, widths.columns, widths.columns + widths.VALUES, False, device)


def query_tiling(widths: Widths, scoring: Scoring, device: torch.device) -> Tiling:
    """The tile of the kernel of grad_q, whose loop goes over keys and values."""
    if widths.widest > MANY_COLUMNS:
        tiling = Tiling(64, 32, 8, 1)
    elif widths.widest > 64:
        tiling = Tiling(128, 32 if widths.widest > 192 else 64, 8, 3)
    else:
        tiling = Tiling(64, 32, 4, 3, apart=False) if scoring.short else Tiling(64, 64, 4, 3)
    both = widths.columns + widths.VALUES
    return _fitted(tiling, both, both, False, device)


def key_tiling(widths: Widths, scoring: Scoring, device: torch.device) -> Tiling:
    """The tile of the kernel of grad_k and grad_v, whose loop goes over queries and gradients of outputs."""
    if widths.widest > MANY_COLUMNS:
        tiling = Tiling(32, 64, 8, 1, apart=False, passes=2)
    elif widths.widest > 128:
        tiling = Tiling(32, 128, 8, 3, passes=2 if widths.widest > 192 else 1)
    else:
        tiling = Tiling(32, 64, 4, 3) if widths.widest > 64 else Tiling(64, 64, 4, 3 if scoring.short else 4)
    both = widths.columns + widths.VALUES
    return _fitted(tiling, both, both, True, device)


def _fitted(tiling: Tiling, held: int, loaded: int, over_queries: bool, device: torch.device) -> Tiling:
    """The tile, smaller until shared memory holds `held` 16-bit columns of it and, for each stage, `loaded` of what its
    loop goes over; float32 operands are for tests."""
    limit = _shared_memory_bytes(device)
    while _tile_bytes(tiling, held, loaded, over_queries) > limit:
        loop, outer = ("rows", "keys") if over_queries else ("keys", "rows")
        if tiling.stages > 2:
            tiling = tiling._replace(stages=tiling.stages - 1)
        else:
            halved = loop if getattr(tiling, loop) > 16 else outer
            tiling = tiling._replace(**{halved: getattr(tiling, halved) // 2})
    return tiling


def _tile_bytes(tiling: Tiling, held: int, loaded: int, over_queries: bool) -> int:
    loop, outer = (tiling.rows, tiling.keys) if over_queries else (tiling.keys, tiling.rows)
    statistics = 2 * 4 * tiling.stages * tiling.rows if over_queries else 0
    return 2 * (outer * held + tiling.stages * loop * loaded) + statistics


def _shared_memory_bytes(device: torch.device) -> int:
    """What one program may use."""
    return HOPPER_BYTES if device.type != "cuda" else _card_bytes(device.index or 0)


@lru_cache
def _card_bytes(index: int) -> int:
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


def packed_heads(num_heads: int, num_groups: int, rows: int) -> int:
    """Query heads of a tile of so many rows: the largest power of two that divides the heads of a group."""
    members = num_heads // num_groups
    return min(members & -members, rows)


def slots(tokens: int, cu_seqlens: Tensor, tile: int) -> int:
    """Programs that surely cover all tiles of the packed sequences, whatever their lengths: `attention_tiles.find_tile`
    says which tile each has."""
    return tokens // tile + len(cu_seqlens) - 1
