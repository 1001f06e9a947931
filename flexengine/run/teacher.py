"""What a teacher says of the data of a run: asked once, before the model is loaded, and kept beside the data's tokens.

The teacher has the run's budgets to itself and is freed before the run plans, so there are never two models in memory.
Its likeliest tokens lie on disk under a name made of teacher, data, their number and the temperature.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flexengine.api import build, open_source, prepare_job
from flexengine.data import StoredSequences, ValidationBatches
from flexengine.data.batches import Batch, GlobalBatches, ImageBatch, batch_of, num_targets, split_epoch
from flexengine.data.image_pixels import PixelReader
from flexengine.data.image_processor import processor_key
from flexengine.data.store import TokenFile
from flexengine.metrics import format_bytes
from flexengine.models.registry import ModelSource
from flexengine.objectives import TeacherRows, likeliest
from flexengine.options.job import ForwardJob
from flexengine.options.train_config import TrainConfig
from flexengine.parallel.team import Team
from flexengine.run.training_data import TrainingData, cache_of, most_bytes_of_data
from flexengine.runtime.engine import Engine

TOP_K = 64
"""Tokens that are kept where --teacher-top-k is not given: of large models they have nearly all of the probability."""
FILES = ("teacher_tokens.bin", "teacher_log_probs.bin")
STARTS_FILE = "teacher_starts.npy"
SAMPLES, SAMPLE_BYTES = 64, 2**16
"""Parts of a file of weights, at even distances, by which it is told from others."""


class TeacherTable:
    """A teacher's likeliest tokens at every target token of a data set, read by position. See `data.batches.Taught`."""

    def __init__(self, folder: Path, starts: np.ndarray, top_k: int) -> None:
        """starts: the first row of each sequence, and the number of all. Holds the files open."""
        self._starts, self._widths = starts, (top_k, top_k + 1)
        types = (np.dtype(np.int32), np.dtype(np.float32))
        self._files = [TokenFile(os.open(folder / name, os.O_RDONLY), t) for name, t in zip(FILES, types, strict=True)]

    def rows(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 [targets, k] and log-probabilities float32 [targets, k + 1] of some sequences."""
        places = [(int(self._starts[i]), int(self._starts[i + 1] - self._starts[i])) for i in numbers]
        tokens, log_probs = (
            np.concatenate([file.numbers(start * width, count * width).reshape(-1, width) for start, count in places])
            for file, width in zip(self._files, self._widths, strict=True)
        )
        return tokens, log_probs


class Teacher(NamedTuple):
    """Who is asked. pixels: what decodes images as it reads them; None where there are none.

    top_k: tokens that are kept. temperature: divides its logits.
    """

    engine: Engine
    pixels: PixelReader | None
    top_k: int
    temperature: float


def add_teacher(config: TrainConfig, student: ModelSource, data: TrainingData, team: Team | None) -> None:
    """Give the batches of a run what its teacher, if it has one, says of them.

    Order: before the run plans. Several ranks all call it.
    Raises: ValueError for a teacher of another vocabulary, and where the disk has no room; PlanError as planning does.
    """
    if config.teacher is None:
        return
    job = ForwardJob(
        init="random" if config.teacher.startswith("preset:") else "checkpoint",
        max_gpu_mem_gib=config.max_gpu_mem_gib,
        max_host_mem_gib=config.max_host_mem_gib,
        device=config.device,
        dtype=config.dtype,
        seed=config.seed,
        max_seq_len=config.max_seq_len,
        max_global_batch_tokens=config.max_global_batch_tokens,
        max_image_tokens=config.max_image_tokens,
    )
    source = open_source(config.teacher, job)
    _check_words(config, source, student)
    top_k = min(config.teacher_top_k or TOP_K, source.spec.vocab_size)
    parts = [part for part in (data.batches, data.validation) if isinstance(part, (GlobalBatches, ValidationBatches))]
    with contextlib.ExitStack() as stack:
        folders = [_folder(config, source, part, top_k, stack) for part in parts]
        asked = [(part, folder) for part, folder in zip(parts, folders, strict=True) if not _complete(folder, top_k)]
        if any([bool(asked)] if team is None else team.control.gather(bool(asked))):
            planned = prepare_job(config.teacher, job, tell=False)
            pixels = _pixels(config, source, stack) if data.pixels is not None else None
            with build(planned) as engine:
                teacher = Teacher(engine, pixels, top_k, config.temperature or 1.0)
                for part, folder in zip(parts, folders, strict=True):
                    if not _complete(folder, top_k):
                        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
                    engine.context.barrier()
                    _ask(teacher, part, folder)
        for part, folder in zip(parts, folders, strict=True):
            part.reference = TeacherTable(folder, np.load(folder / STARTS_FILE), top_k)


def _check_words(config: TrainConfig, teacher: ModelSource, student: ModelSource) -> None:
    words, known = teacher.spec.vocab_size, student.spec.vocab_size
    if words != known:
        raise ValueError(
            f"--teacher {config.teacher} has a vocabulary of {words} tokens, and the model one of {known}; distillation"
            " compares probabilities of the same tokens: give a teacher with the model's tokenizer"
        )


def _pixels(config: TrainConfig, teacher: ModelSource, stack: contextlib.ExitStack) -> PixelReader:
    """What decodes images with the teacher's own processor, until the stack is closed."""
    if teacher.tokenizer_folder is None:
        raise ValueError(f"--teacher {config.teacher}: it has no processor, which reads images; give a model's folder")
    reader = PixelReader(teacher.tokenizer_folder, most_bytes_of_data(config.max_host_mem_gib))
    stack.callback(reader.close)
    return reader


def _stored(part: GlobalBatches | ValidationBatches) -> StoredSequences:
    assert isinstance(part.sequences, StoredSequences), "what options name is stored"
    return part.sequences


def _folder(
    config: TrainConfig, teacher: ModelSource, part: GlobalBatches | ValidationBatches, top_k: int,
    stack: contextlib.ExitStack,
) -> Path:  # fmt: skip
    """Where a part's rows lie: in the cache of data, or without one in a folder that goes with the stack."""
    cache = cache_of(config)
    if cache is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flexengine-teacher")), "rows")
    digest = hashlib.sha256()
    for piece in _samples(teacher):
        digest.update(piece)
    settings = (config.dtype, config.seed if teacher.weights_folder is None else 0, top_k, config.temperature)
    digest.update(repr((teacher.spec.hf_config, settings, _stored(part).sha256())).encode())
    if part.images is not None and teacher.tokenizer_folder is not None:
        digest.update(processor_key(teacher.tokenizer_folder).encode())
    return cache / digest.hexdigest()[:32]


def _samples(teacher: ModelSource) -> Iterator[bytes]:
    """Names, sizes and parts of a teacher's files of weights."""
    for path in sorted(teacher.weights_folder.glob("*.safetensors")) if teacher.weights_folder else ():
        size = path.stat().st_size
        yield f"{path.name} {size}\n".encode()
        with path.open("rb") as file:
            for place in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                file.seek(place)
                yield file.read(SAMPLE_BYTES)


def _complete(folder: Path, top_k: int) -> bool:
    """Whether a folder holds the rows of all target tokens."""
    try:
        num_rows = int(np.load(folder / STARTS_FILE)[-1])
        sizes = [(folder / name).stat().st_size for name in FILES]
    except (OSError, ValueError, EOFError):
        return False
    return sizes == [4 * num_rows * top_k, 4 * num_rows * (top_k + 1)]


def _ask(teacher: Teacher, part: GlobalBatches | ValidationBatches, folder: Path) -> None:
    """Write what the teacher says of all sequences; the folder appears whole, or not at all."""
    sequences = _stored(part)
    counts = [num_targets(sequences[i].labels) for i in range(len(sequences))]
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_room(folder.parent, int(starts[-1]) * (8 * teacher.top_k + 4), teacher.top_k)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        np.save(partial / STARTS_FILE, starts)
        with (partial / FILES[0]).open("wb") as tokens, (partial / FILES[1]).open("wb") as log_probs:
            most = teacher.engine.plan.request.max_global_batch_tokens
            split = split_epoch(sequences.lengths, most, range(len(sequences)), part.images)
            made: Iterable[Batch] = (batch_of(sequences, numbers) for numbers in split)
            for batch in made if teacher.pixels is None else teacher.pixels.filled(made):
                rows = _likeliest(teacher, batch)
                tokens.write(rows.tokens.numpy().data)
                log_probs.write(rows.log_probs.numpy().data)
        with contextlib.suppress(OSError):  # another rank or run was faster
            os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _likeliest(teacher: Teacher, batch: Batch) -> TeacherRows:
    """Ask for a batch. Raises: ValueError where its tokens of images are not those that the teacher has."""
    columns = {"input_ids": batch.input_ids, "labels": batch.labels}
    if not isinstance(batch, ImageBatch) or not batch.columns:
        return likeliest(teacher.engine, columns, teacher.top_k, teacher.temperature)
    try:
        return likeliest(teacher.engine, {**columns, **batch.columns}, teacher.top_k, teacher.temperature)
    except ValueError as error:
        raise ValueError(
            f"the teacher does not read images as the model does: {error}; give one whose processor makes the same"
            " tokens of an image"
        ) from None


def _check_room(folder: Path, num_bytes: int, top_k: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ValueError(
            f"the teacher's {top_k} likeliest tokens of all target tokens take {format_bytes(num_bytes)} in {folder},"
            f" whose disk has {format_bytes(free)} free; give a smaller --teacher-top-k, or another --data-cache"
        )
