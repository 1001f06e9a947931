"""Makes a model of transformers from a config, without memory for its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from torch import nn

from flexengine.models.opaque.remote_code import digest_of_code, not_trusted
from flexengine.models.unknown import is_encoder
from flexengine.wording import shown


def runs_opaque(name: str, config: dict[str, Any]) -> bool:
    """Tell whether a model of a type that is not native may run as opaque blocks.

    Raises: ValueError where only transformers is missing, or the model brings code of its own.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or is_encoder(config):
        return False
    if needs_code(config) and not digest_of_code(family):
        raise not_trusted(name, config)
    if find_spec("transformers") is None:
        raise ValueError(
            f"{name}: model_type {shown(family)} in config.json has no ops of its own here; it may run as opaque blocks"
            " of transformers: pip install transformers"
        )
    return bool(digest_of_code(family)) or _is_known(family)


def needs_code(config: dict[str, Any]) -> bool:
    """Tell whether a model that is not native has no code but that which its config names in its folder."""
    family = config.get("model_type")
    return bool(config.get("auto_map")) and isinstance(family, str) and not _is_known(family)


def _is_known(family: str) -> bool:
    """Tell whether transformers is there and has a causal language model of a type."""
    if find_spec("transformers") is None:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415, seconds

    return family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def empty_model(config: dict[str, Any], auto: str = "AutoModelForCausalLM", dtype: str = "float64") -> Any:
    """The model of a config in evaluation mode: parameters on the meta device, real buffers.

    auto: the class of transformers that finds the model's. Buffers in float64 are those that have the dtype of the
    model, unless `dtype` is one to compute in.

    Raises: what transformers raises for a config that it cannot read.
    """
    import transformers  # noqa: PLC0415, takes seconds, and few need it
    from transformers.initialization import no_init_weights  # noqa: PLC0415

    kind = type(transformers.AutoConfig.for_model(config["model_type"]))
    described = kind.from_dict(_plain(config))
    described.dtype = dtype  # of buffers as well, but for those of a dtype of their own
    with no_init_weights(), _parameters_on_meta():
        try:
            model = getattr(transformers, auto).from_config(described, attn_implementation="sdpa")
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = getattr(transformers, auto).from_config(described, attn_implementation="eager")
    model.tie_weights()  # what was put on the meta device one by one is one parameter again
    return model.eval()


def _plain(value: Any) -> Any:
    """A config with the numbers that JSON has no word for, which transformers writes as objects."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put every parameter on the meta device as soon as a module has it; those of layers are never all in memory."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and param.device.type != "meta":
            self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
