"""Checks what the config of any family may state: other tasks and features that none can train, and dropout."""

from __future__ import annotations

import re
from pathlib import Path

from flexengine.models.fields import Fields
from flexengine.wording import parse_json, shown

DROPOUTS = (
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "residual_dropout", "embedding_dropout",
    "hidden_dropout",
)  # fmt: skip

TASKS = ("CausalLM", "ConditionalGeneration", "ImageTextToText", "TextToText")
"""What classes that predict tokens are for, by the ends of their names; of others the name says another task."""

LABELS = ("SequenceClassification", "TokenClassification")
"""Tasks with a head of their own."""


def refuse_other_tasks(name: str, config: dict) -> None:
    """Raise ValueError if `architectures` names a class with another head than one that predicts tokens.

    Classes without a head (`LlamaModel`) pass: theirs is the embedding, or the weights lack it. So do those that
    `task_heads.py` describes.
    """
    stated = config.get("architectures")
    for architecture in stated if isinstance(stated, list) else ():
        task = re.search(r"For([A-Z]\w*)$", architecture) if isinstance(architecture, str) else None
        if task is not None and task[1] not in (*TASKS, *LABELS):
            raise ValueError(
                f"{name}: architectures={shown(stated)} in config.json: a model for {_words(task[1])}, whose head is "
                "not trained here. Give a model that predicts tokens (...ForCausalLM), or labels them or sequences "
                "(...ForTokenClassification, ...ForSequenceClassification)"
            )


def refuse_embeddings(name: str, folder: Path) -> None:
    """Raise ValueError if a folder of sentence-transformers says that its model pools hidden states to vectors."""
    path = folder / "modules.json"
    modules = parse_json(path.read_bytes(), path) if path.is_file() else []
    kinds = [str(module.get("type")) for module in modules if isinstance(module, dict)] if modules else []
    if pooling := next((kind for kind in kinds if kind.endswith("Pooling")), None):
        raise ValueError(
            f"{name}: modules.json names {shown(pooling)}: an embedding model, whose vectors are trained on pairs "
            "of texts, which is not built here. Train it with sentence-transformers, or remove modules.json to train "
            "it to predict tokens"
        )


def _words(task: str) -> str:
    return " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", task)).lower()


def refuse_unsupported(name: str, config: dict) -> None:
    """Raise ValueError if a config attends to later tokens, also in its part on the text.

    Where tokens of images alone see each other ("vision"), those of a text do not.
    """
    for fields in _described(name, config):
        for switch, harmless in (("is_causal", True), ("use_bidirectional_attention", False)):
            stated = fields.values.get(switch)
            if stated == "vision" and str(config.get("model_type")).startswith("gemma4"):
                continue
            of_kind = stated in ("vision", "all")
            if of_kind or fields.switch(switch, harmless) is not harmless:
                stated = stated if of_kind else str(not harmless).lower()
                raise ValueError(
                    f"{name}: {switch}={stated} in config.json: tokens see later ones, which a "
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
