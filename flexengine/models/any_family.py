"""Checks what the config of any family may state: features that none can train, and dropout, which all leave out."""

from __future__ import annotations

from flexengine.models.fields import Fields

DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")


def refuse_unsupported(name: str, config: dict) -> None:
    """Raise ValueError if a config attends to later tokens, also in its part on the text."""
    for fields in _described(name, config):
        for switch, harmless in (("is_causal", True), ("use_bidirectional_attention", False)):
            if fields.switch(switch, harmless) is not harmless:
                raise ValueError(
                    f"{name}: {switch}={str(not harmless).lower()} in config.json: tokens see later ones, which a "
                    "causal language model is not trained with. Give a model without it"
                )


def dropout_notice(name: str, config: dict) -> str:
    """Tell which dropout of a config is left out; empty if the config asks for none."""
    found = {
        field: rate for fields in _described(name, config) for field in DROPOUTS if (rate := fields.number(field, 0.0))
    }
    stated = ", ".join(f"{field}={rate:g}" for field, rate in found.items())
    return f"dropout is left out ({stated} in config.json)" if found else ""


def _described(name: str, config: dict) -> tuple[Fields, ...]:
    """Give the fields of the config and, for a model with images, those of its text part."""
    text = config.get("text_config")
    return (Fields(name, config), *([Fields(name, text)] if isinstance(text, dict) else []))
