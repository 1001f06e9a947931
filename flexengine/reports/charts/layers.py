"""Every layer's decisions as a matrix of coloured cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from flexengine.reports.charts.svg import RIGHT, TOP, legend, svg

GPU_FILL, HOST_FILL, AGAIN_FILL = "#1f9d55", "#e0a526", "rgba(139,147,161,0.4)"
PLACE_FILLS = {"gpu": GPU_FILL, "host": HOST_FILL, "recomputed": AGAIN_FILL}
ROW_HEIGHT, NAMES_WIDTH = 17, 150


def layer_chart(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str | None]]]) -> str:
    """A matrix of coloured cells: what (rows) lives where (gpu, host, recomputed) in every layer (columns)."""
    cell = min(40.0, (RIGHT - NAMES_WIDTH) / max(1, len(columns)))
    parts = []
    for r, (name, places) in enumerate(rows):
        top = TOP + r * ROW_HEIGHT
        parts.append(f'<text x="{NAMES_WIDTH - 8}" y="{top + 12}" text-anchor="end">{escape(name)}</text>')
        for c, place in enumerate(places):
            if place is not None:
                title = f"{columns[c]}, {name}: {place}"
                parts.append(
                    f'<rect x="{NAMES_WIDTH + c * cell:.1f}" y="{top + 1}" width="{max(1.0, cell - 1.2):.1f}" '
                    f'height="{ROW_HEIGHT - 2}" fill="{PLACE_FILLS[place]}"><title>{escape(title)}</title></rect>'
                )
    every = max(1, math.ceil(len(columns) / 24))
    for c in range(0, len(columns), every):
        short = columns[c].rpartition(".")[2]
        middle = NAMES_WIDTH + (c + 0.5) * cell
        parts.append(f'<text class="soft" x="{middle:.1f}" y="{TOP - 7}" text-anchor="middle">{escape(short)}</text>')
    words = {"gpu": "on the GPU", "host": "in host memory", "recomputed": "recomputed in backward"}
    key = legend((words[place], fill) for place, fill in PLACE_FILLS.items())
    return svg(TOP + ROW_HEIGHT * len(rows) + 6, parts, "where everything lives, by layer") + key
