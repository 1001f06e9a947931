"""Small files of /proc and /sys, read without ever raising: what cannot be read is taken as absent."""

from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a file, empty if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def keyed_number(path: Path, key: str) -> int | None:
    """The number after `key` in a file of "key number ..." lines; None if there is none or the file is unreadable."""
    word = keyed_word(path, key)
    return int(word) if word is not None and word.isdigit() else None


def keyed_word(path: Path, key: str) -> str | None:
    """The word after `key` in a file of "key word ..." lines; None if there is none or the file is unreadable."""
    for line in read_text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == key:
            return words[1]
    return None
