"""Describes a model whose frozen linear layers are stored in fewer bytes than the compute dtype takes.

Everything else follows from the description: planes and slots are smaller, a layer's weights are decoded before its
first chunk, and reports say what a base takes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from flexengine.models.spec import GroupSpec, LayerSpec, ModelSpec, ParamSpec
from flexengine.ops.base import Op
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.formats.scaled_codes import FP8_BLOCKS
from flexengine.ops.formats.weight_format import BaseDtype, Storage
from flexengine.ops.formats.weight_formats import FORMATS
from flexengine.ops.fp8 import Fp8Linear
from flexengine.ops.fp8_stored import as_stored
from flexengine.ops.linear import Linear
from flexengine.ops.opaque import OpaqueBlock, OpaqueLinear


def with_base_dtype(model: ModelSpec, base: BaseDtype) -> ModelSpec:
    """Store the frozen linear layers of the model's blocks, experts too, in the format `base`.

    Embedding, head, routers, norms and biases stay in the compute dtype: they are few, and rounding them costs most
    accuracy. So do layers that a checkpoint in this very format holds in 16 bits: whoever made it left them out. MXFP4
    is for experts that are stored input by output alone, as gpt-oss has them. Raises: ValueError when no block is
    frozen, or none has what the format is for.
    """
    if base == "compute":
        return model
    stored = _products(model, input_by_output=base == "mxfp4")
    if not stored and base == "mxfp4" and _products(model):
        raise ValueError(
            f"base_dtype=mxfp4 stores experts as gpt-oss has them, input by output, and {model.name} has none; give nf4"
        )
    if not stored:
        raise ValueError(
            f"base_dtype={base} stores frozen linear layers in fewer bytes, but all of {model.name} are trained; train"
            " adapters (--mode lora), freeze blocks (--freeze blocks), or leave --base-dtype out"
        )

    decoders = {s.decode for group in model.groups for param in group.params for s in param.sources if s.decode}
    # A checkpoint that was stored without double quantisation keeps its codes and magnitudes.
    storage: Storage = "nf4_float32" if base == "nf4" and "nf4_float32" in decoders else base
    quantised = any(_is_in(decoder, base) for decoder in decoders)

    def of_param(group: int, param: ParamSpec) -> ParamSpec:
        left_out = quantised and not all(_is_in(source.decode, base) for source in param.sources)
        return replace(param, storage=storage) if param.name in stored[group] and not left_out else param

    def of_group(index: int, group: GroupSpec) -> GroupSpec:
        if index not in stored:
            return group
        return replace(group, params=tuple(of_param(index, param) for param in group.params))

    model = replace(model, groups=tuple(of_group(i, group) for i, group in enumerate(model.groups)))
    return _multiplying_as_stored(model)


def _multiplying_as_stored(model: ModelSpec) -> ModelSpec:
    """Let layers whose products take codes and scales as they are stored multiply them so.

    That is group by group: where one stored matrix must be decoded, or experts may come in parts, all of its group are.
    """
    stored = {(i, p.name): p for i, group in enumerate(model.groups) for p in group.params if p.storage != "compute"}
    chosen = {group for group, _ in stored if model.groups[group].divisions == 1}
    for layer in model.layers:
        readers = {name: op for op in layer.ops for name in (*op.params, getattr(op, "weight", None))}
        for local, group, name in layer.params:
            param = stored.get((group, name))
            if param is not None and not _is_multiplied_as_stored(readers.get(local), param):
                chosen.discard(group)
    known: dict[tuple[tuple[Op, ...], frozenset[str]], tuple[Op, ...]] = {}

    def of_layer(layer: LayerSpec) -> LayerSpec:
        own = frozenset(local for local, group, name in layer.params if group in chosen and (group, name) in stored)
        if (layer.ops, own) not in known:  # blocks of one kind go on sharing their ops
            known[layer.ops, own] = tuple(_as_stored(op, own) for op in layer.ops)
        return replace(layer, ops=known[layer.ops, own])

    def of_group(index: int, group: GroupSpec) -> GroupSpec:
        if index not in chosen:
            return group
        params = (replace(param, multiplied_as_stored=param.storage != "compute") for param in group.params)
        return replace(group, params=tuple(params))

    groups = tuple(of_group(i, group) for i, group in enumerate(model.groups))
    return replace(model, groups=groups, layers=tuple(map(of_layer, model.layers))) if chosen else model


def _is_multiplied_as_stored(op: Op | None, param: ParamSpec) -> bool:
    """Whether a layer can: its sources must be stored as one matrix, with the scales that each has by itself."""
    step, rows = FORMATS[param.storage].row_step(param.shape[-1]), [source.shape[0] for source in param.sources]
    plain = len(param.shape) == 2 and all(count % step == 0 for count in rows[:-1])
    return plain and isinstance(op, Fp8Linear) and as_stored(op, param.storage) is not None


def _as_stored(op: Op, weights: frozenset[str]) -> Op:
    stored = as_stored(op, FP8_BLOCKS.name) if isinstance(op, Fp8Linear) and op.weight in weights else None
    return stored or op


def _is_in(decoder: str | None, base: BaseDtype) -> bool:
    """Tell whether what a decoder reads is stored in a format."""
    return decoder is not None and decoder.partition("_")[0] == base


def check_base_dtype(model: ModelSpec, base: str) -> None:
    """Raise ValueError unless the frozen layers are stored as numerics say."""
    # A plan priced for one format must not run with another: its seconds and bytes would be wrong.
    found = {param.storage.partition("_")[0] for group in model.groups for param in group.params} - {"compute"}
    found = found or {"compute"}
    if found != {base}:
        raise ValueError(
            f"{model.name} stores linear layers in {', '.join(sorted(found))}, but numerics ask for {base}"
        )


def _products(model: ModelSpec, input_by_output: bool = False) -> dict[int, set[str]]:
    """Find the weights of linear layers in frozen groups of blocks: names by group.

    input_by_output: only those of experts that are stored so.
    """
    found: dict[int, set[str]] = defaultdict(set)
    for layer in model.blocks:
        places = {local: (group, name) for local, group, name in layer.params}
        inside = [linear for op in layer.ops if isinstance(op, OpaqueBlock) for linear in op.linears]
        for op in (*layer.ops, *inside):
            wanted = not input_by_output or (isinstance(op, GroupedLinear) and op.transposed)
            if isinstance(op, (Linear, GroupedLinear, OpaqueLinear)) and wanted:
                group, name = places[op.weight]
                if model.groups[group].frozen:
                    found[group].add(name)
    return found
