"""How processors lay out images: as equal tiles, as patches with a grid each, or as padded pictures with their sizes.

A layout divides a batch's columns into calls of a tower, tells how many rows each gives, and makes columns to try.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple, Protocol

import torch

from flexengine.ops.given_rows import Columns, TowerCall

CALL_ROWS = 4096
"""Rows of one call. More would take more memory, and fewer let more calls read the weights. It sets bits, so that no
plan has a say in it."""


class Layout(Protocol):
    """A layout of images."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads; the first holds the pixels."""
        ...

    def calls(self, columns: Columns, most: int, borders: Collection[int] = ()) -> list[TowerCall]:
        """Divide columns into those of calls of at most `most` rows, which end at borders (`Tower`).

        Raises: ValueError for one image of more.
        """
        ...

    def probe(self, rows: int) -> Columns:
        """Columns of one call that gives at least so many rows."""
        ...


class Tiles(NamedTuple):
    """Pictures [n, C, S, S] of one size, each of `rows` rows. nested: [B, n, C, S, S] with padding of zeros.

    mask: the column that says which pixels of each picture are no padding, if there is one.
    """

    rows: int
    channels: int
    size: tuple[int, int]
    nested: bool = False
    mask: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return ("pixel_values",) if self.mask is None else ("pixel_values", self.mask)

    def calls(self, columns: Columns, most: int, borders: Collection[int] = ()) -> list[TowerCall]:
        pixels, shape = columns["pixel_values"], (self.channels, *self.size)
        if pixels.dim() < 4 or tuple(pixels.shape[-3:]) != shape or not pixels.is_floating_point():
            raise ValueError(
                f"pixel_values are {pixels.dtype} of shape {list(pixels.shape)}, but this model reads pictures of"
                f" {list(shape)}; use the processor of this model"
            )
        flat = {"pixel_values": pixels.reshape(-1, *shape)}
        if self.mask is not None and self.mask in columns:
            flat[self.mask] = columns[self.mask].reshape(-1, *self.size)
        if self.nested:
            real = (flat["pixel_values"] != 0).flatten(1).any(1)
            flat = {name: column[real] for name, column in flat.items()}
        found = list[TowerCall]()
        for a, b, rows in _runs([self.rows] * len(flat["pixel_values"]), most, borders):
            call = {name: column[a:b] for name, column in flat.items()}
            found.append(TowerCall({n: column[None] for n, column in call.items()} if self.nested else call, rows))
        return found

    def probe(self, rows: int) -> Columns:
        pixels = torch.ones(-(-rows // self.rows), self.channels, *self.size)
        return {"pixel_values": pixels[None] if self.nested else pixels}


class Grids(NamedTuple):
    """Patches [P, W] of all images, and each image's grid (frames, height, width) in patches.

    merge: patches along each side that become one row.
    """

    width: int
    merge: int
    columns: tuple[str, ...] = ("pixel_values", "image_grid_thw")

    def calls(self, columns: Columns, most: int, borders: Collection[int] = ()) -> list[TowerCall]:
        pixels, grids = (columns[name] for name in self.columns)
        patches = grids.prod(-1).tolist() if grids.dim() == 2 and grids.shape[1] == 3 else [-1]
        if pixels.dim() != 2 or pixels.shape[1] != self.width or sum(patches) != len(pixels) or min(patches) < 1:
            raise ValueError(
                f"pixel_values of shape {list(pixels.shape)} do not go with image_grid_thw={grids.tolist()}, whose"
                f" patches have {self.width} values each; use the processor of this model"
            )
        ends = [0, *torch.tensor(patches).cumsum(0).tolist()]
        return [
            TowerCall({"pixel_values": pixels[ends[a] : ends[b]], "image_grid_thw": grids[a:b]}, rows)
            for a, b, rows in _runs([count // self.merge**2 for count in patches], most, borders)
        ]

    def probe(self, rows: int) -> Columns:
        high, wide = (self.merge * side for side in _sides(rows))
        grid = torch.tensor([[1, high, wide]])
        return {"pixel_values": torch.ones(high * wide, self.width), "image_grid_thw": grid}


class Sizes(NamedTuple):
    """Pictures [n, C, H, W], padded to the largest one, and their sizes. patch: pixels along a side of a row."""

    channels: int
    patch: int
    columns: tuple[str, ...] = ("pixel_values", "image_sizes")

    def calls(self, columns: Columns, most: int, borders: Collection[int] = ()) -> list[TowerCall]:
        pixels, sizes = (columns[name] for name in self.columns)
        if pixels.dim() != 4 or pixels.shape[1] != self.channels or tuple(sizes.shape) != (len(pixels), 2):
            raise ValueError(
                f"pixel_values of shape {list(pixels.shape)} do not go with image_sizes of shape {list(sizes.shape)};"
                " use the processor of this model"
            )
        rows = [(high // self.patch) * (wide // self.patch) for high, wide in sizes.tolist()]
        found = []
        for a, b, total in _runs(rows, most, borders):
            high, wide = sizes[a:b].amax(0).tolist()
            found.append(TowerCall({"pixel_values": pixels[a:b, :, :high, :wide], "image_sizes": sizes[a:b]}, total))
        return found

    def probe(self, rows: int) -> Columns:
        high, wide = (self.patch * side for side in _sides(rows))
        pixels = torch.ones(1, self.channels, high, wide)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[high, wide]])}


class Placed(NamedTuple):
    """Patches [n, P, W] of pictures, padded to equally many, and where each lies [n, P, 2], of padding (-1, -1).

    merge: patches along each side that become one row. most: rows of one picture, which processors hold to.
    """

    width: int
    merge: int
    most: int = 1120
    columns: tuple[str, ...] = ("pixel_values", "image_position_ids")

    def calls(self, columns: Columns, most: int, borders: Collection[int] = ()) -> list[TowerCall]:
        pixels, places = (columns[name] for name in self.columns)
        if pixels.dim() != 3 or pixels.shape[2] != self.width or places.shape != (*pixels.shape[:2], 2):
            raise ValueError(
                f"pixel_values of shape {list(pixels.shape)} do not go with image_position_ids of shape"
                f" {list(places.shape)}, whose patches have {self.width} values each; use the processor of this model"
            )
        real = (places != -1).all(-1)
        counts = real.sum(-1)
        if bool((real != (torch.arange(real.shape[1]) < counts[:, None])).any()) or bool(
            (counts % self.merge**2).any()
        ):
            raise ValueError(
                f"image_position_ids have {counts.tolist()} patches of images that are no padding, each {self.merge**2}"
                " of which are a row, with padding at the end; use the processor of this model"
            )
        found, rows = [], (counts // self.merge**2).tolist()
        if rows and max(rows) > self.most:
            raise ValueError(f"an image of the batch takes {max(rows)} tokens, more than {self.most}; make it smaller")
        for a, b, total in _runs(rows, most, borders, padded=True):
            longest = int(counts[a:b].max())  # other padding is no work
            found.append(TowerCall({n: columns[n][a:b, :longest] for n in self.columns}, total))
        return found

    def probe(self, rows: int) -> Columns:
        """Pictures of as many rows as one may have; padded ones, as these take more."""
        each = min(rows, self.most)
        count, sides = -(-rows // each), [self.merge * side for side in _sides(each)]
        places = torch.cartesian_prod(*map(torch.arange, sides)).flip(1).repeat(count + (count > 1), 1, 1)
        if count > 1:
            places[0, self.merge**2 :] = -1
        return {"pixel_values": torch.ones(*places.shape[:2], self.width), "image_position_ids": places}


def _sides(rows: int) -> tuple[int, int]:
    """Sides of a picture of at least so many rows, which is nearly square."""
    high = max(1, math.isqrt(rows))
    return high, -(-rows // high)


def _runs(rows: list[int], most: int, borders: Collection[int], padded: bool = False) -> list[tuple[int, int, int]]:
    """Divide images into runs (first, end, rows) of at most `most` rows, which end at borders.

    padded: images of a run take as many rows as the largest of it. Raises: ValueError for an image of more.
    """
    found, start, total, before, largest = list[tuple[int, int, int]](), 0, 0, 0, 0
    for index, count in enumerate(rows):
        if count > most:
            raise ValueError(
                f"image {index} of the batch takes {count} tokens, more than the {most} that one may have here; make it"
                " smaller, or raise max_image_tokens and max_seq_len"
            )
        taken = (index - start + 1) * max(largest, count) if padded else total + count
        if total and (taken > most or before in borders):
            found.append((start, index, total))
            start, total, largest = index, 0, 0
        total, largest = total + count, max(largest, count)
        before += count
    return [*found, (start, len(rows), total)] if rows else found
