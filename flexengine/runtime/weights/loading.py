"""Fills the stored planes of a model: from a checkpoint, or with random initial weights."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from flexengine.checkpoint.quantised import DECODERS, Decoder
from flexengine.checkpoint.reader import CheckpointReader, ReadRequest
from flexengine.models.checkpoints import check_complete, open_checkpoint
from flexengine.runtime.arena import wide_dtype
from flexengine.runtime.weights.staging import load_staged, on_host
from flexengine.runtime.weights.stored_matrices import regrouped
from flexengine.runtime.weights.weight_store import PIECE_ELEMENTS, SourceRun, WeightStore


class CheckpointLoader:
    """Reads a checkpoint into the planes of a store."""

    def __init__(self, store: WeightStore, reader: CheckpointReader) -> None:
        self._store, self._reader = store, reader
        self._own = {name: run for name, run in store.own().items() if not store.is_linked(run)}

    def load(self) -> None:
        """Read every parameter from a checkpoint and set the optimizer states to zero.

        What lives in host memory is read straight into the arena, all of it in parallel and converted on the way; what
        lives on the GPU passes through a buffer of tens of MiB. The format splits a bf16 weight from its float32.
        Quantised weights are decoded on the CPU, some rows at a time; what is to be in fewer bytes is stored so, one
        tensor after the other. Files that a manifest lists are compared with it meanwhile. Raises: CheckpointError
        where they differ.
        """
        check_complete(self._store.layout.model, self._reader)
        requests = [
            self._request(name, run, self._reader.tensors[name].dtype)
            for name, run in self._own.items()
            if run.source.decode is None and run.whole and not run.param.absent
        ]
        elsewhere = [request for request in requests if not on_host(request)]
        with self._reader.verifying() if self._store.share.rank == 0 else nullcontext():
            self._reader.read_many([request for request in requests if on_host(request)])
            self._store.clear_states()  # after that: while the arena is page-locked, calls of the GPU may have to wait
            if elsewhere:
                load_staged(self._reader, elsewhere, self._store.arenas.device)
            for run in self._own.values():
                if run.source.decode is None and run.whole and not run.param.absent:
                    self._store.round_masters(run)
                if not run.whole:
                    if not self._keep(run):
                        self._store.store_spans(run, self._store.values(self._reader, run.source.name))
                elif run.source.decode is not None:
                    self._decode(run, DECODERS[run.source.decode])
                if run.source.rows_in_file is not None:
                    self._add_rows(run)

    def _add_rows(self, run: SourceRun) -> None:
        """Give the rows that the checkpoint lacks the mean of those that it has."""
        width, held = math.prod(run.source.shape[1:]), math.prod(run.source.shape_in_file)
        step, (weight, remainder) = max(1, PIECE_ELEMENTS // width), self._store.master(run)
        total = torch.zeros(width, dtype=torch.float64)
        sizes = (min(step * width, held - start) for start in range(0, held, step * width))
        for rows in regrouped(self._store.values(self._reader, run.source.name), sizes):
            total += rows.view(-1, width).sum(0, dtype=torch.float64)
        mean = (total / run.source.shape_in_file[0]).to(wide_dtype(self._store.layout))
        for start in range(held, run.count, step * width):
            count = min(step * width, run.count - start) // width
            self._store.write_master(weight, remainder, start, mean.repeat(count), run.split)

    def _keep(self, run: SourceRun) -> bool:
        """Take over codes and scales that the checkpoint holds in the format that they are to be in; False if it has
        none."""
        decoder = None if run.source.decode is None else DECODERS[run.source.decode]
        if decoder is None or decoder.same_as != run.param.storage:
            return False
        name, shape = run.source.name, run.source.shape
        return self._store.stored.keep(run.spans, lambda matrix: decoder.fields(self._reader, name, shape, matrix))

    def _decode(self, run: SourceRun, decoder: Decoder) -> None:
        """Decode a quantised source some rows at a time, and write each slab in pieces of PIECE_ELEMENTS."""
        (name, shape), (weight, remainder) = (run.source.name, run.source.shape_in_file), self._store.master(run)
        step, width = decoder.slab_rows(shape), math.prod(shape[1:])
        for row in range(0, shape[0], step):
            slab = decoder.decode(self._reader, name, shape, row, min(step, shape[0] - row)).flatten()
            for start in range(0, slab.numel(), PIECE_ELEMENTS):
                self._store.write_master(
                    weight, remainder, row * width + start, slab[start : start + PIECE_ELEMENTS], run.split
                )

    def _request(self, name: str, run: SourceRun, dtype: torch.dtype) -> ReadRequest:
        """What to read into the planes of a tensor.

        A frozen one is rounded as if it were trained, with a remainder that takes no memory and is lost.
        """
        weight, remainder = self._store.master(run)
        count = math.prod(run.source.shape_in_file)
        if remainder is not None and remainder.dtype == torch.float32:  # the master in whole, of which weights follow
            return ReadRequest(name, remainder[:count])
        if run.frozen and run.split and dtype != torch.bfloat16:
            remainder = torch.empty(run.count, dtype=torch.int16, device="meta")
        return ReadRequest(name, weight[:count], None if remainder is None else remainder[:count])


def load_buffers(reader: CheckpointReader, buffers: dict[str, Tensor]) -> None:
    """Read the model's buffers, by name and on any device, from a checkpoint that was found complete."""
    for name, buffer in buffers.items():
        values = torch.empty(buffer.shape, dtype=buffer.dtype)
        reader.read_into(name, values)
        buffer.copy_(values)


def fill_weights(weights: WeightStore, buffers: dict[str, Tensor], folder: Path | None, seed: int) -> None:
    """Load weights and buffers from a checkpoint folder; without one, draw random initial weights."""
    if folder is None:
        weights.initialize(seed)
    else:
        with open_checkpoint(weights.layout.model, folder) as reader:
            CheckpointLoader(weights, reader).load()
            weights.initialize_added(seed)
            load_buffers(reader, buffers)
