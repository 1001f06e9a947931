"""AdamW with both moments in 8 bits: codes in blocks of 256 with a float32 scale each (`blockwise.py`).

The moments are decoded, updated as `adamw.py` does, and encoded again; the update itself uses them unrounded.
"""

from __future__ import annotations

from flexengine.native import update as native
from flexengine.native.library import fallback_notice
from flexengine.optim.adamw import AdamWFactors, adamw_factors, adamw_values
from flexengine.optim.blockwise import BLOCK, Codebook, codebook, decode_blocks, encode_blocks
from flexengine.optim.rule import Rule, StatePlane, Update
from flexengine.optim.stored import WEIGHT_STREAM, pieces, read_master, scaled_grad, write_master, write_state
from flexengine.random_bits import stream_keys

_TILE_ELEMENTS = 1 << 18  # whole blocks; bounds the temporaries of a plain update to 20 MB
_SCALES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}

ADAMW_IN_BLOCKS_STATES = tuple(
    plane
    for codes, scales in _SCALES.items()
    for plane in (StatePlane(codes, "uint8"), StatePlane(scales, "float32", BLOCK))
)


def adamw_in_blocks_rule() -> Rule:
    """AdamW with 8-bit moments."""
    return Rule("8-bit AdamW", ADAMW_IN_BLOCKS_STATES, _update)


def _update(update: Update) -> None:
    settings = update.settings
    factors = adamw_factors(update.lr, settings.betas, settings.eps, update.weight_decay, update.step)
    planes = update.planes
    weight, grad = planes["weights"], planes["grad"]
    if not weight.is_cuda and not native.supports(weight, grad):
        fallback_notice("AdamW on the CPU", "it is computed in plain torch, which takes 10 to 40 times as long")
        for piece in pieces(update, _TILE_ELEMENTS):
            adamw_in_blocks_reference(piece, factors)
        return
    keys = [stream_keys(update.seed, update.step, stream) for stream in (WEIGHT_STREAM, 1, 2)]
    codes, scales = (planes["exp_avg"], planes["exp_avg_sq"]), (planes["exp_avg_scale"], planes["exp_avg_sq_scale"])
    tables = [(book.values, book.steps) for book in _books(update)]
    if weight.is_cuda:
        from flexengine.kernels.adamw_blocks import Moments, adamw_in_blocks_  # noqa: PLC0415  imports Triton

        moments = Moments(*codes, *scales)
        masters = weight, planes.get("remainder")
        adamw_in_blocks_(masters, moments, tables, grad, update.grad_scale, factors, keys[0], update.element_offset)
        return
    blocks = native.Blocks(*scales, *(native.Tables(*each) for each in tables))
    call = native.HostUpdate(
        weight, planes.get("remainder"), codes, grad, update.grad_scale, factors, keys, update.element_offset, blocks
    )
    native.update_("adamw", call)


def _books(update: Update) -> tuple[Codebook, Codebook]:
    """The codebooks of both moments, on the side of the update."""
    device = update.planes["weights"].device
    return codebook(True, device), codebook(False, device)


def adamw_in_blocks_reference(update: Update, factors: AdamWFactors) -> None:
    """One step in place, in plain torch. Blocks count from the first element."""
    books = dict(zip(_SCALES, _books(update), strict=True))
    exp_avg, exp_avg_sq = (
        decode_blocks(update.planes[codes], update.planes[scales], books[codes]) for codes, scales in _SCALES.items()
    )
    master, *moments = adamw_values(read_master(update), exp_avg, exp_avg_sq, scaled_grad(update), factors)
    write_master(update, master)
    for (name, scales_name), moment in zip(_SCALES.items(), moments, strict=True):
        codes, scales = encode_blocks(moment, books[name])
        write_state(update, name, codes, 0)
        write_state(update, scales_name, scales, 0)
