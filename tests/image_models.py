"""A tiny LLaVA with a processor of its own, whose words name shapes. Its tower is random."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>", "<image>", "<unk>")
WORDS = ("user", "assistant", "what", "is", "this", "and", "the", "other", "one", "disc", "square", "triangle", "cross",
         "plus", "zero", "seven", "yes", "no", ":")  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m['role'] }} : "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %} {{ c['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} assistant : {% endif %}"
)
VISION = {"model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "projection_dim": 8}  # fmt: skip
TEXT = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}  # fmt: skip
IMAGE_TOKENS = 16
"""Tokens of one picture."""


def processor():
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(SPECIAL))
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )  # fmt: skip
    pictures = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return transformers.LlavaProcessor(
        pictures, tokens, patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip


def write_llava(folder: Path) -> Path:
    """Write the model with random weights and its processor to a folder."""
    torch.manual_seed(3)
    text = {**TEXT, "vocab_size": len(SPECIAL) + len(WORDS)}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=VISION, image_token_index=3, image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor().save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    )
    return folder
