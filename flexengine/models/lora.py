"""Describes a model whose blocks are frozen and have low-rank adapters beside their linear layers.

Each block gets a second parameter group, `adapter.N`, which is trained; everything else of the model is frozen
(models/freezing.py). Adapters of experts belong to the parts that these cross the link in, unless one tensor holds
those of all. Names are PEFT's, so that files of both match.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import repeat
from typing import Literal, NamedTuple

from flexengine.checkpoint.expressions import full_matches
from flexengine.models.freezing import freeze_groups
from flexengine.models.lora_layers import with_adapters
from flexengine.models.saved_modules import edge_modules, is_saved, with_saved_modules
from flexengine.models.spec import ADAPTER_CLASS, GroupSpec, LayerSpec, ModelSpec, ParamSpec, WeightSource, divided
from flexengine.ops.adapters.lora import LoraDown
from flexengine.ops.adapters.low_rank import Adapters, OfExperts
from flexengine.ops.base import Op
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.experts.router import Router
from flexengine.ops.given_rows import PlaceRows, placing
from flexengine.ops.glu_down import GLUDown
from flexengine.ops.linear import Linear
from flexengine.ops.opaque import OpaqueBlock, OpaqueLinear
from flexengine.options.lora import ALL_EXPERTS, ALL_LINEAR, EVERYTHING, KINDS, LoRA
from flexengine.wording import did_you_mean, shown

PEFT_PREFIX = "base_model.model."
"""What PEFT writes before the names of a model's modules."""

IN_ONE_TENSOR = "qwen3_5_moe"
"""The start of the families whose published checkpoints, and so adapters, have all experts of a layer in one tensor."""
INNER = "gate_up_proj"
"""Of both tensors of such experts, the one that PEFT wraps first."""
MEANT_BY = {"linear": (ALL_LINEAR, EVERYTHING), **dict.fromkeys(("expert", "experts"), (ALL_EXPERTS, EVERYTHING))}
"""The targets that mean all modules of a kind, by kinds of modules; others are meant by their names alone."""
STACKED = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), INNER), **dict.fromkeys(("down_proj", "w2"), "down_proj")
}  # fmt: skip
"""Names of an expert's modules in checkpoints, and of the tensors that transformers stacks them in."""


_Target = Linear | GroupedLinear | Router | OpaqueLinear
"""An op, or a linear layer inside of one, whose weight adapters may change."""


class Module(NamedTuple):
    """A module whose weight adapters may change.

    name: in the checkpoint, or in transformers if it is in a tower. rows: those that it has of the op's weight. kind:
    experts if it holds all of a layer, expert if it is one of an expert.
    """

    name: str
    rows: range
    kind: Literal["linear", "expert", "experts", "router", "tower"]

    @property
    def short(self) -> str:
        """Its own name, without those of the modules around it."""
        return self.name.rpartition(".")[2]

    @property
    def names(self) -> list[str]:
        """The names by which targets may mean it: its own, and that of the tensor that transformers has it in."""
        if self.kind == "expert":
            return [self.name, f"{self.name.rsplit('.', 2)[0]}.{STACKED[self.short]}"]
        return [self.name]


_Modules = dict[_Target, tuple[Module, ...]]
"""Modules of a layer, by what multiplies with their weights."""


def with_lora(model: ModelSpec, lora: LoRA) -> ModelSpec:
    """Give the blocks of `model` adapters, and freeze all else.

    Raises: ValueError for a target that no linear layer of the blocks has, or adapters that cannot be.
    """
    named = model.with_fused_tensors() if model.family.startswith(IN_ONE_TENSOR) else model
    targeted = _targeted(named, lora)
    if any(isinstance(op, GroupedLinear) for found in targeted for op in found):
        model = named  # a checkpoint may hold experts without adapters one by one
    # Equal blocks must go on sharing one tuple of ops: everything derived from ops is cached by it.
    ops_with, layers, groups = cache(with_adapters), list(model.layers), list(model.groups)
    for index, (layer, found) in enumerate(zip(model.layers, targeted, strict=True)):
        if found:
            own = {_adapters(op, modules, lora): modules for op, modules in found.items()}
            ops = ops_with(layer.ops, tuple(own), lora.dropout)
            group = _group(layer, ops, own)
            there = tuple((param.name, len(groups), param.name) for param in group.params)
            layers[index] = replace(layer, ops=ops, params=(*layer.params, *there))
            groups.append(group)
    given = placing(layers[0].ops).given if model.given is not None else None
    adapted = replace(model, lora=lora, groups=tuple(groups), layers=tuple(layers), given=given)
    _check(adapted, lora)
    adapted, whole = with_saved_modules(adapted, lora.modules_to_save)
    beneath = {i for i, group in enumerate(adapted.groups) if not group.name.startswith("adapter.")}
    return freeze_groups(adapted, beneath - whole)


def _adapters(op: _Target, modules: Sequence[Module], lora: LoRA) -> Adapters:
    """Describe the adapters of an op's modules."""
    experts = None
    if isinstance(op, GroupedLinear):
        experts = OfExperts(op.num_experts, op.per_token, op.bounds, modules[0].kind == "experts")
    rows = tuple(dict.fromkeys(module.rows for module in modules))
    sizes = (op.in_features, op.out_features, lora.rank, lora.scale, rows)
    return Adapters(op.name, op.weight, *sizes, op.transposed, lora.use_dora, experts, isinstance(op, Router))


def _group(layer: LayerSpec, ops: tuple[Op, ...], own: dict[Adapters, tuple[Module, ...]]) -> GroupSpec:
    """Describe the group of a layer's adapters, which belong to these modules; ops: with them."""
    stacks = sum(modules[0].kind == "experts" for modules in own.values())
    params = tuple(param for each, modules in own.items() for param in _params(each, modules, nested=stacks == 2))
    if layer.kind != "block":  # a tower's are planned as its weights are
        return GroupSpec("adapter.tower", f"tower {ADAPTER_CLASS}", params)
    divisions, cut = (1, ()) if stacks else divided(ops, params)
    name = f"adapter.{layer.name.rpartition('.')[2]}"
    return GroupSpec(name, ADAPTER_CLASS, params, divisions=divisions, cut=cut, adapter=True)


def _params(adapters: Adapters, modules: Sequence[Module], nested: bool) -> list[ParamSpec]:
    """Describe A and B of the adapters of a linear layer or of experts, and their magnitudes.

    nested: both products of experts in one tensor have adapters.
    """
    width, rank, together = adapters.adapted_features, adapters.rank, modules[0].kind == "experts"
    stack = () if adapters.experts is None else (adapters.experts.num_experts,)
    own = rank * math.prod(stack) if together else rank
    down, up = (*stack, adapters.width, adapters.in_features), (width, own) if together else (*stack, width, rank)

    def tensors(part: str, shapes: Iterable[tuple[int, ...]]) -> tuple[WeightSource, ...]:
        names = (f"{PEFT_PREFIX}{_file_module(module, nested)}.{part}" for module in modules)
        return tuple(map(WeightSource, names, shapes))

    of_down = tensors("lora_A.weight", repeat((own, adapters.in_features)))
    of_up = tensors("lora_B.weight", ((len(module.rows), own) for module in modules))
    of_magnitude = tensors("lora_magnitude_vector", ((len(module.rows),) for module in modules))
    found = [
        ParamSpec(adapters.down, down, of_down, init="kaiming", added=True),
        ParamSpec(adapters.up, up, of_up, init="zeros", added=True),
        ParamSpec(adapters.magnitude, (*stack, width), of_magnitude, kind="vector", init="zeros", added=True),
    ]
    return [param for param in found if param.name in adapters.params]


# -- which modules ---------------------------------------------------------------------------------------------------


def _targeted(model: ModelSpec, lora: LoRA) -> list[_Modules]:
    """Find the modules that have adapters, by layer. Raises ValueError for targets that mean none, or some that may not
    have them."""
    there = [
        {op: tuple(module for module, _ in _modules(model, layer, op)) for op in _adaptable(layer, lora)}
        for layer in model.layers
    ]
    meant = _meant(model, lora, [module for layer in there for modules in layer.values() for module in modules])
    targeted = list[_Modules]()
    for layer in there:
        # Where modules have the name of a tensor of all experts, it means them alone, as in PEFT.
        linear = {module.short for modules in layer.values() for module in modules if module.kind != "experts"}
        found = _Modules()
        for op, everything in layer.items():
            targets = [t for t in lora.targets if everything[0].kind != "experts" or t not in linear]
            modules = tuple(module for module in everything if any(module.name in meant[t] for t in targets))
            if modules:
                _check_kind(op, everything, modules, lora)
                found[op] = modules
        targeted.append(found)
    return targeted


def _adaptable(layer: LayerSpec, lora: LoRA) -> Iterator[_Target]:
    """List the ops of a layer, and linear layers inside of opaque ones and towers, that these targets may mean."""
    names = set(lora.targets) - {*KINDS}  # those of a kind are the text's, and a tower is traced to find its own
    for op in layer.ops if layer.kind == "block" or names else ():
        if isinstance(op, OpaqueBlock | PlaceRows):
            yield from op.linears
        elif isinstance(op, _Target) and layer.kind == "block":
            yield op


def _modules(model: ModelSpec, layer: LayerSpec, of: _Target | Adapters) -> Iterator[tuple[Module, WeightSource]]:
    """List the modules of a linear layer, experts or a router, with their weights, which the checkpoint has one by one.

    of: what multiplies with the weight, or its adapters.
    """
    is_router = of.is_router if isinstance(of, Adapters) else isinstance(of, Router)
    of_experts = of.experts is not None if isinstance(of, Adapters) else isinstance(of, GroupedLinear)
    start, width = 0, of.out_features
    for source in model.param_of(layer, of.weight).sources:
        name, kind = source.name.removesuffix(".weight"), "router" if is_router else "linear"
        if layer.kind != "block":
            name, kind = of.name, "tower"
        elif of_experts:
            kind = "experts" if len(source.shape) == 3 else "expert"
        end = start + (width if kind == "experts" else source.shape[1 if of.transposed else 0])
        yield Module(name, range(start, end), kind), source
        start = end % width  # of experts each has the same rows


def _meant(model: ModelSpec, lora: LoRA, modules: Sequence[Module]) -> dict[str, set[str]]:
    """Find the names of the modules that each target means: all of a kind, or those that it names or matches. A single
    word means modules of the text alone, where it has some.

    Raises: ValueError for one that is no expression, or that no module has.
    """
    short, edges = Counter(module.short for module in modules), edge_modules(model)
    names = {name for module in modules for name in module.names}.union(edges)
    of_tower, meant = {module.name for module in modules if module.kind == "tower"}, dict[str, set[str]]()
    for target in lora.targets:
        named = {target} if target in KINDS else _named_by(target, names)
        if target.isidentifier():
            named = named - of_tower or named
        meant[target] = {m.name for m in modules if not named.isdisjoint((*m.names, *MEANT_BY.get(m.kind, ())))}
        given = [edge for edge in edges if edge in named]
        frozen = [edge for edge in given if not any(edge.endswith(name) for name in lora.modules_to_save)]
        if frozen:
            raise ValueError(
                f"lora target {shown(target)} names {given[0]}: adapters of the embedding and the head are not built;"
                f" train it in full (modules_to_save={given[0].rpartition('.')[2]}) or leave it out, and merge an"
                " adapter that has some with PEFT (merge_and_unload) first"
            )
        if not meant[target] and not given:
            guess = did_you_mean(target, [ALL_LINEAR, *short])
            there = ", ".join(f"{name} ({count})" for name, count in short.items()) or "none"
            where = "'s blocks" if model.given is None else ""
            raise ValueError(
                f"lora target {shown(target)}: no linear layer of {model.name}{where} has that name{guess}; there are"
                f" {there}, and {ALL_LINEAR}, {ALL_EXPERTS} or {EVERYTHING} for all of a kind"
            )
    return meant


def _named_by(target: str, names: Collection[str]) -> frozenset[str]:
    """The names that a target is or ends, or that it matches as an expression. PEFT names some modules' parameters."""
    end = f".{target.removesuffix('.weight')}"
    return full_matches(target, names, "lora target") | {name for name in names if f".{name}".endswith(end)}


def _check_kind(op: _Target, everything: Sequence[Module], modules: Sequence[Module], lora: LoRA) -> None:
    """Raise ValueError for adapters that experts, routers and linear layers of opaque blocks cannot have."""
    first, opaque = modules[0], isinstance(op, OpaqueLinear)
    if first.kind == "linear" and not opaque:
        return
    counts = Counter(module.rows for module in everything)
    if any(counts[rows] != count for rows, count in Counter(module.rows for module in modules).items()):
        raise ValueError(
            f"lora targets name some experts of a layer, such as {first.name}; name all of them, by {first.short} or"
            f" {ALL_EXPERTS}"
        )
    plain = first.kind in ("experts", "router")
    asked = {"use_dora=True": lora.use_dora and (plain or opaque), f"dropout={lora.dropout}": lora.dropout > 0}
    asked[f"init={lora.init}"] = lora.init != "default" and plain
    wrong = [name for name, given in asked.items() if given]
    if wrong:
        whose = "opaque blocks" if opaque else "routers" if first.kind == "router" else "experts"
        raise ValueError(f"lora {wrong[0]} with adapters of {whose} ({first.name}) is not built; leave one out")


def _check(adapted: ModelSpec, lora: LoRA) -> None:
    """Raise ValueError for adapters that start with more of a weight than it has, and of modules trained in full."""
    found = list(adapters(adapted))
    names = [part.name for adapter in found for part in adapter.parts]
    assert len(names) == len(set(names)), "two tensors of adapters have one name in files"
    for name, shape in ((adapter.module.name, adapter.weight.shape[-2:]) for adapter in found):
        if lora.changes_base and lora.rank > min(shape):
            raise ValueError(
                f"lora_init={lora.init} with rank {lora.rank}: {name} has {shape[0]} x {shape[1]} weights, and"
                f" principal parts of rank {min(shape)} at the most; give a rank of at most {min(shape)}"
            )
        if is_saved(name, lora.modules_to_save, inside=True):
            raise ValueError(
                f"modules_to_save names {name}, which has an adapter; leave it out there or in the targets"
            )


class Adapter(NamedTuple):
    """The adapter of one module: the tensor of the checkpoint that it changes, and those of A and B, which hold the
    adapters of as many experts as that one has.

    transposed: the checkpoint holds the weight [in, out]. magnitude: that of the outputs' magnitudes, with DoRA.
    """

    module: Module
    weight: WeightSource
    transposed: bool
    down: WeightSource
    up: WeightSource
    magnitude: WeightSource | None = None

    @property
    def parts(self) -> tuple[WeightSource, ...]:
        """All tensors of the adapter."""
        return tuple(part for part in (self.down, self.up, self.magnitude) if part is not None)


def adapters(model: ModelSpec) -> Iterator[Adapter]:
    """List the adapters of a model in forward order; none where it has no adapters."""
    for layer in model.layers:
        inside = (own for op in layer.ops if isinstance(op, OpaqueBlock | PlaceRows) for own in op.adapters)
        beside = (op.adapters for op in layer.ops if isinstance(op, LoraDown | GLUDown) and not op.for_backward)
        for own in (*inside, *beside):
            adapted = [found for found in _modules(model, layer, own) if found[0].rows in own.rows]
            tensors = (model.param_of(layer, name).sources for name in own.params)
            for (module, weight), *parts in zip(adapted, *tensors, strict=True):
                yield Adapter(module, weight, own.transposed, *parts)


def _file_module(module: Module, nested: bool) -> str:
    """The module that files of adapters name for one of the checkpoint.

    PEFT wraps the module that has the tensors of all experts, once for each that has adapters. Granite's tensors have a
    module each.
    """
    if module.kind != "experts" or module.short not in STACKED.values():
        return module.name
    around = module.name.rpartition(".")[0]
    return f"{around}.base_layer" if nested and module.short == INNER else around
