"""Adapter folders that ask for what is not built, lack what they name, or hold what nothing would read."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from provoke import CONFIG, Case, arguments, cases, check_message
from safetensors.torch import save_file

from flexengine.checkpoint.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PREFIX = "base_model.model."
Q_PROJ = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
MERGE = "merge this adapter into its model with PEFT \\(merge_and_unload\\)"


def write_adapter(folder: Path, files: Mapping[str, str], tensors: Mapping[str, torch.Tensor], fields: dict) -> None:
    """An adapter of rank 2 of the queries, with other fields of its config, and further tensors and files."""
    folder.mkdir()
    width = CONFIG["hidden_size"]
    own = {f"{PREFIX}{name}.lora_A.weight": torch.ones(2, width) for name in Q_PROJ}
    own |= {f"{PREFIX}{name}.lora_B.weight": torch.zeros(width, 2) for name in Q_PROJ}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], **fields}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    save_file({**own, **tensors}, folder / ADAPTER_WEIGHTS)
    for name, text in files.items():
        (folder / name).write_text(text)


def having(files: Mapping[str, str] = {}, tensors: Mapping[str, torch.Tensor] = {}, **fields: object):
    return lambda folder: write_adapter(folder, files, tensors, fields)


def with_pickle(folder: Path) -> None:
    write_adapter(folder, {}, {}, {})
    (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")


def tensor(name: str, *shape: int) -> dict[str, torch.Tensor]:
    return {f"{PREFIX}{name}": torch.ones(shape)}


ADAPTERS = (
    Case("adapter_of_another_kind", having(peft_type="LOHA"), ("peft_type is 'LOHA'; only LORA can be trained here",)),
    Case("adapter_with_a_field_of_later_versions", having(use_bdlora={"n": 2}), ("use_bdlora=.*not supported", MERGE)),
    Case("adapter_with_ranks_by_module", having(rank_pattern={"q_proj": 4}), ("rank_pattern=.*not supported", MERGE)),
    Case(
        "adapter_of_single_tokens",
        having(trainable_token_indices=[3]),
        ("trainable_token_indices=\\[3\\] is not supported", MERGE),
    ),
    Case("adapter_without_targets", having(target_modules=None), ("target_modules is None; write the names of the",)),
    Case("adapter_with_a_rank_in_words", having(r="2"), ("r is '2', expected a whole number",)),
    Case(
        "adapter_of_the_embedding",
        having(target_modules=["q_proj", "embed_tokens"]),
        ("lora target 'embed_tokens' names model.embed_tokens: adapters of the embedding.*are not built", "merge"),
    ),
    Case(
        "adapter_of_a_resized_vocabulary",
        having(tensors=tensor("lm_head.weight", 64, 16)),
        ("lm_head.weight has 64 rows, but the model's vocab_size is 61: the vocabulary was resized", MERGE),
    ),
    Case(
        "adapter_with_another_head",
        having(tensors=tensor("lm_head.weight", 61, 16)),
        ("lm_head.weight has other values than the model.*name it in modules_to_save", MERGE),
    ),
    Case(
        "adapter_of_a_module_that_it_does_not_name",
        having(tensors=tensor("model.layers.0.mlp.up_proj.lora_A.weight", 2, 16)),
        ("up_proj.lora_A.weight: adapter_config.json does not name up_proj, or it is no linear layer", MERGE),
    ),
    Case(
        "adapter_that_lacks_a_module",
        having(target_modules=["q_proj", "k_proj"]),
        ("lacks 4 of the 8 tensors that adapter_config.json asks for.*k_proj", "correct target_modules"),
    ),
    Case(
        "adapter_of_another_size", having(r=3), ("lora_A.weight has shape \\[2, 16\\].*ask for \\[3, 16\\]", "give the")
    ),
    Case("adapter_in_a_pickle", with_pickle, ("but adapter_model.bin, which is not opened because it may run code",)),
    Case(
        "adapter_with_a_template_alone",
        having(files={"chat_template.jinja": "{{ messages }}"}),
        (
            "holds a chat template, but no tokenizer \\(tokenizer.json or tokenizer.model\\): copy",
            "remove chat_template",
        ),
    ),
)


@cases(*ADAPTERS)
def test_adapter(case, model, command, tmp_path):
    case.provoke(tmp_path / "adapter")
    outcome = command("train", *arguments(model=model, adapter=tmp_path / "adapter", output_dir=tmp_path / "run"))
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not list((tmp_path / "run").glob("checkpoints/*"))
