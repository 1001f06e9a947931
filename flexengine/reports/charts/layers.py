"""Draws every layer's decisions as a matrix of coloured cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from flexengine.reports.charts.svg import RIGHT, TOP, legend, svg

PLACE_FILLS = {
    "gpu": "#1f9d55", "shard": "#2a9d8f", "dealt": "#8fc74a", "host": "#e0a526", "nodes": "#e8c871",
    "drive": "#c2562d", "recomputed": "rgba(139,147,161,0.4)",
}  # fmt: skip
WHERE_USED = {
    "dealt": "divided over the GPUs", "shard": "in shards on all GPUs", "nodes": "divided over the nodes",
    "drive": "on the drive",
}  # fmt: skip
"""Words of places that the legend names where a plan has them."""
ROW_HEIGHT, NAMES_WIDTH = 17, 150


def layer_chart(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str | None]]]) -> str:
    """Draw a cell for each kind of data (rows) of each layer (columns); its colour says gpu, host or recomputed."""
    cell = min(40.0, (RIGHT - NAMES_WIDTH) / max(1, len(columns)))
    elements = []
    for r, (name, places) in enumerate(rows):
        top = TOP + r * ROW_HEIGHT
        elements.append(f'<text x="{NAMES_WIDTH - 8}" y="{top + 12}" text-anchor="end">{escape(name)}</text>')
        for c, place in enumerate(places):
            if place is not None:
                title = f"{columns[c]}, {name}: {place}"
                elements.append(
                    f'<rect x="{NAMES_WIDTH + c * cell:.1f}" y="{top + 1}" width="{max(1.0, cell - 1.2):.1f}" '
                    f'height="{ROW_HEIGHT - 2}" fill="{PLACE_FILLS[place]}"><title>{escape(title)}</title></rect>'
                )
    # At most 24 labels, or those of a deep model would run into each other.
    every = max(1, math.ceil(len(columns) / 24))
    for c in range(0, len(columns), every):
        short = columns[c].rpartition(".")[2]
        middle = NAMES_WIDTH + (c + 0.5) * cell
        elements.append(
            f'<text class="soft" x="{middle:.1f}" y="{TOP - 7}" text-anchor="middle">{escape(short)}</text>'
        )
    words = {"gpu": "on the GPU", "host": "in host memory", "recomputed": "recomputed in backward"}
    used = {place for _, places in rows for place in places}
    words |= {place: text for place, text in WHERE_USED.items() if place in used}
    key = legend((words[place], fill) for place, fill in PLACE_FILLS.items() if place in words)
    return svg(TOP + ROW_HEIGHT * len(rows) + 6, elements, "where everything lives, by layer") + key
