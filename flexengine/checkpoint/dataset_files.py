"""Which files of a data set repository make up one split.

The hub's conventions, first that applies: the YAML `configs` of README.md
(https://huggingface.co/docs/hub/datasets-manual-configuration), else file names
(https://huggingface.co/docs/hub/datasets-file-names-and-splits): sharded names data/SPLIT-00000-of-00001.*, then split
words in folder names, then in file names, else everything is the train split.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import yaml

from flexengine.checkpoint.manifest import DownloadError

README = "README.md"
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
SINGLE_FORMATS = {".txt": "txt", ".pt": "pt"}
"""Formats of files that are named themselves; in a folder such files may be notes or weights."""
NOT_DATA = frozenset({"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"})
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SHARDED_NAME = re.compile(r"(?:^|/)data/([\w.]+)-\d{5}-of-\d{5}[^/]*$")
FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)


def format_of(path: str) -> str | None:
    """jsonl, json, csv, tsv, parquet or arrow by the file's extension (.gz on the first four), else None."""
    pure = PurePosixPath(path.lower())
    compressed = pure.suffix == ".gz"
    kind = FORMATS.get(PurePosixPath(pure.stem).suffix if compressed else pure.suffix)
    hidden = any(part.startswith((".", "__")) for part in pure.parts)
    return None if hidden or pure.name in NOT_DATA or (compressed and kind in ("parquet", "arrow")) else kind


def kind_of(name: str) -> str | None:
    """The format of a file that is named itself: as `format_of`, or txt (also .gz) or pt."""
    pure = PurePosixPath(name.lower())
    compressed = pure.suffix == ".gz"
    single = SINGLE_FORMATS.get(PurePosixPath(pure.stem).suffix if compressed else pure.suffix)
    return format_of(name) or (None if compressed and single == "pt" else single)


def select_data_files(paths: list[str], readme: str | None, split: str, config: str | None) -> list[str]:
    """Files of `split` of configuration `config` (None: the default one), sorted, all of one format.

    readme: text of README.md where the repository has one. Where a split comes in several formats, the one with most
    files counts.
    Raises: DownloadError naming the configurations, splits or formats that the repository does have.
    """
    configs = _configs(readme)
    if configs:
        by_split = _splits_of_config(_choose_config(configs, config), paths, split)
    else:
        by_split = _splits_by_name(_under_config(paths, config), split)
    canonical = next((name for name, words in SPLIT_WORDS.items() if split in words), split)
    files = by_split.get(split) or by_split.get(canonical)
    if not files:
        known = ", ".join(sorted(by_split)) or "none"
        raise DownloadError(f"split {split!r} was asked for, the data set has: {known}. Choose one with --split.")
    kinds = Counter(kind for path in files if (kind := format_of(path)))
    if not kinds:
        raise DownloadError(
            f"split {split!r} consists of {', '.join(files[:3])}; readable are {', '.join(FORMATS)} and .gz of text. "
            "Convert the data to JSON lines yourself and train on that file."
        )
    kind = kinds.most_common(1)[0][0]
    return sorted(path for path in files if format_of(path) == kind)


def left_aside(paths: list[str], readme: str | None, split: str, config: str | None, chosen: list[str]) -> list[str]:
    """Data files that no request reads: those in no split of any configuration, or beside `chosen` in another format.

    chosen: what `select_data_files` gave for the same repository.
    """
    configs = _configs(readme)
    within = paths if configs else _under_config(paths, config)
    splits: list[list[str]] = [] if configs else list(_splits_by_name(within, split).values())
    for item in configs:
        with contextlib.suppress(DownloadError):  # of a configuration that was not asked for
            splits += _splits_of_config(item, paths, split).values()
    taken = {path for files in splits for path in (chosen if chosen[0] in files else files)}
    return [path for path in within if _holds_data(path) and path not in taken]


def _holds_data(path: str) -> bool:
    """Whether a file has data, also in a form that is not read (train.jsonl.zst, train.jsonl.bak)."""
    return format_of(path) is not None or format_of(str(PurePosixPath(path).with_suffix(""))) is not None


def check_card(readme: str) -> None:
    """Raise DownloadError where README.md has `configs` that cannot be parsed: all of them would be read as one."""
    match = FRONT_MATTER.match(readme)
    try:
        yaml.safe_load(match.group(1)) if match else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if match and re.search(r"^configs\s*:", match.group(1), re.MULTILINE):
            found = " ".join(str(error).split())[:200]
            raise DownloadError(
                f"README.md names configurations in a header that is no YAML ({found}); correct it, or remove it."
            ) from None


def _configs(readme: str | None) -> list[dict[str, Any]]:
    """The `configs` of the README's front matter that name data files or a folder, [] without any."""
    match = FRONT_MATTER.match(readme or "")
    try:
        card = yaml.safe_load(match.group(1)) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: dates such as 2024-99-99, endless digits
        return []  # the hub ignores a card it cannot parse
    configs = card.get("configs") if isinstance(card, dict) else None
    usable = [item for item in configs if isinstance(item, dict)] if isinstance(configs, list) else []
    return [item for item in usable if item.get("data_files") or item.get("data_dir")]


def _choose_config(configs: list[dict[str, Any]], wanted: str | None) -> dict[str, Any]:
    by_name = {str(item.get("config_name", "default")): item for item in configs}
    if wanted is None:
        marked = [item for item in configs if item.get("default")]
        candidates = marked or ([by_name["default"]] if "default" in by_name else list(by_name.values()))
    else:
        candidates = [by_name[wanted]] if wanted in by_name else []
    if len(candidates) != 1:
        asked = "none was asked for" if wanted is None else f"{wanted!r} was asked for"
        raise DownloadError(f"the data set has configurations {', '.join(by_name)}; {asked}. Choose one with --config.")
    return candidates[0]


def _splits_of_config(config: dict[str, Any], paths: list[str], wanted: str) -> dict[str, list[str]]:
    data_dir = str(config.get("data_dir") or "").strip("/")
    data_files = config.get("data_files")
    if not data_files:
        return _splits_by_name([path for path in paths if path.startswith(data_dir + "/")], wanted)
    if not isinstance(data_files, list | dict):
        data_files = [data_files]
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    by_split: dict[str, list[str]] = {}
    for item in data_files:
        split, patterns = (item.get("split", "train"), item.get("path")) if isinstance(item, dict) else ("train", item)
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            full = f"{data_dir}/{pattern}" if data_dir else str(pattern)
            matched = [path for path in paths if glob_regex(full.removeprefix("./")).fullmatch(path)]
            if not matched:
                raise DownloadError(f"README.md lists {full!r} for split {split!r}, no file matches; tell its authors.")
            by_split.setdefault(str(split), []).extend(matched)
    return {split: sorted(set(files)) for split, files in by_split.items()}


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Regular expression of a path glob: * and ? stay within one path component, ** crosses them, [...] as usual.

    Raises: DownloadError for brackets without a meaning, such as [z-a].
    """
    pieces = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    brackets = (token.replace("[!", "[^", 1) if token.startswith("[") else re.escape(token) for token in tokens)
    try:
        return re.compile("".join(pieces.get(token, other) for token, other in zip(tokens, brackets, strict=True)))
    except re.error as error:
        raise DownloadError(
            f"README.md lists {pattern!r}, which is no file pattern ({error}); tell its authors."
        ) from None


def _under_config(paths: list[str], config: str | None) -> list[str]:
    """Without YAML, a configuration is a folder of that name."""
    if config is None:
        return paths
    under = [path for path in paths if config in PurePosixPath(path).parts[:-1]]
    if not under:
        folders = sorted({PurePosixPath(path).parts[0] for path in paths if "/" in path and format_of(path)})
        raise DownloadError(
            f"configuration {config!r} was asked for; README.md defines none and no folder has that name "
            f"(folders: {', '.join(folders) or 'none'}). Leave --config out or name a folder."
        )
    return under


def _splits_by_name(paths: list[str], wanted: str) -> dict[str, list[str]]:
    """Split -> data files by the naming conventions; the first convention that recognises any file decides for all."""
    data = [path for path in paths if format_of(path)]
    rules: tuple[Callable[[PurePosixPath], str | None], ...] = (
        lambda path: match.group(1) if (match := SHARDED_NAME.search(str(path))) else None,
        lambda path: _split_word(str(path.parent), wanted),
        lambda path: _split_word(path.name, wanted),
    )
    for rule in rules:
        by_split: dict[str, list[str]] = {}
        for path in data:
            if (split := rule(PurePosixPath(path))) is not None:
                by_split.setdefault(split, []).append(path)
        if by_split:
            return by_split
    return {"train": data or [path for path in paths if "/" in path or not path.startswith((".", "README"))]}


def _split_word(text: str, wanted: str) -> str | None:
    """The split whose word stands alone in `text`, between non-letters; `wanted` may be any word, tried first."""
    known = any(wanted in words for words in SPLIT_WORDS.values())
    for split, words in {**({} if known else {wanted: (wanted,)}), **SPLIT_WORDS}.items():
        alternatives = "|".join(re.escape(word.lower()) for word in words)
        if re.search(rf"(?<![a-z])(?:{alternatives})(?![a-z])", text.lower()):
            return split
    return None
