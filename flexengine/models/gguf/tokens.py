"""What llama.cpp needs of a tokenizer: its tokens with their kinds, how pairs are merged, how text is split before."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from flexengine.wording import parse_json

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _ENGLISH + r"\p{N}{1,3}" + _ENDS: "llama-bpe",
    _ENGLISH + r"\p{N}" + _ENDS: "qwen2",
    "digits, then ByteLevel": "smollm",
    "ByteLevel": "gpt-2",
}
"""How a tokenizer splits text -> `tokenizer.ggml.pre`, by which llama.cpp does the same."""


def add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Write the tokenizer of a folder into a file.

    writer: of the package `gguf`. vocab_size: rows of the embedding; those without a token are said to be unused.
    Raises: ValueError where there is none, or llama.cpp has no such kind.
    """
    import gguf  # noqa: PLC0415, an extra

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            "a GGUF file holds the tokenizer, too, and the model has no tokenizer.json; put the one that it was trained"
            " with into the folder of the model"
        )
    given = parse_json(path.read_bytes(), path)
    model, added = given["model"], {token["id"]: token for token in given.get("added_tokens", ())}
    if model.get("type") != "BPE":
        raise ValueError(
            f"{path} is a tokenizer of kind {model.get('type')}, and llama.cpp is given those of BPE alone"
        )
    tokens = {number: text for text, number in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    texts = [tokens.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    kinds = [_kind(number, tokens, added, model) for number in range(vocab_size)]
    from_bytes = not model.get("byte_fallback")
    writer.add_tokenizer_model("gpt2" if from_bytes else "llama")
    writer.add_tokenizer_pre(_split(given, path) if from_bytes else "default")
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    if not from_bytes:
        writer.add_token_scores(_scores(model, texts))
        writer.add_add_space_prefix("Prepend" in json.dumps([given.get("normalizer"), given.get("pre_tokenizer")]))
    logging.getLogger("gguf").setLevel(logging.ERROR)  # it warns of what it leaves out of templates of pairs
    gguf.SpecialVocab(folder, load_merges=from_bytes, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)


def _kind(number: int, tokens: dict[int, str], added: dict[int, dict[str, Any]], model: dict[str, Any]) -> int:
    """`gguf.TokenType` of a token."""
    text = tokens.get(number)
    if text is None:
        return 5  # unused
    if text == model.get("unk_token"):
        return 2
    if number in added:
        return 3 if added[number].get("special") else 4
    is_byte = model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return 6 if is_byte else 1


def _scores(model: dict[str, Any], texts: list[str]) -> list[float]:
    """Give a higher score to what is merged earlier, as llama.cpp merges the pair whose result has the highest one."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(text, len(ranks))) for text in texts]


def _split(given: dict[str, Any], path: Path) -> str:
    """Name how text is split before pairs are merged. Raises: ValueError for a way that llama.cpp is not known by."""
    before = given.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    kinds = [step.get("type") for step in steps]
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    how = ", ".join(patterns) or ("digits, then ByteLevel" if "Digits" in kinds else ", ".join(map(str, kinds)))
    if how not in SPLITS:
        raise ValueError(f"{path} splits text by {how}, for which llama.cpp has no name here; convert the export with"
                         " its convert_hf_to_gguf.py")  # fmt: skip
    name = SPLITS[how]
    return "dbrx" if name == "llama-bpe" and not given["model"].get("ignore_merges") else name
