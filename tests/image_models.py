"""A tiny LLaVA and a tiny Gemma 3 with processors of their own, whose words name shapes. Their towers are random."""

import json
from pathlib import Path
from typing import Any

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
GEMMA_TOKENS = 4
"""Tokens of one picture in the Gemma 3, between a token that begins it and one that ends it."""


def words_of(**special):
    """A tokenizer of these words. special: roles of tokens."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(SPECIAL))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>",
        extra_special_tokens=special,
    )  # fmt: skip


def processor():
    pictures = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    return transformers.LlavaProcessor(
        pictures, words_of(image_token="<image>"), patch_size=7, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip


def write_llava(folder: Path, seed: int = 3) -> Path:
    """Write the model with random weights and its processor to a folder."""
    torch.manual_seed(seed)
    text = {**TEXT, "vocab_size": len(SPECIAL) + len(WORDS)}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=VISION, image_token_index=3, image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor().save_pretrained(folder)
    return _with_ends(folder)


def write_gemma3(folder: Path) -> Path:
    """Write a Gemma 3, whose images take four tokens between two others, and its processor to a folder."""
    torch.manual_seed(3)
    kept = {name: value for name, value in TEXT.items() if name != "tie_word_embeddings"}
    text = {**kept, "model_type": "gemma3_text", "vocab_size": len(SPECIAL) + len(WORDS) + 2, "sliding_window": 16,
            "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    vision = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
    named: dict[str, Any] = {
        "image_token_index": 3,
        "boi_token_index": 24,
        "eoi_token_index": 25,
        "mm_tokens_per_image": GEMMA_TOKENS,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **named)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    pictures = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    tokens = words_of(image_token="<image>", boi_token="<begins>", eoi_token="<ends>")
    template = TEMPLATE.replace("<image>", "<begins>")
    transformers.Gemma3Processor(pictures, tokens, template, GEMMA_TOKENS).save_pretrained(folder)
    return _with_ends(folder)


def _with_ends(folder: Path) -> Path:
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    )
    return folder
