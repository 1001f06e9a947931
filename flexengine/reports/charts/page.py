"""Builds self-contained HTML pages: the page itself, figures, tables, tiles of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from flexengine.reports.charts.style import CSS


def page(title: str, body: str, script: str = "") -> str:
    """Build a page with the reports' style sheet; `body` is HTML, `title` is text."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n{body}\n"
        f"{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def figure(caption: str, content: str, data: str = "") -> str:
    """Build a chart with its caption; `data` names the element whose JSON the tooltip reads."""
    attribute = f' data-chart="{data}"' if data else ""
    return f"<figure{attribute}><figcaption>{escape(caption)}</figcaption>{content}</figure>"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] | None = None, safe: bool = False
) -> str:
    """Build a table; columns in `numbers` (default: all but the first) align right. safe: cells are HTML already."""
    # Digits align right, so that sizes can be compared by eye.
    numbers = range(1, len(head)) if numbers is None else numbers
    kind = [' class="n"' if i in numbers else "" for i in range(len(head))]
    top = "".join(f"<th{k}>{escape(name)}</th>" for k, name in zip(kind, head, strict=True))
    lines = [
        "".join(f"<td{k}>{cell if safe else escape(cell)}</td>" for k, cell in zip(kind, row, strict=True))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def tiles(shown: Iterable[tuple[str, str, float | None]]) -> str:
    """Print (number, what it is, share of a whole or None) in large type; a share is drawn as a meter."""
    cells = []
    for value, word, share in shown:
        meter = "" if share is None else f'<div class="meter"><i style="width:{100 * min(1.0, share):.1f}%"></i></div>'
        cells.append(f'<div class="tile"><b>{escape(value)}</b><span>{escape(word)}</span>{meter}</div>')
    return f'<div class="tiles">{"".join(cells)}</div>'
