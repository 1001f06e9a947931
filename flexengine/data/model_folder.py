"""What a model folder says of its tokenizer: special tokens and chat templates."""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from flexengine.checkpoint.tokenizer_files import read_config
from flexengine.wording import shown

TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"


class SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer, as transformers finds them in its files.

    named: texts by role, as bos_token. before, after: ids that it puts around a text. ends: ids that end what the model
    writes, as generation_config.json (else config.json) names them; empty where neither does.
    """

    named: dict[str, str]
    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: tuple[int, ...] = ()


class TextEnds(NamedTuple):
    """The ids around a text: those before and behind it, and the one that ends it; None where none does."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    end: int | None

    def begun(self, ids: list[int]) -> list[int]:
        """A text's ids with those before it; a text may have them already."""
        before = list(self.before)
        return ids if ids[: len(before)] == before else before + ids

    def ended(self, ids: list[int]) -> list[int]:
        """A text's ids with those behind it, and its end, each once."""
        end = [] if self.end is None else [self.end]
        for behind in (list(self.after), end):
            if ids[len(ids) - len(behind) :] != behind:
                ids = ids + behind
        return ids


# ---- special tokens ---------------------------------------------------------------------------------------------


def read_special_tokens(folder: Path, tokenizer: Tokenizer) -> SpecialTokens:
    """Read which special tokens a folder names, and which of them stand around a text.

    tokenizer: that of the folder; tokens that it lacks are left out. Raises: ValueError where a file is damaged.
    """
    config = read_config(folder / "tokenizer_config.json")
    # transformers takes an object for a token only where it is marked as one.
    marked = {role: value for role, value in config.items() if isinstance(value, dict) and "content" in value}
    given = {role: token_text(value) for role, value in marked.items()}
    found = _as_transformers_reads(folder, given)
    before, after = ends_of_text(found.backend_tokenizer)
    if found.eos_token is None:
        found = _by_class_of_model(folder, given) or found
    named = {role: text for role, text in found.special_tokens_map.items() if isinstance(text, str)}
    if found.eos_token is None:  # transformers reads this file only where tokenizer_config.json lists no added tokens
        listed = read_config(folder / "special_tokens_map.json").get("eos_token")
        named |= {"eos_token": token_text(listed)}
    known = {role: text for role, text in named.items() if tokenizer.token_to_id(text) is not None}
    return SpecialTokens(known, before, after, _ends_of_answers(folder))


def _as_transformers_reads(folder: Path, given: Mapping[str, str]) -> Any:
    """Read a tokenizer by the class that the files name, else by that of all tokenizers. No code of the folder runs.

    given: special tokens by role, whatever the files say.
    """
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast  # noqa: PLC0415

    config = read_config(folder / "config.json")
    # The model's own config is not read here: it would import the model, which takes seconds.
    own = PreTrainedConfig.from_dict({name: config.get(name, "") for name in ("tokenizer_class", "model_type")})
    by_name = {"config": own, "trust_remote_code": False}
    for kind, options in ((AutoTokenizer, by_name), (PreTrainedTokenizerFast, {})):
        try:
            found: Any = kind.from_pretrained(folder, **{"local_files_only": True, **options, **given})
            if hasattr(found, "backend_tokenizer"):
                return found
        except MemoryError:
            raise
        except Exception as error:  # files of a downloaded folder: they may fail in any way
            if kind is PreTrainedTokenizerFast:
                raise ValueError(
                    f"{folder}: transformers cannot read the tokenizer: {str(error)[:300]}; fetch tokenizer_config.json"
                    " of the model again"
                ) from None
    raise AssertionError("tokenizers of the second class have a backend")


def _by_class_of_model(folder: Path, given: Mapping[str, str]) -> Any | None:
    """Read a tokenizer by the class that belongs to its model, which may name tokens that no file names."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **given)
    except MemoryError:
        raise
    except Exception:  # there is no such class, or none for these files
        return None


def ends_of_text(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find the ids that a tokenizer puts before and after a text. It cuts and pads no text any more."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode("a", add_special_tokens=True)
    marked = list(zip(encoded.ids, encoded.special_tokens_mask, strict=True))
    before = tuple(token for token, _ in takewhile(lambda pair: pair[1], marked))
    after = tuple(token for token, _ in takewhile(lambda pair: pair[1], reversed(marked[len(before) :])))
    return before, after[::-1]


def _ends_of_answers(folder: Path) -> tuple[int, ...]:
    """Find the ids at which generate of transformers stops."""
    for name in ("generation_config.json", "config.json"):
        config = read_config(folder / name)
        found, text = config.get("eos_token_id"), config.get("text_config")
        if found is None and isinstance(text, dict):
            found = text.get("eos_token_id")
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(token) is int and token >= 0 for token in ids):
                raise ValueError(f"{folder / name}: eos_token_id is {shown(found)}, expected ids; fetch the file again")
            return tuple(ids)
    return ()


# ---- options and templates --------------------------------------------------------------------------------------


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
