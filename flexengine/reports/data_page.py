"""What a run would learn from its data, as one self-contained HTML page: sequences with small pictures of images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from flexengine.reports.charts.page import page

Seen = tuple[str, Sequence[tuple[str, bool]], Sequence[tuple[str, str]]]
"""A sequence: a heading, its text in pieces of which some are trained, names and data URLs of its images."""


def data_page(title: str, parts: Iterable[tuple[Sequence[str], Iterable[Seen]]]) -> str:
    """Draw the page. parts: of each data set the lines about it, and its first sequences."""
    body = [f"<h1>{escape(title)}</h1>", '<p class="soft">What has a loss is marked.</p>']
    for lines, sequences in parts:
        body += [f"<p>{escape(line)}</p>" for line in lines]
        body += [line for sequence in sequences for line in _sequence(*sequence)]
    return page(title, "\n".join(body))


def _sequence(heading: str, pieces: Sequence[tuple[str, bool]], pictures: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield f"<h2>{escape(heading)}</h2>"
    for name, data_url in pictures:
        yield f'<img src="{escape(data_url)}" alt="{escape(name)}" title="{escape(name)}">'
    text = "".join(f"<mark>{escape(said)}</mark>" if trained else escape(said) for said, trained in pieces)
    yield f'<pre style="white-space: pre-wrap">{text}</pre>'
