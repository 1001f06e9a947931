"""Reads the fields of a Hugging Face config one by one, each checked against a type and a range.

People edit configs and downloads damage them. A wrong value is refused here, with the field, its value and what is
allowed, before anything is built from it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from flexengine.wording import shown

LARGEST = {
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "global_head_dim": 4096,
    "num_global_key_value_heads": 4096,
    "num_kv_shared_layers": 1024,
    "hidden_size_per_layer_input": 2**18,
    "top_k_experts": 64,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
    "sliding_window_pattern": 1024,
    "max_window_layers": 1024,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "num_experts_per_tok": 64,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "decoder_sparse_step": 1024,
    "full_attention_interval": 1024,
    "linear_num_key_heads": 4096,
    "linear_num_value_heads": 4096,
    "linear_key_head_dim": 4096,
    "linear_value_head_dim": 4096,
    "linear_conv_kernel_dim": 64,
    "mamba_n_heads": 4096,
    "mamba_n_groups": 4096,
    "mamba_d_head": 4096,
    "mamba_d_state": 4096,
    "mamba_d_conv": 64,
    "mamba_expand": 64,
    "q_lora_rank": 2**18,
    "kv_lora_rank": 2**18,
    "qk_nope_head_dim": 4096,
    "qk_rope_head_dim": 4096,
    "v_head_dim": 4096,
    "n_routed_experts": 4096,
    "n_shared_experts": 64,
    "n_group": 4096,
    "topk_group": 4096,
    "first_k_dense_replace": 1024,
    "moe_layer_freq": 1024,
    "num_nextn_predict_layers": 1024,
    "shared_intermediate_size": 2**20,
    "moe_topk": 64,
    "moe_k": 64,
    "moe_num_experts": 4096,
    "moe_num_shared_experts": 64,
    "moe_layer_start_index": 1024,
    "moe_layer_end_index": 1024,
    "moe_layer_interval": 1024,
    "no_rope_layer_interval": 1024,
    "index_topk": 2**24,
    "n_embd": 2**18,
    "n_inner": 2**20,
    "n_layer": 1024,
    "n_head": 4096,
    "n_positions": 2**24,
}
"""Largest value of each field: 8 to 40 times that of the largest published model (Llama 3.1 405B), or what an int32
position holds. A larger value means a damaged file; descriptions, plans and tables of such a size would fill memory.
"""

_REQUIRED: Any = object()  # None is a default that some fields have


class Fields:
    """Reads the object `values` of a config; `model` and `place` ("config.json", "rope_scaling") open every message.

    A field that is absent or null takes the default; only a switch reads null as false. Methods raise ValueError for
    values that they do not allow.
    """

    def __init__(self, model: str, values: Mapping[str, Any], place: str = "config.json") -> None:
        self.model, self.values, self.place = model, values, place

    def whole(self, name: str, default: Any = _REQUIRED, least: int = 1, other: str | None = None) -> Any:
        """Read a whole number from `least` to LARGEST[name]; the default is not checked.

        other: a second name that configs have for the field. Where both are stated they must be equal.
        """
        stated = other if other and other in self.values and self.values.get(name) is None else name
        if other and None not in (self.values.get(name), self.values.get(other)):
            self.check_told_once(name, other, self.values[name] == self.values[other])
        value = self._value(stated, default)
        if value is default:
            return default
        largest = LARGEST[name]
        # bool is a kind of int in Python, so isinstance would take true for 1.
        if type(value) is not int or not least <= value <= largest:
            raise self._error(stated, value, f"a whole number from {least} to {largest}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, low: float = 0.0, high: float = sys.float_info.max) -> Any:
        """Read a number in low..high as float; the default is not checked."""
        value = self._value(name, default)
        if value is default:
            return default
        if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
            raise self._error(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def switch(self, name: str, default: bool) -> bool:
        """Read true or false; null is false."""
        # transformers tests switches for truth, so that null turns a feature off whatever its default.
        value = self.values.get(name, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """Read a text; the default is not checked."""
        value = self._value(name, default)
        if value is not default and not isinstance(value, str):
            raise self._error(name, value, "a text")
        return value

    def numbers(self, name: str, count: int, low: float, high: float) -> list[float]:
        """Read a list of `count` numbers in low..high."""
        value = self._value(name, _REQUIRED)
        fits = isinstance(value, list) and len(value) == count
        if not fits or any(type(x) not in (int, float) or not low <= x <= high for x in value):
            raise self._error(name, value, f"a list of {count} numbers from {low:g} to {high:g}")
        return [float(x) for x in value]

    def nested(self, name: str) -> dict[str, Any]:
        """Read an object inside the config; {} if it is absent or null."""
        value = self._value(name, None)
        if value is not None and not isinstance(value, dict):
            raise self._error(name, value, "an object or null")
        return dict(value or {})

    def check_told_once(self, name: str, other: str, same: bool) -> None:
        """Raise ValueError unless two fields that say the same thing do so: readers take different ones of them."""
        if not same:
            raise ValueError(
                f"{self.model}: {self.place} has {name}={shown(self.values[name])} and {other}="
                f"{shown(self.values[other])}, which say the same thing in different ways. Remove the wrong one"
            )

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            found = "it is null" if name in self.values else "it is absent"
            raise ValueError(
                f"{self.model}: {self.place} lacks the field {name!r} ({found}), which this model needs; fetch the "
                "published config.json again"
            )
        return default

    def _error(self, name: str, value: Any, allowed: str) -> ValueError:
        return ValueError(
            f"{self.model}: {name}={shown(value)} in {self.place}; expected {allowed}. Correct it, or fetch the "
            "published config.json again"
        )
