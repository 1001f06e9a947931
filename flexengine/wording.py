"""Words for mistakes: what was probably meant, what a system error calls for, and a parser of flags.

The module imports nothing of the package, so that every room that reads what a person wrote can use it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import json
import logging
import re
import reprlib
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

WRONG_USAGE = 2
"""Exit status for flags that do not exist or hold no usable value, as argparse has it."""
SHOWN_CHARACTERS = 100
"""Longest quotation from a file: damaged files hold values of any size."""
OUTPUT = "output"
"""Name of the standard output as the place of an error in `explain_os_error`."""

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^-(inf|nan)$")
"""Arguments that argparse shall take for a value rather than a flag; its own pattern does not know -1e-4."""
_LOCKED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ALLOCATION_FAILED = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|bad_alloc", re.IGNORECASE)

_shortening = reprlib.Repr()
_shortening.maxlevel, _shortening.maxlist, _shortening.maxdict, _shortening.maxtuple = 2, 6, 4, 6
_shortening.maxstring = _shortening.maxlong = _shortening.maxother = SHOWN_CHARACTERS


def shown(value: object) -> str:
    """Quote a value from a file for a message: in one line, with long texts and deep or long containers abridged."""
    return _shortening.repr(value)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Write "; did you mean X?" for the known word closest to `word`, or ""; case and leading dashes do not count."""
    # The word is cut because matching takes quadratic time, and damaged files hold words of any length.
    by_text = {name.lower().lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lower().lstrip("-")[:SHOWN_CHARACTERS], by_text, n=1)
    return f"; did you mean {by_text[close[0]]}?" if close else ""


HUB_MODEL = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/(?P<name>[\w.-]+))(@(?P<revision>\w[\w./-]*))?")
"""A model on the hub: ORG/NAME or ORG/NAME@REVISION, where a revision is a branch, a tag or a commit."""


def hub_model(text: str) -> re.Match[str] | None:
    """Read a name as a model on the hub; None for one that is not of that form, and for what is on this disk."""
    found = HUB_MODEL.fullmatch(text)
    return None if found is None or Path(text).exists() else found


_ELSEWHERE = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(@[\w./-]+)?(:[\w.-]+)*(=[\d.]+)?|preset:.*")
"""An id on the hub, perhaps with configuration, split and weight, or a preset: names that mean the same to others."""


def without_folders(place: str) -> str:
    """Name a model or data set that a person gave without the local folders that it lies in."""
    if "://" in place:  # with neither a password nor a query, which may be signed
        return re.sub(r"//[^/\s@]+@", "//", place).partition("?")[0]
    elsewhere = _ELSEWHERE.fullmatch(place)
    if elsewhere and not (elsewhere["id"] and Path(elsewhere["id"]).exists()):
        return place
    return Path(place).name or Path(place).resolve().name


def parse_json(text: bytes | str, where: object, unique: bool = False) -> Any:
    """Parse a JSON text; `where` names it in messages. unique: no object may have a key twice.

    Raises ValueError for what is no UTF-8, no JSON, nested too deep, holds a number too long, or repeats a key.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=_unique_keys if unique else None)
    except UnicodeDecodeError as error:
        found = f"not valid JSON: no UTF-8 text at byte {error.start}"
    except json.JSONDecodeError as error:
        found = f"not valid JSON: {error}"
    except RecursionError:
        found = "not valid JSON: values are nested too deep"
    except _RepeatedKeyError as error:
        found = str(error)
    except ValueError:  # Python limits the digits of a number, as reading them takes quadratic time
        found = f"not valid JSON: a number of more than {sys.get_int_max_str_digits()} digits"
    raise ValueError(f"{where}: {found}; fetch or write the file again")


class _RepeatedKeyError(ValueError):
    """Raised when an object of a JSON text has a key twice."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _RepeatedKeyError(f"{shown(twice)} is listed twice")
    return result


# ---- errors of the system -------------------------------------------------------------------------------------


def explain_os_error(error: OSError, flag: str | None = None) -> str:
    """Explain an error of the file system: which file, what happened, what to do.

    flag: names the place that was chosen for writing; None if that can only be --output-dir, OUTPUT for what is
    printed. An error with a text of its own keeps it.
    """
    if error.errno is None or error.strerror is None:
        return str(error) or type(error).__name__
    check, flag = f"Check the path{f' of {flag}' if flag else ''}.", flag or "--output-dir"
    unnamed = f"the {OUTPUT}" if flag == OUTPUT else f"the folder of {flag}"
    where = str(error.filename) if error.filename is not None else unnamed
    if error.errno in _FULL:
        return f"{where}: no space left on the disk{_free_space(error)}. Free some or choose another {flag}."
    if error.errno in _LOCKED:
        return f"{where}: no permission ({error.strerror}). Choose another {flag}, or change the rights of this one."
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return f"{where}: {error.strerror}: a file and a folder cannot share a name. Choose another {flag}."
    if error.errno == errno.ENOENT:
        return f"{where}: no such file or folder. {check}"
    return f"{where}: {error.strerror} (error {error.errno})."


@contextlib.contextmanager
def going_on_without(what: str) -> Iterator[None]:
    """Make a warning of an error of the file system: what only tells of a run must not end it.

    what: names what is not written then.
    """
    try:
        yield
    except OSError as error:
        logger.warning("%s is not written, and the run goes on without it: %s", what, explain_os_error(error))


def _free_space(error: OSError) -> str:
    """Tell how much is free where the error happened, if that is known."""
    if error.filename is None:
        return ""
    path = Path(str(error.filename)).absolute()
    try:
        nearest = next(parent for parent in (path, *path.parents) if parent.exists())
        return f" ({shutil.disk_usage(nearest).free / 2**20:.1f} MiB free)"
    except OSError:
        return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory ran out; torch raises RuntimeError for host and for device memory."""
    return isinstance(error, MemoryError) or bool(_ALLOCATION_FAILED.search(str(error)))


def explain_out_of_memory(error: BaseException) -> str:
    """Explain what ran out, in the words of the error if it has some, and what to do."""
    found = str(error).strip().splitlines()
    first = found[0] if found else "the operating system refused more memory"
    # Python's own MemoryError has no text; those that the package raises say what was asked and what to do.
    if isinstance(error, MemoryError) and found:
        return str(error)
    return (
        f"memory ran out: {first[: 3 * SHOWN_CHARACTERS]}\n"
        "  give --max-host-mem-gib and --max-gpu-mem-gib values below what is really free; `ulimit -v` and the\n"
        "  container's memory limit may be lower than the machine's memory"
    )


# ---- flags ----------------------------------------------------------------------------------------------------


def with_dashes(argument: str) -> str:
    """Turn --max_seq_len=2_048 into --max-seq-len=2_048: underscores become dashes in flags, not in values."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


LIST_FLAGS = "--list-flags-of-this-command"
"""The argument by which `flexengine completion` asks a command for its parser."""


class ParserAsked(BaseException):
    """Carries the parser of a command to who asked for it."""

    def __init__(self, parser: FlagParser) -> None:
        self.parser = parser


EXAMPLES = {
    "train": (
        "--model Qwen/Qwen3-0.6B --mode auto",
        "--model meta-llama/Llama-3.1-8B --mode lora --dataset data.jsonl --max-gpu-mem-gib 24 --epochs 1 --save",
        "--config recipes/24-64/llama-3.1-8b-full.yaml --dataset data.jsonl --dry-run",
    ),
    "demo": ("", "--lora"),
    "plan": (
        "--model preset:llama-3.1-8b --gpu rtx4090 --host-mem-gib 64 --mode lora --html plan.html",
        "--model preset:llama-3.1-8b --gpu rtx4090 --host-mem-gib 128 --compare 12 16 rtx5090",
    ),
    "data preview": ("--model Qwen/Qwen3-0.6B --dataset data.jsonl --columns prompt=input answer=target",),
    "generate": ("--model runs/NAME-lora --prompt 'What is the capital of Peru?'",),
    "chat": ("--model runs/NAME-lora",),
    "serve": ("runs/NAME-lora",),
    "evaluate": ("runs/NAME-lora --tasks arc_easy --limit 100",),
    "benchmark": ("--model preset:llama-3.2-1b --max-gpu-mem-gib 8 16 --mode full lora --json before.json",),
    "check": ("models/tiny --steps 3",),
    "export": ("--run runs/NAME-lora --format merged --out models/tuned",),
    "verify": ("models/tuned",),
    "report": ("runs/NAME-lora",),
    "download": ("model meta-llama/Llama-3.1-8B --target models/llama-3.1-8b",),
}
"""What help shows below the flags of a command: some of its command lines."""


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors fit in two lines and name the flag that was probably meant.

    Flags may be written with underscores and are never abbreviated. A wrong command line ends the process with status
    2 through SystemExit, as argparse does.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **keywords})
        self._negative_number_matcher = _NUMBER

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore
        """Parse `args` (default: the command line). Exits when something is unknown or has no value."""
        given = [with_dashes(argument) for argument in (sys.argv[1:] if args is None else args)]
        if given == [LIST_FLAGS]:
            raise ParserAsked(self)
        # argparse itself would name unknown flags without a suggestion.
        values, unknown = self.parse_known_args(given, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return values

    def format_help(self) -> str:
        """Word the help, with examples where there are some."""
        lines = [f"  {self.prog} {line}".rstrip() for line in EXAMPLES.get(self.prog.partition(" ")[2], ())]
        return "\n".join([super().format_help(), *(["examples:", *lines, ""] if lines else [])])

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the flags are listed; exit with status 2."""
        self.exit(WRONG_USAGE, f"{self.prog}: {message}\n  `{self.prog} --help` lists what is allowed\n")

    def _unknown(self, arguments: Sequence[str]) -> str:
        flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
        if not flags:
            is_yaml = arguments[0].endswith((".yaml", ".yml")) and "--config" in self.known_flags()
            such = f"give --config {arguments[0]}" if is_yaml else "every option is a flag, such as --model"
            return f"unexpected argument {shown(arguments[0])}; {such}"
        known = list(self.known_flags())
        return "; ".join(f"unknown flag {shown(flag)[1:-1]}{did_you_mean(flag, known)}" for flag in flags[:3])

    def known_flags(self) -> Iterator[str]:
        """List the long flags of this parser and of its sub-commands."""
        for action in self.all_actions():
            yield from (flag for flag in action.option_strings if flag.startswith("--"))

    def all_actions(self) -> Iterator[argparse.Action]:
        """List the arguments of this parser and of its sub-commands."""
        for action in self._actions:
            yield action
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser.all_actions()
