"""Draws 200 pictures of shapes and digits, and records that ask for their names: shapes/train.jsonl, shapes/val.jsonl.

A model with images learns from them (docs/images.md):

    python examples/draw_shapes.py
    flexengine train --model VLM --dataset shapes/train.jsonl --val-dataset shapes/val.jsonl --max-image-tokens 4096
"""

import json
import math
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIZE, CENTRE = 28, 13.5
QUESTION = "what is this"


def polygon(corners, turn):
    """Draw a filled shape of equal sides."""

    def draw(pen, x, y, r, ink):
        angles = (turn + 2 * math.pi * i / corners for i in range(corners))
        pen.polygon([(x + r * math.cos(a), y + r * math.sin(a)) for a in angles], fill=ink)

    return draw


def strokes(*lines):
    """Draw thick lines between points in a square from -1 to 1."""

    def draw(pen, x, y, r, ink):
        for line in lines:
            pen.line([(x + r * a, y + r * b) for a, b in line], fill=ink, width=3)

    return draw


def disc(pen, x, y, r, ink):
    """Draw a filled circle."""
    pen.ellipse([x - r, y - r, x + r, y + r], fill=ink)


def ring(pen, x, y, r, ink):
    """Draw a zero."""
    pen.ellipse([x - r / 2, y - r, x + r / 2, y + r], outline=ink, width=3)


SHAPES = {
    "disc": disc,
    "square": polygon(4, math.pi / 4),
    "triangle": polygon(3, -math.pi / 2),
    "cross": strokes([(-1, -1), (1, 1)], [(-1, 1), (1, -1)]),
    "plus": strokes([(0, -1), (0, 1)], [(-1, 0), (1, 0)]),
    "zero": ring,
    "one": strokes([(0, -1), (0, 1)]),
    "seven": strokes([(-0.6, -1), (0.6, -1), (-0.2, 1)]),
}
"""Name -> what draws it with a pen, around a point, within a radius, in a grey."""


def picture(name, rng):
    """Draw a shape a little off the middle, in a size and a grey of its own."""
    image = Image.new("RGB", (SIZE, SIZE), (rng.randrange(30),) * 3)
    where = CENTRE + rng.uniform(-1, 1), CENTRE + rng.uniform(-1, 1)
    SHAPES[name](ImageDraw.Draw(image), *where, rng.uniform(10, 12), (rng.randrange(180, 256),) * 3)
    return image


def write(folder, count=200, held_out=40, seed=0):
    """Write so many pictures to a folder, with the records of those that are trained and those that are held out."""
    rng, names, folder = random.Random(seed), list(SHAPES), Path(folder)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records = []
    for i in range(count):
        name, path = names[i % len(names)], f"images/{i}.png"
        picture(name, rng).save(folder / path)
        asked = [{"type": "image", "image": path}, {"type": "text", "text": QUESTION}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": name}]
        records.append(json.dumps({"messages": turns}) + "\n")
    (folder / "train.jsonl").write_text("".join(records[held_out:]))
    (folder / "val.jsonl").write_text("".join(records[:held_out]))


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "shapes"
    write(target)
    print(f"200 pictures, {target}/train.jsonl and {target}/val.jsonl")
