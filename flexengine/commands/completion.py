"""`flexengine completion`: a script that has bash and zsh complete commands, flags and the values of flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence

from flexengine.wording import LIST_FLAGS, FlagParser, ParserAsked

SCRIPT = """\
[ -z "$ZSH_VERSION" ] || {{ autoload -U +X compinit bashcompinit && compinit && bashcompinit; }}
_flexengine() {{
  local choices= word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  case "$COMP_CWORD ${{COMP_WORDS[1]}} $before $word" in
    "1 "*) choices="{commands}";;
{rows}
  esac
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
}}
complete -o default -F _flexengine flexengine"""
"""What a word may be, by its place, the command, and the word before it; files where nothing is named."""


def completion(commands: Mapping[str, Callable[[list[str]], int]], argv: Sequence[str]) -> int:
    """Print the script for the functions that run commands; returns the exit status 0."""
    FlagParser(
        prog="flexengine completion",
        description="Prints a script for tab completion in bash and zsh: write it to a file, and have ~/.bashrc or"
        " ~/.zshrc `source` that.",
    ).parse_args(argv)
    rows = (row for name, run in commands.items() for row in _rows(name, parser_of(run)))
    print(SCRIPT.format(commands=" ".join(commands), rows="\n".join(rows)))
    return 0


def parser_of(run: Callable[[list[str]], int]) -> FlagParser:
    """Ask a command for the parser of its flags."""
    try:
        run([LIST_FLAGS])
    except ParserAsked as asked:
        return asked.parser
    raise AssertionError("a command read its flags without a FlagParser")


def _rows(name: str, parser: FlagParser) -> Iterator[str]:
    """Branches of one command: values after a flag that has choices, flags after a dash, words that come first."""
    for action in parser.all_actions():
        if action.choices and action.option_strings:
            yield _row(f'*" {name} {action.option_strings[-1]} "*', action.choices)
        elif isinstance(action, argparse._SubParsersAction):
            yield _row(f'"2 {name} {name} "*', action.choices)
    yield _row(f'*" {name} "*" -"*', parser.known_flags())


def _row(pattern: str, words: object) -> str:
    return f'    {pattern}) choices="{" ".join(map(str, words))}";;'  # pyright: ignore[reportArgumentType]
