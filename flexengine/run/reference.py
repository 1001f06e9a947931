"""Log-probabilities of answers in the model before training, which objectives compare with.

They are computed once by the engine that is about to train, when its weights are those that it loaded: adapters that
begin change nothing yet. They are kept beside the tokens of the data, under a name that says of which model and data.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flexengine.checkpoint.atomic import atomic_file
from flexengine.data import GlobalBatches, StoredSequences, ValidationBatches
from flexengine.data.batches import Batch, batch_of, split_epoch
from flexengine.objectives import reference_log_probs
from flexengine.options.train_config import TrainConfig
from flexengine.parallel.team import Team, is_first
from flexengine.run.steps import objective_of, rows_of
from flexengine.run.training_data import TrainingData, cache_of
from flexengine.runtime.engine import Engine
from flexengine.wording import explain_os_error

logger = logging.getLogger(__name__)

FILE = "reference.npy"


def add_reference(config: TrainConfig, engine: Engine, data: TrainingData, team: Team | None) -> None:
    """Give batches of pairs the reference of each, where the objective needs one.

    Order: before the engine takes a step or loads a checkpoint. Of several ranks, all call it.
    """
    objective, cache = objective_of(config), cache_of(config)
    if objective is None or not objective.needs_reference:
        return
    for batches in (data.batches, data.validation):
        if isinstance(batches, (GlobalBatches, ValidationBatches)):
            pairs = batches.sequences
            assert isinstance(pairs, StoredSequences), "what options name is stored"
            folder = None if cache is None else cache / _key(engine, pairs)
            found = None if folder is None else _read(folder, len(pairs))
            if team is not None and not all(team.control.gather(found is not None)):
                found = None  # they compute together
            if found is None:
                found = _computed(engine, pairs, batches)
                if folder is not None and is_first(team):
                    _write(folder, found)
            batches.reference = found


def _computed(engine: Engine, pairs: StoredSequences, batches: GlobalBatches | ValidationBatches) -> np.ndarray:
    """The log-probabilities [pairs, 2] in float64, computed in batches in the order of the pairs."""
    found, most = np.empty((len(pairs), 2)), engine.plan.request.max_global_batch_tokens
    split = split_epoch(pairs.lengths, most, range(len(pairs)), batches.images)
    made: Iterable[Batch] = (batch_of(pairs, numbers) for numbers in split)
    made = made if batches.pixels is None else batches.pixels.filled(made)
    for numbers, batch in zip(split, made, strict=True):
        found[numbers[0] : numbers[-1] + 1] = reference_log_probs(engine, rows_of(batch)).reshape(-1, 2).numpy()
    return found


def _key(engine: Engine, pairs: StoredSequences) -> str:
    """A digest of all that decides the numbers: model, data, and the sizes that set the order of sums."""
    plan, numerics = engine.plan, engine.plan.request.numerics
    sizes = (plan.chunk_tokens, plan.chunks_per_round, plan.round_multiple, engine.device.type)
    digest = hashlib.sha256(engine.weights.sampled_digest())
    digest.update(repr((engine.model.hf_config, numerics, sizes, pairs.sha256())).encode())
    return digest.hexdigest()[:32]


def _read(folder: Path, num_pairs: int) -> np.ndarray | None:
    """What an earlier run left; None where there is nothing, or something else."""
    try:
        found = np.load(folder / FILE, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == (num_pairs, 2) and found.dtype == np.float64 else None


def _write(folder: Path, found: np.ndarray) -> None:
    """Keep the numbers; where that is impossible, the next run computes them again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / FILE) as file:
            np.save(file, found)
    except OSError as error:
        logger.warning("the reference is not kept for later runs: %s", explain_os_error(error))
