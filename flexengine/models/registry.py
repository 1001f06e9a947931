"""Turns what a person names, a folder, an id on the hub or preset:NAME, into a ModelSpec.

No other module knows which families exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flexengine.checkpoint.manifest import DownloadError, check_acted_on
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.models import (
    deepseek,
    gemma4,
    gpt2,
    gpt_oss,
    llama,
    moe,
    qwen_next,
    variants,
    with_images,
)
from flexengine.models.any_family import dropout_notice, refuse_embeddings, refuse_other_tasks, refuse_unsupported
from flexengine.models.checkpoints import open_checkpoint, reads_as_it_is
from flexengine.models.opaque.loading import needs_code, runs_opaque
from flexengine.models.opaque.remote_code import not_trusted, trust
from flexengine.models.outside import load_families
from flexengine.models.preset_files import ASSETS, PRESET_PREFIX, preset_names, preset_of
from flexengine.models.quantised_weights import as_quantised, quantised_by, without_quantisation
from flexengine.models.sizes import with_class_defaults
from flexengine.models.spec import ModelSpec
from flexengine.models.task_heads import read_head, with_task_head
from flexengine.models.unknown import unknown_family
from flexengine.models.usual_rows import USUAL
from flexengine.models.variant import Variant, any_config
from flexengine.models.variant_rows import VARIANTS
from flexengine.models.wrappers import WRAPPERS
from flexengine.wording import did_you_mean, hub_model, parse_json, shown


class Family(NamedTuple):
    """One Hugging Face `model_type`.

    checkpoints: published ones that load. options: what its block has beside Llama's. configs_compared: tiny configs
    that tests compare with transformers, parameter by parameter. quantised: each `quant_method` that it reads, beside
    NF4, which all read. outside: whether `register_family` added it. covers: whether a config of the type is one of
    those that `build` describes; others run as opaque blocks.
    """

    build: Callable[[str, dict], ModelSpec]
    checkpoints: str
    options: str
    configs_compared: int
    quantised: tuple[str, ...] = ()
    outside: bool = False
    covers: Callable[[dict], bool] = any_config


def _of_rows(rows: Mapping[str, Variant]) -> dict[str, Family]:
    return {
        name: Family(
            variants.build, row.checkpoints, row.options, row.configs_compared, row.quantised, covers=row.covers
        )
        for name, row in rows.items()
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(
        llama.build,
        "Llama 2, 3, 3.1, 3.2, 3.3, CodeLlama, Yi, DeepSeek-LLM, SmolLM",
        "grouped queries, biases, linear, dynamic, llama3, yarn and longrope scaling",
        14,
    ),
    **_of_rows(USUAL),
    "gemma4_text": Family(
        gemma4.build,
        "Gemma 4 31B, 26B-A4B (text)",
        "as Gemma 3; normalised values, wider heads in layers without a window, whose values may be their keys, a "
        "factor on each layer; experts beside the dense FFN",
        3,
    ),
    "gemma4_unified_text": Family(gemma4.build, "Gemma 4 12B (text)", "as gemma4_text, without experts", 1),
    "mixtral": Family(moe.build, "Mixtral 8x7B, 8x22B", "experts; the weights of a token's experts add up to 1", 3),
    "olmoe": Family(moe.build, "OLMoE", "experts; queries and keys normalised by row", 3),
    "qwen2_moe": Family(moe.build, "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", "experts and a gated shared expert; biases", 4),
    "qwen3_moe": Family(
        moe.build, "Qwen3-30B-A3B, Qwen3-235B-A22B", "experts; queries and keys normalised by head", 4, ("fp8",)
    ),
    "deepseek_v2": Family(
        deepseek.build,
        "DeepSeek-V2, V2-Lite, Coder-V2",
        "latent attention; experts in groups beside shared ones; dense layers first",
        3,
        quantised=("fp8",),
    ),
    "deepseek_v3": Family(
        deepseek.build,
        "DeepSeek-V3, V3.1, R1, Moonlight",
        "as DeepSeek-V2; experts chosen by sigmoids and a bias that is not trained",
        4,
        quantised=("fp8",),
    ),
    "gpt_oss": Family(
        gpt_oss.build,
        "gpt-oss-20b, gpt-oss-120b",
        "experts with biases and clamped units, attention sinks, alternating windows; MXFP4 is read",
        4,
        ("mxfp4",),
    ),
    "qwen3_next": Family(
        qwen_next.build,
        "Qwen3-Next-80B-A3B",
        "linear attention in most layers, gated attention in the others; experts and a gated shared expert",
        3,
    ),
    "qwen3_5_text": Family(qwen_next.build, "Qwen3.5, Qwen3.6 (dense, text)", "as qwen3_next, with a dense FFN", 3),
    "qwen3_5_moe_text": Family(qwen_next.build, "Qwen3.5, Qwen3.6 (experts, text)", "as qwen3_next", 3),
    "gpt2": Family(gpt2.build, "GPT-2", "LayerNorm, learned positions, GELU, weights input by output", 3),
    "gpt-sw3": Family(gpt2.build, "GPT-SW3", "as gpt2, which its configs call themselves", 0),
    **_of_rows(VARIANTS),
    **{
        name: Family(with_images.build, f"{row.checkpoints}: the text", f"as `{row.text}`; {with_images.BESIDE}", 1)
        for name, row in WRAPPERS.items()
    },
}


def register_family(
    model_type: str,
    build: Callable[[str, dict], ModelSpec],
    *,
    checkpoints: str = "",
    options: str = "",
    quantised: tuple[str, ...] = (),
) -> None:
    """Add a family from outside of the package; its models then plan, train and export as those of any other.

    model_type: as config.json has it. build(name, config): describes a model of such a config, and raises ValueError
    for what it cannot describe (docs/families.md). checkpoints, options: what `flexengine models` says of it.
    quantised: each `quant_method` that it reads, beside NF4. A second call replaces what the first one registered.
    Raises: ValueError for a type that the package has itself, or one that is no name.
    """
    known = FAMILIES.get(model_type)
    if not isinstance(model_type, str) or not model_type.strip() or not callable(build):
        raise ValueError(f"register_family({model_type!r}, {build!r}): give the model_type and a function")
    if known is not None and not known.outside:
        raise ValueError(f"register_family({model_type!r}): the package has this family; take another model_type")
    FAMILIES[model_type] = Family(build, checkpoints, options, 0, quantised, outside=True)


ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
"""Modules that checkpoints in FP8 hold in 16 bits, and some leave out where they name such modules."""
NOT_QUANTISED = "config.json says that the weights are quantised, but they are not: they are read as they are"
MAX_CONFIG_BYTES = 2**24
"""Largest config.json that is read; published ones have a few KiB."""
MAX_PARAMETERS = 2**43
"""Largest model, 8.8 * 10**12 parameters: its training state would fill 100 TiB, and byte counts stay below 2**63."""


class ModelSource(NamedTuple):
    """Where a model comes from.

    weights_folder: None for random initial weights. support_folder: with files such as the tokenizer, if there are any.
    new_tokens: that are added to the tokenizer. texts: files, by name, that an export has in place of those in
    support_folder. other_tokenizer: a folder with the tokenizer and chat template to use, such as that of an adapter.
    """

    spec: ModelSpec
    weights_folder: Path | None
    support_folder: Path | None
    new_tokens: tuple[str, ...] = ()
    texts: Mapping[str, str] | None = None
    other_tokenizer: Path | None = None

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder with the tokenizer and the chat template that the model is trained with."""
        return self.other_tokenizer or self.support_folder


def build_model(name: str, config: Any) -> ModelSpec:
    """Describe the model of a Hugging Face config.

    Raises ValueError when it is no object, of an unknown family, quantised, asks for what no family has, lacks a field,
    or holds a value outside models/fields.py:LARGEST or sizes that come to more than MAX_PARAMETERS.
    """
    if not isinstance(config, dict):
        found = type(config).__name__
        raise ValueError(f"{name}: config.json holds a {found}, expected an object of fields; fetch it again")
    family = config.get("model_type")
    if not isinstance(family, str):
        raise unknown_family(name, family, config)
    if family not in FAMILIES:
        load_families()
    native = FAMILIES.get(family)
    native = native if native is None or native.covers(config) else None
    if native is None and not runs_opaque(name, config):
        raise unknown_family(name, family, config)
    # Refusals come before the builder: it would read a config that asks for something else without noticing.
    method = quantised_by(name, config, () if native is None else native.quantised)
    refuse_other_tasks(name, config)
    refuse_unsupported(name, config)
    head = read_head(name, config)
    spec = _opaque(name, config) if native is None else native.build(name, with_class_defaults(family, config))
    spec = spec if head is None else with_task_head(spec, head)
    spec = as_quantised(spec, config, method, plain=ROUTERS)
    notice = "; ".join(filter(None, (spec.notice, dropout_notice(name, config))))
    # The config as it was read, without class defaults: the export writes it back.
    spec = replace(spec, hf_config=config, notice=notice)
    # Sizes within their ranges may still multiply to more than any machine holds.
    if spec.num_parameters > MAX_PARAMETERS:
        raise ValueError(
            f"{name}: the sizes in config.json come to {spec.num_parameters} parameters, more than the "
            f"{MAX_PARAMETERS} that are supported; one of them must be wrong: hidden_size={spec.hidden_size}, "
            f"num_hidden_layers={len(spec.blocks)}, vocab_size={spec.vocab_size}"
        )
    return spec


def _opaque(name: str, config: dict[str, Any]) -> ModelSpec:
    """Describe a model of a type without ops of its own. Raises ValueError, saying what is in the way."""
    from flexengine.models.opaque.description import build  # noqa: PLC0415, needs transformers

    try:
        return build(name, config)
    except Exception as error:  # transformers raises all kinds for configs that it cannot read
        raise unknown_family(name, config["model_type"], config, f"{type(error).__name__}: {error}") from error


def open_model(path_or_preset: str | Path, needs_weights: bool = True, trust_remote_code: bool = False) -> ModelSource:
    """Read the description of a Hugging Face folder, of a model on the hub or of a preset. Loads no weights.

    An id, as ORG/NAME or ORG/NAME@REVISION, means the hub where there is no such folder: the files are fetched into its
    cache first. trust_remote_code: code that the folder brings is run, where there is no other for its type. Raises
    ValueError when the name is empty, when there is no such preset, folder or id, when config.json
    is missing or unreadable, when there are no safetensors weights (with needs_weights=False a config.json is enough),
    or when a file that is read beside them is not what the manifest of the folder says.
    """
    text = str(path_or_preset)
    if not text.strip():
        raise ValueError(f"--model is empty: give a Hugging Face model folder, an id on the hub or {PRESET_PREFIX}NAME")
    if text.startswith(PRESET_PREFIX):
        return _open_preset(text.removeprefix(PRESET_PREFIX))
    folder, name = _folder_of(text, needs_weights)
    config = _read_config(folder)
    check_acted_on(folder)
    refuse_embeddings(name, folder)
    config = _as_stored(folder, config)
    if isinstance(config, dict) and str(config.get("model_type")) not in FAMILIES and needs_code(config):
        if not trust_remote_code:
            raise not_trusted(name, config)
        trust(name, _with_code(folder, text), config)
    # Planning needs the config alone, so the weights may be missing there.
    if not needs_weights and (name != folder.name or not any(folder.glob("*.safetensors"))):
        return ModelSource(build_model(name, config), None, folder)
    if not any(folder.glob("*.safetensors")):
        found = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pth", ".pt", ".gguf"))[:3]
        raise ValueError(
            f"model folder {folder} has a config.json but no *.safetensors file"
            f"{' (found ' + ', '.join(found) + ', which must be converted first)' if found else ''};"
            " download the weights first: flexengine download model ORG/NAME --target DIR, or train from scratch with"
            " --init random"
        )
    return ModelSource(_with_weights(folder, name, config, needs_weights), folder, folder)


def _with_code(folder: Path, text: str) -> Path:
    """The folder with the Python files of a model's repository."""
    if hub_model(text) is None:
        return folder
    from flexengine.checkpoint.hub_cache import cached_code  # noqa: PLC0415, a client that few need

    try:
        return cached_code(text)
    except DownloadError as error:
        raise ValueError(f"model {text}: its code is not to be had from the hub: {error}") from None


def _as_stored(folder: Path, config: Any) -> Any:
    """State what a config leaves open and the names of the checkpoint's tensors tell. Reads headers only."""
    if not with_images.leaves_open(config) or not any(folder.glob("*.safetensors")):
        return config
    try:
        with CheckpointReader.open(folder) as reader:
            return with_images.as_stored(config, {name: entry.shape for name, entry in reader.tensors.items()})
    except CheckpointError:  # told where the weights are read
        return config


def _folder_of(text: str, needs_weights: bool) -> tuple[Path, str]:
    """Find the folder of a model, and its name; for an id on the hub, its place in the hub's cache."""
    on_hub, folder = hub_model(text), Path(text)
    if folder.suffix.lower() == ".gguf" and folder.is_file():
        from flexengine.models.gguf.read import converted  # noqa: PLC0415, an extra

        return converted(folder, build_model), folder.stem
    if on_hub is None:
        return folder, folder.name
    from flexengine.checkpoint.hub_cache import cached_model  # noqa: PLC0415, a client that few need

    try:
        return cached_model(text, needs_weights), on_hub["name"]
    except DownloadError as error:
        preset = preset_of(on_hub["name"])
        shape = f"\n  {PRESET_PREFIX}{preset} is its shape with random weights" if preset else ""
        raise ValueError(f"model {text}: no such folder, and not to be had from the hub: {error}{shape}") from None


def _with_weights(folder: Path, name: str, config: Any, needs_weights: bool) -> ModelSpec:
    """Describe a model by its config and, where that says that the weights are quantised, by what these are.

    needs_weights: a damaged checkpoint is refused, too. Reads headers only.
    """
    stated = without_quantisation(config) if isinstance(config, dict) else config
    if stated == config:
        return build_model(name, config)
    try:
        # Fine-tunes are saved in 16 bits with the config of the quantised model that they began with.
        plain = build_model(name, stated)
        if reads_as_it_is(plain, folder):
            return replace(plain, notice="; ".join(filter(None, (plain.notice, NOT_QUANTISED))))
        spec = build_model(name, config)
        with open_checkpoint(spec, folder) as reader:
            return spec.named_as(reader.tensors)
    except CheckpointError:
        if needs_weights:
            raise
    return build_model(name, config)


def open_initial(
    path_or_preset: str | Path, init: Literal["checkpoint", "random"], needs_weights: bool = True,
    trust_remote_code: bool = False,
) -> ModelSource:  # fmt: skip
    """Read the description of a model that is trained from its weights, or from random ones.

    needs_weights: False for a plan alone. trust_remote_code: as of `open_model`. Raises ValueError as `open_model`, and
    for random weights where the folder has some that would be passed over.
    """
    source = open_model(path_or_preset, needs_weights and init == "checkpoint", trust_remote_code)
    if init == "random" and source.weights_folder is not None:
        raise ValueError(
            f"init is random, but model folder {source.weights_folder} has weights; leave --init out to train these, or"
            " give a folder with its config.json and tokenizer files alone"
        )
    return source


def _open_preset(name: str) -> ModelSource:
    if name == "demo":
        return ModelSource(build_model("demo", _read_config(ASSETS / "demo")), None, ASSETS / "demo")
    found, known = preset_of(name), preset_names()
    if found is None:
        meant = did_you_mean(name, known) or ";"
        raise ValueError(f"unknown preset {shown(name)}{meant} known presets: {', '.join(known)}")
    path = ASSETS / "presets" / f"{found}.json"
    return ModelSource(build_model(name, json.loads(path.read_text())), None, None)


def _read_config(folder: Path) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(_no_config(folder))
    if (num_bytes := path.stat().st_size) > MAX_CONFIG_BYTES:
        raise ValueError(f"{path} has {num_bytes} bytes, a config at most {MAX_CONFIG_BYTES}; fetch the file again")
    return parse_json(path.read_bytes(), path)


def _no_config(folder: Path) -> str:
    """Tell what was found instead of a model folder, and which names come closest."""
    name = str(folder)
    if folder.is_file():
        return f"model {name} is a file; give the folder that holds config.json and the weights"
    if folder.is_dir():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        return f"model folder {name} has no config.json (found {found}); give the folder of a Hugging Face model"
    meant = did_you_mean(PRESET_PREFIX + folder.name, [PRESET_PREFIX + preset for preset in preset_names()])
    return (
        f"model {name}: no such folder{meant}\n  give a Hugging Face model folder, an id on the hub (ORG/NAME) or "
        f"{PRESET_PREFIX}NAME, such as {PRESET_PREFIX}demo, which has random weights"
    )
