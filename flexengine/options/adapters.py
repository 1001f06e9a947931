"""The options of adapters, which `Job` has among its own: whether they are trained, and which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from flexengine.options.lora import LoRA
from flexengine.options.option import Need, Option, options_of

MOST_LORA_RANK = 2**14
FOR_ADAPTERS = (Need("mode", ("lora",), why="is for adapters"),)
LORA_OPTIONS = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_targets": "targets",
    "lora_dropout": "dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "lora_init": "init",
    "modules_to_save": "modules_to_save",
}
"""Options that mean something in mode lora alone, and the fields of `LoRA` that they are."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """What is trained, all weights or adapters, and what the adapters are."""

    mode: Annotated[
        Literal["full", "lora"] | None,
        Option(
            "what is trained: full = all weights, lora = low-rank adapters of the blocks' linear layers alone (default:"
            " full, or lora with --adapter)"
        ),
    ] = None
    lora_rank: Annotated[
        int | None, Option("rank of the adapters (default: 16)", above=0, most=MOST_LORA_RANK, needs=FOR_ADAPTERS)
    ] = None
    lora_alpha: Annotated[
        float | None,
        Option(
            "the product of an adapter is multiplied by alpha / rank (default: 16)",
            above=0,
            most=MOST_LORA_RANK,
            needs=FOR_ADAPTERS,
        ),
    ] = None
    lora_targets: Annotated[
        Sequence[str] | None,
        Option(
            "modules that have adapters: all-linear (all linear layers of the blocks but experts'), all-experts, all,"
            " names as q_proj, or regular expressions for whole names (default: all-linear)",
            needs=FOR_ADAPTERS,
        ),
    ] = None
    adapter: Annotated[
        str | None,
        Option(
            "folder of an adapter to start from, as PEFT writes it, or its id on the hub; it says rank, alpha and"
            " targets, and its tokenizer and chat template, if it has some, take the place of the model's",
            needs=FOR_ADAPTERS,
        ),
    ] = None
    lora_dropout: Annotated[
        float | None,
        Option(
            "probability that an element of what an adapter reads is dropped in training (default: 0)",
            least=0,
            most=0.99,
            needs=FOR_ADAPTERS,
        ),
    ] = None
    use_rslora: Annotated[
        bool | None, Option("multiply the product of an adapter by alpha / sqrt(rank) instead", needs=FOR_ADAPTERS)
    ] = None
    use_dora: Annotated[
        bool | None,
        Option(
            "train a magnitude for each output as well, beside the direction of its weights (DoRA)", needs=FOR_ADAPTERS
        ),
    ] = None
    lora_init: Annotated[
        str | None,
        Option(
            "what adapters start from: default (no change), orthogonal, pissa = the principal parts of the weights,"
            " which are taken out of them, or pissa_niter_16 = the same by 16 iterations, which is faster",
            needs=FOR_ADAPTERS,
        ),
    ] = None
    modules_to_save: Annotated[
        Sequence[str],
        Option(
            "modules that are trained in full beside adapters, by the ends of their names: embed_tokens, lm_head,"
            " norms; of images multi_modal_projector, vision_tower",
            needs=FOR_ADAPTERS,
        ),
    ] = ()

    def choose_mode(self) -> None:
        """Train what was asked for; without a word, adapters where there is one to start from."""
        if self.mode is None:
            object.__setattr__(self, "mode", "full" if self.adapter is None else "lora")

    @property
    def lora_setup(self) -> LoRA | None:
        """The adapters that are trained, if any."""
        if self.mode != "lora":
            return None
        given = {field: getattr(self, option) for option, field in LORA_OPTIONS.items()}
        return LoRA(**{field: value for field, value in given.items() if value is not None})


def meant_by(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a file or of a Python call, with mode lora where one of adapters is given and no mode is."""
    options = options_of(AdapterOptions)
    adapters = any(options[name].is_given(value) for name, value in given.items() if name in LORA_OPTIONS)
    return {**given, "mode": "lora"} if adapters and given.get("mode") is None else dict(given)
