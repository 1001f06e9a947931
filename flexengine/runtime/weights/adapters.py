"""Starts the adapters of a model, and reads and writes them as files have them.

Files hold what PEFT holds; planes hold magnitudes as differences to the norms of the frozen weights
(ops/adapters/dora.py). Adapters that begin with the principal parts of the weights (PiSSA) take these out of the base.
A file is for the base as it was, so it holds what was learned beside what was taken: B @ A - B0 @ A0, of twice the
rank.
Source of PiSSA: Meng et al. 2024, https://arxiv.org/abs/2404.02948.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.adapter import adapter_tensors
from flexengine.checkpoint.adapter_config import MERGE_FIRST, embedding_rows
from flexengine.checkpoint.layout import ADAPTER_CONFIG
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.models.checkpoints import open_checkpoint
from flexengine.models.lora import PEFT_PREFIX, Adapter, adapters
from flexengine.models.saved_modules import edge_tensors, grown_tensors, saved_tensors
from flexengine.ops.adapters.dora import LEAST_NORM
from flexengine.runtime.arena import wide_dtype
from flexengine.runtime.weights.stored_matrices import regrouped
from flexengine.runtime.weights.weight_store import WeightStore

ORTHOGONAL_SCALE = 0.1
"""Factor of both orthogonal matrices, as PEFT's."""
MERGED_ELEMENTS = 1 << 20
"""Elements of a weight that its adapter is added to at a time: 4 MiB as float32, of which there are three."""


class Begin(NamedTuple):
    """What a run's weights began with: a checkpoint, or for None random ones drawn from the seed."""

    folder: Path | None
    seed: int


def start_adapters(weights: WeightStore, begin: Begin, adapter: Path | None) -> None:
    """Give the adapters their first values: those of a folder, or what the model's LoRA names.

    Random first values were drawn with those of the base. Order: the base is loaded. Raises: CheckpointError for a
    folder that is no adapter of this model.
    """
    lora = weights.layout.model.lora
    if lora is None:
        return
    found = list(adapters(weights.layout.model))
    if lora.changes_base:
        for one, original in _originals(weights, found, begin):
            _start_pissa(weights, one, original, begin.seed)
    elif lora.init == "orthogonal":
        for one in found:
            _start_orthogonal(weights, one, begin.seed)
    if lora.use_dora and lora.init != "default":
        for one in found:
            _start_magnitude(weights, one)
    if adapter is not None:
        _load(weights, found, adapter)


def _load(weights: WeightStore, found: list[Adapter], folder: Path) -> None:
    model = weights.layout.model
    shapes = {part.name: part.shape for one in found for part in one.parts}
    in_file = [*saved_tensors(model)]
    if embedding_rows(folder, model.embedding_source) == model.vocab_size:
        in_file += grown_tensors(model)
    saved = {f"{PEFT_PREFIX}{name}": source for name, source in in_file}
    shapes |= {name: source.shape for name, source in saved.items()}
    frozen = ((f"{PEFT_PREFIX}{name}", source) for name, source in edge_tensors(model))
    edges = {name: source for name, source in frozen if name not in saved}
    beside = {name: source.shape for name, source in edges.items()}
    with_norms = {one.magnitude.name: one for one in found if one.magnitude is not None}
    written: dict[str, Tensor] = {}
    for name, stored in adapter_tensors(folder, shapes, beside):
        if name in edges:
            _check_is_base(weights, edges[name].name, stored, f"{folder}: {name}")
            continue
        tensor = stored if stored.dtype == torch.float64 else stored.float()
        if name in with_norms:
            weights.write(name, tensor - row_norms(base_matrix(weights, with_norms[name])))
        elif name not in saved:
            weights.write(name, tensor)
        elif not torch.equal(written.setdefault(saved[name].name, tensor), tensor):
            raise CheckpointError(f"{folder}: {name} differs from the embedding, to which config.json ties the head")
        else:
            weights.write(saved[name].name, tensor)


def _check_is_base(weights: WeightStore, source: str, stored: Tensor, where: str) -> None:
    """Raise CheckpointError where a file holds an embedding or a head with other values than the frozen one."""
    compute, start = getattr(torch, weights.layout.plan.request.numerics.compute), 0
    for piece in weights.pieces(source):
        own = stored.flatten()[start : start + piece.numel()]
        start += piece.numel()
        # Both were rounded from the same values: one of them to the other's dtype or to fewer bits.
        if not (torch.equal(own.to(compute), piece.to(compute)) or torch.equal(piece.to(own.dtype), own)):
            raise CheckpointError(
                f"{where} has other values than the model, and PEFT would use them; name it in modules_to_save of"
                f" {ADAPTER_CONFIG} to train it in full, or {MERGE_FIRST}"
            )


def file_tensors(weights: WeightStore, begin: Begin) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the adapters as files have them, for the base that the run began with."""
    model = weights.layout.model
    found = list(adapters(model))
    assert model.lora is not None
    taken = _originals(weights, found, begin) if model.lora.changes_base else ((one, None) for one in found)
    for one, original in taken:
        down, up = weights.read(one.down.name), weights.read(one.up.name)
        lengths = None if one.magnitude is None else magnitude(weights, one)
        if original is not None:
            down0, up0 = _principal(weights, one, original, begin.seed)
            if lengths is not None:  # what the base has lost in fewer bits is no part of the file
                began = torch.addmm(base_matrix(weights, one), up0, down0, alpha=model.lora.scale)
                lengths += row_norms(original) - row_norms(began)
            down, up = torch.cat((down, -down0)), torch.cat((up, up0), dim=1)
        yield one.down.name, down
        yield one.up.name, up
        if one.magnitude is not None and lengths is not None:
            yield one.magnitude.name, lengths
    # PEFT reads rows that the base lacks from the same file.
    for name, source in (*saved_tensors(model), *grown_tensors(model)):
        yield f"{PEFT_PREFIX}{name}", weights.read(source.name)


# -- magnitudes --------------------------------------------------------------------------------------------------------


def row_norms(matrix: Tensor) -> Tensor:
    """The norm of each row."""
    return torch.linalg.vector_norm(matrix, dim=1)


def base_matrix(weights: WeightStore, adapter: Adapter) -> Tensor:
    """The frozen weight [out, in] as it is multiplied, in float32 (float64)."""
    weight = weights.read(adapter.weight.name)
    return weight.t() if adapter.transposed else weight


def magnitudes(weights: WeightStore) -> dict[str, Tensor]:
    """The magnitudes of all modules that have some, by name, as files have them."""
    found = (one for one in adapters(weights.layout.model) if one.magnitude is not None)
    return {one.magnitude.name: magnitude(weights, one) for one in found if one.magnitude is not None}


def magnitude(weights: WeightStore, adapter: Adapter) -> Tensor:
    """The magnitudes of a module's outputs, as files have them."""
    assert adapter.magnitude is not None
    return weights.read(adapter.magnitude.name) + row_norms(base_matrix(weights, adapter))


def changed(weights: WeightStore, adapter: Adapter, scale: float) -> Iterator[Tensor]:
    """What a module or experts multiply, as it is stored, some at a time in float32 (float64)."""
    of_kind = changed_experts if adapter.module.kind == "experts" else changed_rows
    return of_kind(weights, adapter, scale)


def changed_rows(weights: WeightStore, adapter: Adapter, scale: float) -> Iterator[Tensor]:
    """What a module multiplies, as it is stored, some rows at a time in float32 (float64): weight + scale * B @ A.

    Outputs with magnitudes have rows of these lengths; where outputs are the columns, the weight is read twice.
    """
    if adapter.magnitude is None:
        yield from (changed for _, _, changed in _changes(weights, adapter, scale))
        return
    magnitudes = weights.read(adapter.magnitude.name)
    if not adapter.transposed:
        for rows, own, changed in _changes(weights, adapter, scale):
            yield changed.mul_(_gains(magnitudes[rows], row_norms(own), row_norms(changed))[:, None])
        return
    squares = torch.zeros(2, len(magnitudes), dtype=magnitudes.dtype)
    for _, own, changed in _changes(weights, adapter, scale):
        squares[0].add_(own.square().sum(0))  # own may be the plane itself
        squares[1].add_(changed.square_().sum(0))
    own_norms, norms = squares.sqrt_()
    gains = _gains(magnitudes, own_norms, norms)
    for _, _, changed in _changes(weights, adapter, scale):
        yield changed.mul_(gains)


def _gains(magnitudes: Tensor, own_norms: Tensor, norms: Tensor) -> Tensor:
    """What outputs are multiplied by; magnitudes: as planes hold them."""
    return (magnitudes + own_norms) / norms.clamp_(LEAST_NORM)


def _changes(weights: WeightStore, adapter: Adapter, scale: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of a weight as it is stored, with their values and these values with the product of A and B added."""
    num_rows, columns = adapter.weight.shape
    down, up = weights.read(adapter.down.name), weights.read(adapter.up.name)
    step = max(1, MERGED_ELEMENTS // columns)
    sizes = [min(step, num_rows - start) * columns for start in range(0, num_rows, step)]
    for start, flat in zip(
        range(0, num_rows, step), regrouped(weights.pieces(adapter.weight.name), sizes), strict=True
    ):
        own, rows = flat.view(-1, columns), slice(start, min(start + step, num_rows))
        product = down[:, rows].t() @ up.t() if adapter.transposed else up[rows] @ down
        yield rows, own, torch.add(own, product, alpha=scale)


def changed_experts(weights: WeightStore, adapter: Adapter, scale: float) -> Iterator[Tensor]:
    """What experts in one tensor multiply, as it is stored, expert by expert in float32 (float64)."""
    experts, first, second = adapter.weight.shape
    rank = adapter.down.shape[0] // experts
    down = weights.read(adapter.down.name).view(experts, rank, -1)
    up = weights.read(adapter.up.name).view(-1, rank, experts)
    sizes = [first * second] * experts
    for expert, flat in enumerate(regrouped(weights.pieces(adapter.weight.name), sizes)):
        product = up[:, :, expert] @ down[expert]
        changed = flat.clone().view(first, second)
        yield changed.add_(product.t() if adapter.transposed else product, alpha=scale)


def _start_magnitude(weights: WeightStore, adapter: Adapter) -> None:
    """The magnitudes of the weights with their adapter, so that it changes nothing but directions."""
    assert adapter.magnitude is not None
    assert weights.layout.model.lora is not None
    base = base_matrix(weights, adapter)
    product = weights.read(adapter.up.name) @ weights.read(adapter.down.name)
    changed = torch.add(base, product, alpha=weights.layout.model.lora.scale)
    weights.write(adapter.magnitude.name, row_norms(changed) - row_norms(base))


# -- first values ------------------------------------------------------------------------------------------------------


@contextmanager
def base_values(weights: WeightStore, begin: Begin) -> Iterator[Callable[[str], Iterator[Tensor]]]:
    """Give what reads the values of a tensor that the run began with, flat, some at a time."""
    if begin.folder is None:
        yield lambda name: weights.drawn(name, begin.seed)
        return
    with open_checkpoint(weights.layout.model, begin.folder) as reader:
        yield lambda name: weights.values(reader, name)


def _originals(weights: WeightStore, found: list[Adapter], begin: Begin) -> Iterator[tuple[Adapter, Tensor]]:
    """Pair every adapter with the weight [out, in] that the run began with, in float32 (float64)."""
    dtype = wide_dtype(weights.layout)

    def matrix(adapter: Adapter, pieces: Iterator[Tensor]) -> Tensor:
        flat = torch.cat([piece.to("cpu", dtype, copy=True) for piece in pieces])
        weight = flat.view(adapter.weight.shape)
        return weight.t() if adapter.transposed else weight

    with base_values(weights, begin) as values:
        for one in found:
            yield one, matrix(one, values(one.weight.name))


def _start_pissa(weights: WeightStore, adapter: Adapter, original: Tensor, seed: int) -> None:
    down, up = _principal(weights, adapter, original, seed)
    lora = weights.layout.model.lora
    assert lora is not None
    rest = torch.addmm(original, up, down, alpha=-lora.scale)
    weights.write(adapter.weight.name, (rest.t() if adapter.transposed else rest).contiguous())
    weights.write(adapter.down.name, down)
    weights.write(adapter.up.name, up)


def _principal(weights: WeightStore, adapter: Adapter, original: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A [R, in] and B [out, R] as they are stored, with scale * B @ A the best approximation of a weight of rank R."""
    lora = weights.layout.model.lora
    assert lora is not None
    steps = lora.init.rpartition("_niter_")[2]
    if steps.isdigit():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_seed_of(adapter, seed))
            left, values, right = torch.svd_lowrank(original, lora.rank, niter=int(steps))
            right = right.t()
    else:
        left, values, right = torch.linalg.svd(original, full_matrices=False)
    roots = (values[: lora.rank] / lora.scale).sqrt_()
    down, up = roots[:, None] * right[: lora.rank], left[:, : lora.rank] * roots
    return weights.as_stored(adapter.down.name, down), weights.as_stored(adapter.up.name, up)


def _start_orthogonal(weights: WeightStore, adapter: Adapter, seed: int) -> None:
    """A and B with rows and columns in spaces that are orthogonal to each other, so that B @ A = 0."""
    generator = torch.Generator().manual_seed(_seed_of(adapter, seed))
    (rank, inputs), (outputs, _) = adapter.down.shape, adapter.up.shape
    basis = torch.linalg.qr(torch.randn(rank, rank, generator=generator)).Q
    down = torch.randn(inputs, rank // 2, generator=generator) @ basis[0::2]
    up = torch.randn(outputs, rank // 2, generator=generator) @ basis[1::2]
    weights.write(adapter.down.name, down.t() * ORTHOGONAL_SCALE)
    weights.write(adapter.up.name, up * ORTHOGONAL_SCALE)


def _seed_of(adapter: Adapter, seed: int) -> int:
    return seed * 1_000_003 + zlib.crc32(adapter.down.name.encode())
