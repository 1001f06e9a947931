"""Names of the files in a Hugging Face model folder; imports nothing, so that downloads start without torch."""

from __future__ import annotations

import fnmatch
from pathlib import PurePath

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
PARTIAL_FOLDER = ".flexengine_partial"
"""Where a download keeps unfinished files, inside the folder that it fills."""
RUN_FILE = "flexengine_run.json"
"""Which run made the weights, and of how many steps; a save that does not bring one of its own removes it."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Files of which a tokenizer is read, beside others that say more about it."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model*",  # Mistral's end in their version
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "chat_template.*",
)
SUPPORT_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    *TOKENIZER_FILES,
    "processor_config.json",
    "preprocessor_config.json",
    "*_preprocessor_config.json",
    "*_processor_config.json",
    "modules.json",
)
"""Patterns of configuration, tokenizer and processor files: what transformers reads beside the weights, of a model that
takes images, video or audio as well; and what sentence-transformers says of embedding models."""
CHAT_TEMPLATES = "additional_chat_templates"
"""A folder in the model's with further chat templates, such as tool_use.jinja."""

MAX_FILE_NAME_BYTES = 255  # NAME_MAX of Linux


def is_file_name(value: object) -> bool:
    """Whether a value out of an index can be a file beside it, on any file system."""
    if not isinstance(value, str) or PurePath(value).name != value or not value.isprintable():
        return False  # half of a character is not printable, so what follows can be encoded
    return value not in ("", "..") and len(value.encode()) <= MAX_FILE_NAME_BYTES


def is_tokenizer_file(name: str) -> bool:
    """Whether a support file is of the tokenizer or its chat templates."""
    return "/" in name or any(fnmatch.fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)


def is_support_file(name: str) -> bool:
    """Whether a file is to be kept beside the weights; `name` is its path in the folder, with slashes."""
    folder, _, file = name.rpartition("/")
    if folder:
        return folder == CHAT_TEMPLATES and file.endswith(".jinja")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SUPPORT_FILES)
