"""What a model folder holds for its tokenizer: tokenizer.json or tokenizer.model, its options, its chat templates."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flexengine.wording import parse_json, shown

TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"


def read_tokenizer(folder: Path) -> Tokenizer:
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


def _converted(folder: Path) -> Tokenizer:
    """What transformers makes of a folder that has tokenizer.model only."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second

    return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer


def read_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, {} where there is none. Raises ValueError when it is no JSON object."""
    if not path.is_file():
        return {}
    config = parse_json(path.read_bytes(), path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(config).__name__}; fetch the file again")
    return config


def find_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: "default", and "tool_use" where conversations with tools have one of their own."""
    stored = config.get("chat_template")
    if not isinstance(stored, list):
        stored = [] if stored is None else [{"name": "default", "template": stored}]
    entries = [entry for entry in stored if isinstance(entry, dict) and "name" in entry]
    found: dict[str, Any] = {entry["name"]: entry.get("template") for entry in entries}
    for name, path in (("default", TEMPLATE_FILE), ("tool_use", TOOL_TEMPLATE_FILE)):
        if (folder / path).is_file():
            try:
                found[name] = (folder / path).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{folder / path}: no UTF-8 text at byte {error.start}; fetch the file again"
                ) from None
    for template in found.values():
        if not isinstance(template, str):
            raise ValueError(f"{folder}: chat_template in tokenizer_config.json is {shown(template)}, expected a text")
    return found


def token_text(token: Any) -> str:
    """A special token is stored as its text, as {"content": text, ...}, or as null."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
