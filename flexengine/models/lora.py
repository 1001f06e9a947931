"""Describes a model whose blocks are frozen and have low-rank adapters beside their linear layers.

Each block gets a second parameter group, `adapter.N`, which is trained and always lives on the GPU; everything else of
the model is frozen (models/freezing.py). Names are PEFT's, so that files of both match.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from flexengine.lora import ALL_LINEAR, LoRA
from flexengine.models.freezing import freeze_groups
from flexengine.models.saved_modules import saved_tensors, with_saved_modules
from flexengine.models.spec import GroupSpec, LayerSpec, ModelSpec, ParamSpec, WeightSource
from flexengine.ops.base import Op
from flexengine.ops.dora import DoRALinear
from flexengine.ops.linear import Linear
from flexengine.ops.lora import AdaptedRows, LoRALinear
from flexengine.wording import did_you_mean, shown

PEFT_PREFIX = "base_model.model."
"""What PEFT writes before the names of a model's modules."""


class _Module(NamedTuple):
    """A module of a linear layer: its name in the checkpoint, and the rows that it has of the layer's weight."""

    name: str
    rows: AdaptedRows

    @property
    def short(self) -> str:
        """Its own name, without those of the modules around it."""
        return self.name.rpartition(".")[2]


def with_lora(model: ModelSpec, lora: LoRA) -> ModelSpec:
    """Give the blocks of `model` adapters, and freeze all else. Call it after everything else that replaces ops.

    Raises: ValueError for a target that no linear layer of the blocks has.
    """
    _check_targets(model, lora)
    known: dict[tuple[tuple[Op, ...], tuple], tuple[Op, ...]] = {}
    layers, groups = list(model.layers), list(model.groups)
    for index, layer in enumerate(model.layers):
        found = {op.name: modules for op, modules in _targeted(model, layer, lora)}
        if not found:
            continue
        # Equal blocks must go on sharing one tuple of ops: everything derived from ops is cached by it.
        rows = tuple((name, tuple(module.rows for module in modules)) for name, modules in found.items())
        if (layer.ops, rows) not in known:
            adapted_rows = dict(rows)
            known[layer.ops, rows] = tuple(
                _adapted(op, number, adapted_rows.get(op.name), lora) for number, op in enumerate(layer.ops)
            )
        ops = known[layer.ops, rows]
        params = [param for op in ops if isinstance(op, LoRALinear) for param in _params(op, found[op.name])]
        own = tuple((param.name, len(groups), param.name) for param in params)
        layers[index] = replace(layer, ops=ops, params=(*layer.params, *own))
        name = f"adapter.{layer.name.rpartition('.')[2]}"
        groups.append(GroupSpec(name, "block", tuple(params), adapter=True))
    adapted = replace(model, lora=lora, groups=tuple(groups), layers=tuple(layers))
    _check_ranks(adapted, lora)
    beneath = set(range(len(model.groups)))
    adapted, whole = with_saved_modules(adapted, lora.modules_to_save)
    beneath |= {i for i, group in enumerate(adapted.groups) if group.name.startswith("frozen.")}
    return freeze_groups(adapted, beneath - whole)


def _adapted(op: Op, number: int, rows: tuple[AdaptedRows, ...] | None, lora: LoRA) -> Op:
    if rows is None:
        return op
    assert isinstance(op, Linear)
    kind = DoRALinear if lora.use_dora else LoRALinear
    return kind(op, lora.rank, lora.scale, rows, lora.dropout, number)


def _params(op: LoRALinear, modules: Sequence[_Module]) -> list[ParamSpec]:
    """Describe A and B of a linear layer's adapters, and their magnitudes."""
    width = op.adapted_features

    def sources(part: str, shape_of: Iterator[tuple[int, int]]) -> tuple[WeightSource, ...]:
        names = (f"{PEFT_PREFIX}{module.name}.{part}.weight" for module in modules)
        return tuple(WeightSource(name, shape) for name, shape in zip(names, shape_of, strict=True))

    down = sources("lora_A", ((op.rank, op.in_features) for _ in modules))
    up = sources("lora_B", ((m.rows.end - m.rows.start, op.rank) for m in modules))
    return [
        ParamSpec(op.down, (len(modules) * op.rank, op.in_features), down, init="kaiming", added=True),
        ParamSpec(op.up, (width, op.rank), up, init="zeros", added=True),
        *([_magnitudes(op, modules)] if isinstance(op, DoRALinear) else []),
    ]


def _magnitudes(op: DoRALinear, modules: Sequence[_Module]) -> ParamSpec:
    sources = tuple(
        WeightSource(f"{PEFT_PREFIX}{module.name}.lora_magnitude_vector", (module.rows.end - module.rows.start,))
        for module in modules
    )
    return ParamSpec(op.magnitude, (op.adapted_features,), sources, kind="vector", init="zeros", added=True)


# -- which modules ---------------------------------------------------------------------------------------------------


def _targeted(model: ModelSpec, layer: LayerSpec, lora: LoRA) -> list[tuple[Linear, tuple[_Module, ...]]]:
    """List the linear layers of a block that have targets, with these."""
    found = []
    for op in layer.ops if layer.kind == "block" else ():
        if type(op) is Linear:
            modules = tuple(m for m in _modules(model, layer, op) if any(_hits(t, m.name) for t in lora.targets))
            if modules:
                found.append((op, modules))
    return found


def _modules(model: ModelSpec, layer: LayerSpec, op: Linear) -> Iterator[_Module]:
    """List the modules of a linear layer, whose weights the checkpoint has one by one."""
    group, name = next((group, name) for local, group, name in layer.params if local == op.weight)
    for source, rows in _spans(_sources(model, group, name), op):
        yield _Module(source.name.removesuffix(".weight"), rows)


def _spans(sources: Sequence[WeightSource], op: Linear) -> Iterator[tuple[WeightSource, AdaptedRows]]:
    """Pair the sources of a linear layer's weight with the columns of its output that they make."""
    start = 0
    for source in sources:
        end = start + source.shape[1 if op.transposed else 0]
        yield source, AdaptedRows(start, end)
        start = end


def _hits(target: str, name: str) -> bool:
    """Whether a target means a module: all of them, its name or the end of it, or an expression for the whole name."""
    if target in (ALL_LINEAR, name) or name.endswith(f".{target}"):
        return True
    return bool(re.fullmatch(target, name))


def _check_targets(model: ModelSpec, lora: LoRA) -> None:
    """Raise ValueError for a target that is no expression, or that no module has."""
    names = [
        m.name for layer in model.blocks for op in layer.ops if type(op) is Linear for m in _modules(model, layer, op)
    ]
    short = Counter(name.rpartition(".")[2] for name in names)
    for target in lora.targets:
        try:
            hit = any(_hits(target, name) for name in names)
        except re.error as error:
            raise ValueError(f"lora target {shown(target)} is no regular expression: {error}") from None
        if not hit:
            guess = did_you_mean(target, [ALL_LINEAR, *short])
            there = ", ".join(f"{name} ({count})" for name, count in short.items()) or "none"
            raise ValueError(
                f"lora target {shown(target)}: no linear layer of {model.name}'s blocks has that name{guess}; there are"
                f" {there}, and {ALL_LINEAR} for all of them"
            )


def _check_ranks(adapted: ModelSpec, lora: LoRA) -> None:
    """Raise ValueError where adapters are to start with more of a weight than it has."""
    for adapter in adapters(adapted) if lora.changes_base else ():
        most = min(adapter.weight.shape)
        if lora.rank > most:
            rows, columns = adapter.weight.shape
            raise ValueError(
                f"lora_init={lora.init} with rank {lora.rank}: {adapter.module} has {rows} x {columns} weights, and"
                f" principal parts of rank {most} at the most; give a rank of at most {most}"
            )


class Adapter(NamedTuple):
    """The adapter of one module: the tensor of the checkpoint that it changes, and those of A and B.

    transposed: the checkpoint holds the weight [in, out]. magnitude: that of the outputs' magnitudes, with DoRA.
    """

    weight: WeightSource
    down: WeightSource
    up: WeightSource
    transposed: bool
    magnitude: WeightSource | None = None

    @property
    def parts(self) -> tuple[WeightSource, ...]:
        """All tensors of the adapter."""
        return tuple(part for part in (self.down, self.up, self.magnitude) if part is not None)

    @property
    def module(self) -> str:
        """The module's name in the checkpoint."""
        return self.weight.name.removesuffix(".weight")


def adapters(model: ModelSpec) -> Iterator[Adapter]:
    """List the adapters of a model in forward order; none where it has no adapters."""
    for layer in model.layers:
        named = {local: (group, name) for local, group, name in layer.params}
        for op in layer.ops:
            if isinstance(op, LoRALinear):
                weights, down, up = (_sources(model, *named[name]) for name in (op.weight, op.down, op.up))
                adapted = [source for source, rows in _spans(weights, op) if rows in op.adapted]
                magnitudes = [None] * len(adapted)
                if isinstance(op, DoRALinear):
                    magnitudes = _sources(model, *named[op.magnitude])
                for weight, a, b, magnitude in zip(adapted, down, up, magnitudes, strict=True):
                    yield Adapter(weight, a, b, op.transposed, magnitude)


def _sources(model: ModelSpec, group: int, name: str) -> tuple[WeightSource, ...]:
    return next(param.sources for param in model.groups[group].params if param.name == name)


def adapter_counts(model: ModelSpec) -> dict[str, int]:
    """Count trained parameters by the own names of modules, those of adapters first."""
    counts: Counter[str] = Counter()
    for adapter in adapters(model):
        counts[adapter.module.rpartition(".")[2]] += sum(math.prod(part.shape) for part in adapter.parts)
    for source in {source.name: source for _, source in saved_tensors(model)}.values():
        counts[source.name.rpartition(".")[0].rpartition(".")[2]] += math.prod(source.shape)
    return dict(counts)
