"""The files of a model folder that make its tokenizer: reads them, and writes them with tokens that were added."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from flexengine.wording import parse_json

TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a folder as it is. Raises: ValueError when there is none, or it is damaged."""
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            tokenizer = Tokenizer.from_file(str(path))
        elif (folder / "tokenizer.model").is_file():
            path = folder / "tokenizer.model"
            tokenizer = _converted(folder)
        else:
            raise FileNotFoundError
    except FileNotFoundError:
        raise ValueError(
            f"no tokenizer.json in {folder}; the data cannot be tokenized without it: fetch it with the model, or "
            "train on --data-source synthetic"
        ) from None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the Rust side raises a bare Exception, and panics as a BaseException
        raise ValueError(
            f"{path} cannot be read as a tokenizer: {str(error)[:300]}; fetch {path.name} of the model again"
        ) from None
    if tokenizer.get_vocab_size(with_added_tokens=True) == 0:
        raise ValueError(f"{path} holds no token; fetch {path.name} of the model again")
    return tokenizer


def add_tokens(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Add special tokens behind those that a tokenizer has; one that it has already keeps its id."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])


def _converted(folder: Path) -> Tokenizer:
    """What transformers makes of a folder that has tokenizer.model only."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).backend_tokenizer


def read_config(path: Path) -> dict[str, Any]:
    """A JSON file of options, {} where there is none. Raises ValueError when it is no JSON object."""
    if not path.is_file():
        return {}
    config = parse_json(path.read_bytes(), path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(config).__name__}; fetch the file again")
    return config


def files_with_tokens(folder: Path, tokenizer: Tokenizer, tokens: Sequence[str]) -> dict[str, str]:
    """Write the tokenizer of a folder with tokens that were added to it: the texts of files by name."""
    config = read_config(folder / TOKENIZER_CONFIG)
    if isinstance(config.get("added_tokens_decoder"), dict):  # where this list is there, transformers reads no other
        ids = {token: tokenizer.token_to_id(token) for token in tokens}
        entries = {str(ids[token]): {"content": token, "special": True, **_PLAIN} for token in tokens}
        config = {**config, "added_tokens_decoder": {**config["added_tokens_decoder"], **entries}}
    texts = {TOKENIZER_CONFIG: json.dumps(config, indent=2, ensure_ascii=False)} if config else {}
    return {TOKENIZER_FILE: tokenizer.to_str(pretty=True), **texts}


def tokens_beyond(folder: Path, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Name the tokens that were added to the tokenizer of a folder, and that another tokenizer lacks; in order."""
    if not (folder / TOKENIZER_FILE).is_file():
        return ()
    added = sorted(read_tokenizer(folder).get_added_tokens_decoder().items())
    return tuple(token.content for _, token in added if tokenizer.token_to_id(token.content) is None)


_PLAIN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
