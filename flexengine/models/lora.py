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
from itertools import repeat
from typing import Any, NamedTuple

from flexengine.checkpoint.expressions import full_matches
from flexengine.models.freezing import freeze_groups
from flexengine.models.lora_layers import with_adapters
from flexengine.models.saved_modules import edge_modules, is_saved, saved_tensors, with_saved_modules
from flexengine.models.spec import ADAPTER_CLASS, GroupSpec, LayerSpec, ModelSpec, ParamSpec, WeightSource, divided
from flexengine.ops.adapters.lora import LoraDown
from flexengine.ops.adapters.low_rank import AdaptedRows, Adapters, OfExperts
from flexengine.ops.base import Op
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.experts.router import Router
from flexengine.ops.given_rows import PlaceRows, placing
from flexengine.ops.linear import Linear
from flexengine.ops.opaque import OpaqueBlock, OpaqueLinear
from flexengine.options.lora import ALL_EXPERTS, ALL_LINEAR, EVERYTHING, KINDS, LoRA
from flexengine.wording import did_you_mean, shown

PEFT_PREFIX = "base_model.model."
"""What PEFT writes before the names of a model's modules."""


IN_ONE_TENSOR = "qwen3_5_moe"
"""The start of the families whose published checkpoints hold all experts of a layer in one tensor."""
INNER = "gate_up_proj"
"""Of both tensors of such experts, the one that PEFT wraps first."""
STACKED = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), INNER), **dict.fromkeys(("down_proj", "w2"), "down_proj")
}  # fmt: skip
"""Names of an expert's modules in checkpoints, and of the tensors that transformers stacks them in."""


_Target = Linear | GroupedLinear | Router | OpaqueLinear
"""An op, or a linear layer inside of one, whose weight adapters may change."""


class _Module(NamedTuple):
    """A module of a linear layer or of experts: its name in the checkpoint, or in transformers if it is in a tower, and
    the rows that it has of the weight.

    expert: whether it is one of an expert. one_tensor: it holds all experts of a layer. router: it is a router. tower:
    it is in a tower.
    """

    name: str
    rows: AdaptedRows
    expert: bool = False
    one_tensor: bool = False
    router: bool = False
    tower: bool = False

    @property
    def short(self) -> str:
        """Its own name, without those of the modules around it."""
        return self.name.rpartition(".")[2]


def with_lora(model: ModelSpec, lora: LoRA) -> ModelSpec:
    """Give the blocks of `model` adapters, and freeze all else.

    Raises: ValueError for a target that no linear layer of the blocks has, or adapters that cannot be.
    """
    named = with_named_experts(model)
    meant = _named_by_targets(named, lora)
    targeted = [_targeted(named, layer, lora, meant) for layer in named.layers]
    if any(modules[0].expert for found in targeted for modules in found.values()):
        model = named  # a checkpoint may hold experts without adapters one by one
    known: dict[tuple[tuple[Op, ...], tuple[Adapters, ...]], tuple[Op, ...]] = {}
    layers, groups = list(model.layers), list(model.groups)
    for index, (layer, found) in enumerate(zip(model.layers, targeted, strict=True)):
        if not found:
            continue
        own = {_adapters(op, modules, lora): modules for op, modules in found.items()}
        # Equal blocks must go on sharing one tuple of ops: everything derived from ops is cached by it.
        key = (layer.ops, tuple(own))
        if key not in known:
            known[key] = with_adapters(layer.ops, {each.name: each for each in own}, lora.dropout)
        nested = sum(modules[0].one_tensor for modules in found.values()) == 2
        params = tuple(param for each, modules in own.items() for param in _params(each, modules, nested))
        there = tuple((param.name, len(groups), param.name) for param in params)
        layers[index] = replace(layer, ops=known[key], params=(*layer.params, *there))
        name, together = f"adapter.{layer.name.rpartition('.')[2]}", any(m[0].one_tensor for m in found.values())
        divisions, cut = (1, ()) if together else divided(known[key], params)
        if layer.kind == "block":
            groups.append(GroupSpec(name, ADAPTER_CLASS, params, divisions=divisions, cut=cut, adapter=True))
        else:  # a tower's are planned as its weights are
            groups.append(GroupSpec("adapter.tower", f"tower {ADAPTER_CLASS}", params))
    given = placing(layers[0].ops).given if model.given is not None else None
    adapted = replace(model, lora=lora, groups=tuple(groups), layers=tuple(layers), given=given)
    _check(adapted, lora)
    beneath = set(range(len(model.groups)))
    adapted, whole = with_saved_modules(adapted, lora.modules_to_save)
    beneath |= {i for i, group in enumerate(adapted.groups) if group.name.startswith("frozen.")}
    return freeze_groups(adapted, beneath - whole)


def _adapters(op: _Target, modules: Sequence[_Module], lora: LoRA) -> Adapters:
    """Describe the adapters of an op's modules."""
    experts = None
    if isinstance(op, GroupedLinear):
        experts = OfExperts(op.num_experts, op.per_token, op.bounds, modules[0].one_tensor)
    rows = tuple(dict.fromkeys(module.rows for module in modules))
    sizes = (op.in_features, op.out_features, lora.rank, lora.scale, rows)
    return Adapters(op.name, op.weight, *sizes, op.transposed, lora.use_dora, experts, isinstance(op, Router))


def _params(adapters: Adapters, modules: Sequence[_Module], nested: bool) -> list[ParamSpec]:
    """Describe A and B of the adapters of a linear layer or of experts, and their magnitudes.

    nested: both products of experts in one tensor have adapters.
    """
    width, rank, of = adapters.adapted_features, adapters.rank, adapters.experts
    stack, together = () if of is None else (of.num_experts,), of is not None and of.one_tensor
    own = rank * math.prod(stack) if together else rank
    heights = [module.rows.end - module.rows.start for module in modules]

    def param(
        name: str, shape: tuple[int, ...], part: str, shapes: Iterable[tuple[int, ...]], **rest: Any
    ) -> ParamSpec:
        names = (f"{PEFT_PREFIX}{_file_module(module, nested)}.{part}" for module in modules)
        return ParamSpec(name, shape, tuple(map(WeightSource, names, shapes)), added=True, **rest)

    down, up = (*stack, adapters.width, adapters.in_features), (width, own) if together else (*stack, width, rank)
    found = [
        param(adapters.down, down, "lora_A.weight", repeat((own, adapters.in_features)), init="kaiming"),
        param(adapters.up, up, "lora_B.weight", ((height, own) for height in heights), init="zeros"),
    ]
    if adapters.has_magnitude:
        vectors, shape = ((height,) for height in heights), (*stack, width)
        found.append(param(adapters.magnitude, shape, "lora_magnitude_vector", vectors, kind="vector", init="zeros"))
    return found


# -- which modules ---------------------------------------------------------------------------------------------------


_Meant = dict[str, frozenset[str]]
"""Names that targets mean, by target, but for those of all of a kind. A single word means modules of the text alone,
where it has some."""


def _targeted(model: ModelSpec, layer: LayerSpec, lora: LoRA, meant: _Meant) -> dict[_Target, tuple[_Module, ...]]:
    """Find the linear layers, experts and routers of a block that have targets, with these."""
    of_op = {op: tuple(_modules(model, layer, op)) for op in _adaptable(layer, lora)}
    # Where modules have the name of a tensor of all experts, it means them alone, as in PEFT.
    linear = {module.short for modules in of_op.values() for module in modules if not module.one_tensor}
    found: dict[_Target, tuple[_Module, ...]] = {}
    for op, everything in of_op.items():
        targets = [t for t in lora.targets if not (everything[0].one_tensor and t in linear)]
        modules = tuple(m for m in everything if any(_hits(t, m, meant) for t in targets))
        if modules:
            _check_kind(op, everything, modules, lora)
            found[op] = modules
    return found


def _adaptable(layer: LayerSpec, lora: LoRA) -> Iterator[_Target]:
    """List the ops of a layer, and linear layers inside of opaque ones and towers, that these targets may mean."""
    names = set(lora.targets) - {*KINDS}  # those of a kind are the text's, and a tower is traced to find its own
    for op in layer.ops if layer.kind == "block" or names else ():
        if isinstance(op, OpaqueBlock | PlaceRows):
            yield from op.linears
        elif isinstance(op, _Target) and layer.kind == "block":
            yield op


def _check_kind(op: _Target, everything: Sequence[_Module], modules: Sequence[_Module], lora: LoRA) -> None:
    """Raise ValueError for adapters that experts, routers and linear layers of opaque blocks cannot have."""
    first, opaque = modules[0], isinstance(op, OpaqueLinear)
    if not (first.expert or first.router or opaque):
        return
    counts = Counter(module.rows for module in everything)
    if any(counts[rows] != count for rows, count in Counter(module.rows for module in modules).items()):
        raise ValueError(
            f"lora targets name some experts of a layer, such as {first.name}; name all of them, by {first.short} or"
            f" {ALL_EXPERTS}"
        )
    plain = first.one_tensor or first.router
    asked = {"use_dora=True": lora.use_dora and (plain or opaque), f"dropout={lora.dropout}": lora.dropout > 0}
    asked[f"init={lora.init}"] = lora.init != "default" and plain
    wrong = [name for name, given in asked.items() if given]
    if wrong:
        whose = "opaque blocks" if opaque else "routers" if first.router else "experts"
        raise ValueError(f"lora {wrong[0]} with adapters of {whose} ({first.name}) is not built; leave one out")


def _modules(model: ModelSpec, layer: LayerSpec, op: _Target) -> Iterator[_Module]:
    """List the modules of a linear layer, experts or a router, whose weights the checkpoint has one by one."""
    group, name = next((group, name) for local, group, name in layer.params if local == op.weight)
    for source, rows in _spans(_sources(model, group, name), op.out_features, op.transposed):
        kinds = (isinstance(op, GroupedLinear), len(source.shape) == 3, isinstance(op, Router))
        tower = layer.kind != "block"
        yield _Module(op.name if tower else source.name.removesuffix(".weight"), rows, *kinds, tower)


def _spans(
    sources: Sequence[WeightSource], out_features: int, transposed: bool
) -> Iterator[tuple[WeightSource, AdaptedRows]]:
    """Pair the sources of a weight with the columns of its output that they make; experts' by expert."""
    start = 0
    for source in sources:
        if len(source.shape) == 3:
            yield source, AdaptedRows(0, out_features)
            continue
        end = start + source.shape[1 if transposed else 0]
        yield source, AdaptedRows(start, end)
        start = end % out_features


def _hits(target: str, module: _Module, meant: _Meant) -> bool:
    """Whether a target means a module: all of a kind, its name or the end of it, or an expression for the whole
    name."""
    if target in KINDS:
        own = not (module.router or module.tower)
        return own and (target == EVERYTHING or module.expert == (target == ALL_EXPERTS))
    return not meant[target].isdisjoint(_names(module))


def _names(module: _Module) -> list[str]:
    """The names by which targets may mean a module: its own, and that of the tensor that transformers has it in."""
    if module.expert and not module.one_tensor:
        return [module.name, f"{module.name.rsplit('.', 2)[0]}.{STACKED[module.short]}"]
    return [module.name]


def _named_by(target: str, names: Collection[str]) -> frozenset[str]:
    """The names that a target is or ends, or that it matches as an expression. PEFT names some modules' parameters."""
    end = f".{target.removesuffix('.weight')}"
    return full_matches(target, names, "lora target") | {name for name in names if f".{name}".endswith(end)}


def _named_by_targets(model: ModelSpec, lora: LoRA) -> _Meant:
    """Find what targets mean. Raises ValueError for one that is no expression, or that no module has."""
    targets = ((layer, op) for layer in model.layers for op in _adaptable(layer, lora))
    modules = [module for layer, op in targets for module in _modules(model, layer, op)]
    short = Counter(module.short for module in modules)
    names = {name for module in modules for name in _names(module)}.union(edge_modules(model))
    of_tower, meant = {module.name for module in modules if module.tower}, _Meant()
    for target in lora.targets:
        if target not in KINDS:
            meant[target] = _named_by(target, names)
            own = meant[target] - of_tower
            meant[target] = own if own and target.isidentifier() else meant[target]
        hit = any(_hits(target, module, meant) for module in modules)
        edges = [module for module in edge_modules(model) if module in meant.get(target, ())]
        trained = [module for module in edges if any(module.endswith(name) for name in lora.modules_to_save)]
        if len(trained) < len(edges):
            raise ValueError(
                f"lora target {shown(target)} names {edges[0]}: adapters of the embedding and the head are not built;"
                f" train it in full (modules_to_save={edges[0].rpartition('.')[2]}) or leave it out, and merge an"
                " adapter that has some with PEFT (merge_and_unload) first"
            )
        if not hit and not trained:
            guess = did_you_mean(target, [ALL_LINEAR, *short])
            there = ", ".join(f"{name} ({count})" for name, count in short.items()) or "none"
            where = "'s blocks" if model.given is None else ""
            raise ValueError(
                f"lora target {shown(target)}: no linear layer of {model.name}{where} has that name{guess}; there are"
                f" {there}, and {ALL_LINEAR}, {ALL_EXPERTS} or {EVERYTHING} for all of a kind"
            )
    return meant


def _check(adapted: ModelSpec, lora: LoRA) -> None:
    """Raise ValueError for adapters that start with more of a weight than it has, and of modules trained in full."""
    found = list(adapters(adapted))
    names = [part.name for adapter in found for part in adapter.parts]
    assert len(names) == len(set(names)), "two tensors of adapters have one name in files"
    for adapter in found:
        rows, columns = adapter.weight.shape[-2:]
        if lora.changes_base and lora.rank > min(rows, columns):
            raise ValueError(
                f"lora_init={lora.init} with rank {lora.rank}: {adapter.module} has {rows} x {columns} weights, and"
                f" principal parts of rank {min(rows, columns)} at the most; give a rank of at most"
                f" {min(rows, columns)}"
            )
        if is_saved(adapter.module, lora.modules_to_save, inside=True):
            raise ValueError(
                f"modules_to_save names {adapter.module}, which has an adapter; leave it out there or in the targets"
            )


class Adapter(NamedTuple):
    """The adapter of one module: the tensor of the checkpoint that it changes, and those of A and B.

    transposed: the checkpoint holds the weight [in, out]. magnitude: that of the outputs' magnitudes, with DoRA.
    experts: where one tensor holds so many experts' weights, those of A and B hold their adapters; else 0. router:
    whether it is that of a router. inside: the name of a tower's module in transformers, by which files name it.
    """

    weight: WeightSource
    down: WeightSource
    up: WeightSource
    transposed: bool
    magnitude: WeightSource | None = None
    experts: int = 0
    router: bool = False
    inside: str = ""

    @property
    def parts(self) -> tuple[WeightSource, ...]:
        """All tensors of the adapter."""
        return tuple(part for part in (self.down, self.up, self.magnitude) if part is not None)

    @property
    def module(self) -> str:
        """The module's name in the checkpoint, or in a tower."""
        return self.inside or self.weight.name.removesuffix(".weight")


def adapters(model: ModelSpec) -> Iterator[Adapter]:
    """List the adapters of a model in forward order; none where it has no adapters."""
    for layer in model.layers:
        named = {local: (group, name) for local, group, name in layer.params}
        for own in adapters_in(layer.ops):
            weights, down, up = (_sources(model, *named[name]) for name in (own.weight, own.down, own.up))
            adapted = [source for source, rows in _spans(weights, own.out_features, own.transposed) if rows in own.rows]
            magnitudes = _sources(model, *named[own.magnitude]) if own.has_magnitude else [None] * len(adapted)
            experts = own.experts.num_experts if own.experts is not None and own.experts.one_tensor else 0
            for weight, a, b, magnitude in zip(adapted, down, up, magnitudes, strict=True):
                inside = "" if layer.kind == "block" else own.name
                yield Adapter(weight, a, b, own.transposed, magnitude, experts, own.is_router, inside)


def adapters_in(ops: Sequence[Op]) -> Iterator[Adapters]:
    """List the adapters of a layer in forward order."""
    for op in ops:
        if isinstance(op, OpaqueBlock | PlaceRows):
            yield from op.adapters
        elif isinstance(op, LoraDown) and not op.for_backward:
            yield op.adapters


def with_named_experts(model: ModelSpec) -> ModelSpec:
    """Name the experts' weights of a family as its published checkpoints do, whose tensors adapters are named by."""
    if not model.family.startswith(IN_ONE_TENSOR):
        return model

    def fused(param: ParamSpec) -> ParamSpec:
        return param if param.fused is None else replace(param, sources=(param.fused,))

    groups = (replace(group, params=tuple(fused(param) for param in group.params)) for group in model.groups)
    return replace(model, groups=tuple(groups))


def _file_module(module: _Module, nested: bool) -> str:
    """The module that files of adapters name for one of the checkpoint.

    PEFT wraps the module that has the tensors of all experts, once for each that has
    adapters. Granite's tensors have a module each.
    """
    if not module.one_tensor or module.short not in STACKED.values():
        return module.name
    around = module.name.rpartition(".")[0]
    return f"{around}.base_layer" if nested and module.short == INNER else around


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
