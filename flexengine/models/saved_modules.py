"""Describes a model with adapters of which some modules are trained in full: embedding, head, norms, routers, towers.

A module is named as PEFT's `modules_to_save` names it, by the end of its name; of a tower also one that holds others.
The embedding and the head go on as groups that the planner places, as towers do. Small modules of a block lie with its
adapters, which always live on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flexengine.models.spec import ADAPTER_CLASS, GroupSpec, LayerSpec, ModelSpec, ParamSpec, WeightSource
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.given_rows import PlaceRows, placing
from flexengine.ops.linear import Linear
from flexengine.ops.opaque import OpaqueBlock
from flexengine.wording import did_you_mean, shown


def with_saved_modules(model: ModelSpec, names: Sequence[str]) -> tuple[ModelSpec, set[int]]:
    """Take the named modules out of what is frozen; returns the groups that are trained in full beside adapters.

    model: with the groups of adapters, before anything is frozen. Raises: ValueError for a name that no module has, or
    that names linear layers of blocks, or some of the parameters that one op trains together.
    """
    if not names:
        return model, set()
    chosen = _chosen(model, names)
    _check_ops(model, chosen)
    whole: set[int] = set()
    for group in sorted({group for group, _ in chosen}):
        spec = model.groups[group]
        rest = [param for param in spec.params if (group, param.name) not in chosen]
        taken = [param for param in spec.params if (group, param.name) in chosen]
        if spec.slot_class != "block" and (not rest or any(param.kind == "matrix" for param in taken)):
            whole.add(group)
            model = _moved(model, group, rest, adapter=f"frozen.{spec.name}") if rest else model
        else:
            model = _moved(model, group, taken, adapter=f"adapter.{spec.name.rpartition('.')[2]}")
    return model, whole


def saved_tensors(model: ModelSpec) -> Iterator[tuple[str, WeightSource]]:
    """Pair the names that files of adapters have for tensors that are trained in full, with these.

    A tied embedding that is trained has the head's name as well. Those of towers have the names of transformers.
    """
    tower = _of_tower(model)
    for group in model.groups if model.lora is not None else ():
        for param in (p for p in group.params if not (group.frozen or p.added)):
            if param.name in tower and len(param.sources) == 1:
                yield param.name, param.sources[0]
                continue
            for source in param.sources:
                yield from _names_in_adapter(model, source)


def grown_tensors(model: ModelSpec) -> Iterator[tuple[str, WeightSource]]:
    """Pair the names that files of adapters have for frozen tensors with rows that the base lacks, with these."""
    for group in model.groups:
        for source in (s for p in group.params for s in p.sources if group.frozen and s.rows_in_file is not None):
            yield from _names_in_adapter(model, source)


def _names_in_adapter(model: ModelSpec, source: WeightSource) -> Iterator[tuple[str, WeightSource]]:
    yield source.name, source
    if model.tie_word_embeddings and source.name == model.embedding_source:
        yield model.head_source, source


def edge_tensors(model: ModelSpec) -> Iterator[tuple[str, WeightSource]]:
    """Pair the names that files of adapters have for a frozen embedding and head with these."""
    edges = (model.embedding_source, model.head_source)
    for group in model.groups:
        for source in (s for p in group.params for s in p.sources if group.frozen and s.name in edges):
            yield from _names_in_adapter(model, source)


def edge_modules(model: ModelSpec) -> tuple[str, str]:
    """The modules of the embedding and the head."""
    return _module(model.embedding_source), _module(model.head_source)


def saved_names(model: ModelSpec) -> list[str]:
    """What PEFT is to find these modules by: the names that were given, and a tied head beside its embedding."""
    assert model.lora is not None
    names = list(model.lora.modules_to_save)
    for name in (model.embedding_source, model.head_source) if model.tie_word_embeddings and names else ():
        module = _module(name)
        tied = any(source.name == model.embedding_source for _, source in saved_tensors(model))
        if tied and not any(module.endswith(given) for given in names):
            names.append(module.rpartition(".")[2])
    return names


def is_saved(module: str, names: Sequence[str], inside: bool = False) -> bool:
    """Whether names mean a module. inside: or one that it lies in, as those of towers do."""
    parts = module.split(".")
    outer = {".".join(parts[:end]) for end in range(1, len(parts))} if inside else set[str]()
    return any(one.endswith(name) for name in names for one in {module, *outer})


def _module(name: str) -> str:
    """The module that a tensor of the checkpoint belongs to."""
    return name.rpartition(".")[0]


def _modules(model: ModelSpec) -> dict[tuple[int, str], set[str]]:
    """The modules of every parameter of the model beneath adapters, by group and name."""
    tower = _of_tower(model)
    found = {
        (index, param.name): {
            _module(s.name) for s in param.sources if s.name.endswith((".weight", ".bias")) or param.name in tower
        }
        for index, group in enumerate(model.groups)
        for param in group.params
        if not (param.added or group.frozen)
    }
    if model.tie_word_embeddings:
        found[0, model.groups[0].params[0].name].add(_module(model.head_source))
    return found


def _of_tower(model: ModelSpec) -> set[str]:
    """Names of the parameters of what gives rows of images."""
    return set(placing(model.layers[0].ops).weights) if model.given is not None else set()


def _chosen(model: ModelSpec, names: Sequence[str]) -> set[tuple[int, str]]:
    modules, tower, chosen = _modules(model), _of_tower(model), set[tuple[int, str]]()
    for name in names:
        hits = {k for k, found in modules.items() if any(is_saved(m, [name], k[1] in tower) for m in found)}
        if not hits:
            short = list(
                dict.fromkeys(module.rpartition(".")[2] for of_param in modules.values() for module in sorted(of_param))
            )
            raise ValueError(
                f"modules_to_save {shown(name)}: no module of {model.name} has a name that ends so"
                f"{did_you_mean(name, short)}; there are {', '.join(short)}"
            )
        chosen |= hits
    return chosen


def _check_ops(model: ModelSpec, chosen: set[tuple[int, str]]) -> None:
    modules = _modules(model)
    for layer in model.layers:
        places = {local: (group, name) for local, group, name in layer.params}
        for op in layer.ops:
            linears = (
                op.linears if isinstance(op, OpaqueBlock) else [op] if isinstance(op, Linear | GroupedLinear) else []
            )
            products = [places[linear.weight] for linear in linears if places[linear.weight] in chosen]
            if products:
                raise ValueError(
                    f"modules_to_save names {min(modules[products[0]])}, a linear layer of a block, which has adapters"
                    " in mode lora; name it in the targets instead"
                )
            own = [places[name] for name in op.params if places[name] in modules]
            hit = [key for key in own if key in chosen]
            if hit and len(hit) < len(own) and not isinstance(op, OpaqueBlock | PlaceRows):
                together = sorted({module for key in own for module in modules[key]})
                raise ValueError(f"modules_to_save names some of {', '.join(together)}, which train together; name all")


def _moved(model: ModelSpec, group: int, params: Sequence[ParamSpec], adapter: str) -> ModelSpec:
    """Move parameters of a group into the group of this name, which stays on the GPU and may be new."""
    moved, spec = {param.name for param in params}, model.groups[group]
    groups = list(model.groups)
    groups[group] = replace(spec, params=tuple(param for param in spec.params if param.name not in moved))
    target = next((i for i, other in enumerate(groups) if other.name == adapter), len(groups))
    if target == len(groups):
        slot_class = ADAPTER_CLASS if spec.slot_class == "block" else f"{spec.slot_class} {ADAPTER_CLASS}"
        groups.append(GroupSpec(adapter, slot_class, tuple(params), adapter=True))
    else:
        groups[target] = replace(groups[target], params=(*params, *groups[target].params))

    def of_layer(layer: LayerSpec) -> LayerSpec:
        # A block's own group stays the first that its layer reads.
        own = [entry for entry in layer.params if entry[1] != group or entry[2] not in moved]
        others = [(local, target, name) for local, index, name in layer.params if index == group and name in moved]
        return replace(layer, params=(*own, *others)) if others else layer

    return replace(model, groups=tuple(groups), layers=tuple(of_layer(layer) for layer in model.layers))
