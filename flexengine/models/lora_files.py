"""Names adapted modules as PEFT looks for them in files of adapters, and tells which adapters PEFT cannot read.

transformers holds the experts of a layer in two tensors, also where checkpoints name them one by one. Of such families
PEFT takes every target called gate_proj, up_proj or down_proj for experts and turns it into these tensors
(`target_parameters`), also that of a dense FFN or a shared expert. These are found by the names of their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from flexengine.models.lora import INNER, STACKED, adapters
from flexengine.models.saved_modules import saved_names
from flexengine.models.spec import ModelSpec
from flexengine.models.wrappers import OLDER
from flexengine.ops.given_rows import placing
from flexengine.options.lora import Targets

TRANSLATED = (
    "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe",
    "glm4_moe", "hunyuan_v1_moe", "mellum", "minimax_m2", "solar_open", "glm4_moe_lite", "sarvam_mla", "sarvam_moe",
    "deepseek_v32", "glm_moe_dsa",
)  # fmt: skip
"""Families whose targets PEFT (0.21) turns into tensors of experts."""
CALLED_OTHERWISE = {
    "hy_v3": (".shared_mlp.", ".router."),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), (".block_sparse_moe.",)),
    "exaone": (".attn.", ".mlp."),
    "nemotron_h": (".mixer.",),
    "sarvam_moe": (".attention.",),
    **dict.fromkeys(("aria_text", "aria"), (".experts.",)),
}
"""Parts of names of modules that transformers calls by other names than checkpoints, and PEFT does not find."""
EXPERT = re.compile(r"\.(experts\.\d+\..*)")
"""The end of the name of a module of a single expert, which it has in every layer."""


def file_targets(model: ModelSpec) -> Targets:
    """Name what has adapters: modules and parameters, by the ends of their names where these are enough."""
    found, weights = list(adapters(model)), _weights(model)
    tensors = {adapter.weight.name for adapter in found if adapter.module.kind in ("experts", "router")}
    linear = {adapter.module.name for adapter in found if adapter.module.kind not in ("experts", "router")}
    experts = {module for module in linear if EXPERT.search(module)}
    by_parameter, stacked = _taken_for_experts(model, linear), set[str]()
    if model.family not in TRANSLATED and not _in_part({_end(module, 1) for module in experts}):
        # PEFT leaves these targets as they are, so that files name the tensors that transformers has.
        stacked, linear = {f"experts.{STACKED[_end(module, 1)]}" for module in experts}, linear - experts
    modules, of_tensors = linear - by_parameter, {name.removesuffix(".weight") for name in tensors}
    named = _shortest(modules, weights - modules, lambda module: [_end(module, 1), *EXPERT.findall(module)])
    of_parameters = _shortest(by_parameter, weights - linear, lambda module: [_end(module)])
    return Targets(
        {name.replace(OLDER["prefix"], "language_model") for name in named},  # the end of its name in transformers
        stacked | _shortest(tensors, weights - of_tensors, lambda name: [_end(name)])
        | {f"{module}.weight" for module in of_parameters},
        saved_names(model),
        [adapter.module.name for adapter in found],
        {name for name in stacked if name.endswith("gate_up_proj")},
        bool(experts),
    )  # fmt: skip


def _shortest(names: Collection[str], others: Collection[str], ends: Callable[[str], list[str]]) -> set[str]:
    """Name each by the first of its ends that no other module's name has, or in full where there is none."""
    taken = {end for other in others for end in (_end(other, 1), _end(other), *EXPERT.findall(other))}
    return {next((end for end in ends(name) if end.removesuffix(".weight") not in taken), name) for name in names}


def unread_by_peft(model: ModelSpec) -> str | None:
    """Tell which adapters of a model PEFT will not read from a file, and what to do; None where it reads all."""
    if model.lora is None:
        return None
    linear = {adapter.module.name for adapter in adapters(model)}
    of_experts = sorted({_end(module, 1) for module in linear if EXPERT.search(module)})
    taken = _taken_for_experts(model, linear)
    others = [m for m in sorted(linear) if any(part in f"{m}." for part in CALLED_OTHERWISE.get(model.family, ()))]
    if others:
        what = f"adapters of {others[0]}, which transformers calls otherwise"
    elif _in_part(of_experts):
        what = f"adapters of {' and '.join(of_experts)} of experts without those of their other products"
    elif of_experts and model.lora.use_dora:
        what = "DoRA of experts"
    elif taken and model.lora.use_dora:
        what = f"DoRA of {min(taken)}, since it takes modules of that name for those of experts"
    else:
        return None
    return f"PEFT does not read {what}; elsewhere than here use the merged model (--format merged)"


def _in_part(products: Collection[str]) -> bool:
    """Whether these products of experts have adapters and their others lack them, where PEFT stacks both."""
    return len(products) in (1, 2) and any(STACKED[name] == INNER for name in products)


def _taken_for_experts(model: ModelSpec, linear: Collection[str]) -> set[str]:
    """Those of the linear layers that PEFT would take for experts."""
    if model.family not in TRANSLATED:
        return set()
    return {module for module in linear if _end(module, 1) in STACKED and not EXPERT.search(module)}


def _weights(model: ModelSpec) -> set[str]:
    """All modules of the blocks that have a weight, and tensors of all experts of a layer; those of a tower that has
    adapters, too."""
    params = (param for layer in model.blocks for group in layer.groups for param in model.groups[group].params)
    names = [source.name for param in params if param.kind == "matrix" for source in param.sources]
    if model.given is not None and any(adapter.module.kind == "tower" for adapter in adapters(model)):
        names += [name for name in placing(model.layers[0].ops).weights if name.endswith(".weight")]
    return {name.removesuffix(".weight") for name in names}


def _end(name: str, parts: int = 2) -> str:
    return ".".join(name.rsplit(".", parts)[-parts:])
