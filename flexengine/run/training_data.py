"""The data of a run: records read, tokenized and packed into batches of the size that the options name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexengine.checkpoint.bounded_process import MOST_BYTES
from flexengine.data import (
    GlobalBatches,
    Prepared,
    Source,
    SyntheticBatches,
    TokenizerOptions,
    TokenizerProcess,
    ValidationBatches,
    default_cache,
    hold_out,
    prepare_sources,
    sources_of,
)
from flexengine.data.batches import Room
from flexengine.data.image_pixels import PixelReader
from flexengine.data.preview import MARKS, date_line, first_line
from flexengine.data.sources import LabelNames, RecordKind
from flexengine.models.registry import ASSETS, ModelSource
from flexengine.models.spec import ModelSpec
from flexengine.objectives import OBJECTIVES
from flexengine.options.train_config import TrainConfig
from flexengine.run.rewards import Rewards
from flexengine.run.start_times import START
from flexengine.run.writers import Server
from flexengine.wording import without_folders

REWARD_S = 60.0
"""Longest call of a reward function where none is given."""
DEMO_FOLDER = ASSETS / "demo"


@dataclass(frozen=True)
class TrainingData:
    """Where batches come from, the tokenizer (None for synthetic data), and one line about both.

    validation: None when the run evaluates nothing. details: further lines, for --verbose. records: what became of the
    records of each source, as JSON values.
    sources: what is trained, none for synthetic data. rewards: what judges completions, where the model writes them.
    pixels: what decodes images, where they are trained with.
    """

    batches: GlobalBatches | SyntheticBatches
    tokenizer: TokenizerProcess | None
    description: str
    validation: ValidationBatches | None = None
    details: Sequence[str] = ()
    records: Sequence[dict[str, Any]] = ()
    sources: Sequence[Prepared] = ()
    rewards: Rewards | None = None
    pixels: PixelReader | None = None

    def digests(self) -> list[dict[str, Any]]:
        """What was trained on, by names without local folders and SHA-256 of its tokens and labels, as JSON values."""
        return [
            {"name": without_folders(part.place), "weight": part.weight, "sha256": part.table.sha256}
            for part in self.sources
        ]

    @property
    def writes_date(self) -> bool:
        """Whether conversations hold the day on which they are written."""
        return self.tokenizer is not None and self.tokenizer.date is not None


def check_sources(config: TrainConfig) -> None:
    """Raise ValueError, with what is missing, for data that is not there."""
    sources_of([*config.dataset, *config.val_dataset], config.columns, kind=record_kind(config))


@START.part("data")
def open_data(config: TrainConfig, source: ModelSource) -> TrainingData:
    """Read, tokenize and pack the data. Raises ValueError when it does not fit the model or nothing is left."""
    vocab_size = source.spec.vocab_size
    if config.generator is not None:
        Server(config.generator).check(config.max_seq_len)
    if config.data_source == "synthetic":
        batches = SyntheticBatches(vocab_size, config.max_seq_len, config.max_global_batch_tokens, config.seed)
        text = f"{batches.num_sequences} random sequences of {config.max_seq_len} tokens a step"
        return TrainingData(batches, None, text)
    folder = source.tokenizer_folder or DEMO_FOLDER
    train_on = config.train_on or "assistant"
    images = config.max_image_tokens > 0
    options = TokenizerOptions(folder, vocab_size, source.new_tokens, config.template_date, train_on, images)
    tokenizer = TokenizerProcess(options, most_bytes_of_data(config.max_host_mem_gib))
    cache, kind = cache_of(config), record_kind(config)
    labels = LabelNames() if config.compares else label_names(source.spec)
    kind = "labelled" if labels.names else kind
    sources = sources_of(config.dataset, config.columns, config.max_records, kind, labels, images)
    prepared = _prepare(config, sources, tokenizer, cache)
    evaluated = sources_of(config.val_dataset, config.columns, kind=kind, labels=labels, images=images)
    evaluated = _prepare(config, evaluated, tokenizer, cache)
    text = _describe(prepared)
    records = [part.as_json() for part in (*prepared, *evaluated)]
    prepared, validation = _with_validation(config, prepared, evaluated)
    if source.other_tokenizer is not None:
        kind = "the adapter " if config.tokenizer is None else ""
        text += f"; tokenizer and chat template are those of {kind}{source.other_tokenizer}"
    elif source.support_folder is None:
        text += "; this preset has no tokenizer of its own, so the bundled demo tokenizer is used;"
        text += " --tokenizer names another"
    sizes = config.max_global_batch_tokens, config.seed, room_of(config), config.max_image_tokens
    batches = GlobalBatches.of_parts(prepared, *sizes)
    pixels = PixelReader(folder, most_bytes_of_data(config.max_host_mem_gib)) if images else None
    for made in (batches, validation):
        if made is not None:
            made.pixels = pixels
    first = first_line(tokenizer, batches.sequences[0])
    what = "pair" if config.compares else "prompt" if config.rewards else "sequence"
    details = [f"  the first {what}, trained between {MARKS[0]} and {MARKS[1]}: {first}"]
    text += f"; {date_line(tokenizer)}" if tokenizer.date is not None else ""
    if validation is not None:
        text += f"; evaluated, not trained: {len(validation.sequences)} sequences, {validation.num_tokens} tokens"
        text += f" of {_describe(evaluated)}" if evaluated else ""
    rewards = None
    if config.rewards:
        rewards = Rewards(config.rewards, config.weights_of_rewards(), config.reward_timeout_s or REWARD_S)
    return TrainingData(batches, tokenizer, text, validation, details, records, prepared, rewards, pixels)


def cache_of(config: TrainConfig) -> Path | None:
    """The folder that keeps what was made of data; None for a user without a home."""
    return Path(config.data_cache) if config.data_cache else default_cache()


def record_kind(config: TrainConfig) -> RecordKind:
    """What the objective reads records as."""
    if config.objective == "grpo":
        return "prompt"
    return OBJECTIVES[config.objective].records if config.compares else "answers"


def room_of(config: TrainConfig) -> Room:
    """What a sequence takes of a batch; a prompt also has its completions there."""
    if config.objective != "grpo":
        return Room()
    return Room(config.completions_per_prompt, config.completion_tokens)


def label_names(spec: ModelSpec) -> LabelNames:
    """The labels of a model; none for one that predicts tokens."""
    if spec.task is None:
        return LabelNames()
    named = spec.hf_config.get("id2label") or {}
    names = (str(named.get(str(i), f"LABEL_{i}")) for i in range(spec.task.num_labels))
    return LabelNames(tuple(names), spec.task.problem)


def most_bytes_of_data(max_host_mem_gib: float | None) -> int:
    """Bound the memory in which data is read and tokenized: a quarter of the host budget where that is more."""
    return max(MOST_BYTES, int((max_host_mem_gib or 0) * 2**30) // 4)


def _prepare(
    config: TrainConfig, sources: Sequence[Source], tokenizer: TokenizerProcess, cache: Path | None
) -> list[Prepared]:
    of_prompts = config.max_seq_len - config.completion_tokens
    if config.objective == "grpo" and of_prompts < 1:
        raise ValueError(
            f"--max-completion-length {config.completion_tokens} leaves nothing of --max-seq-len {config.max_seq_len}"
            " for prompts; give a smaller one, or a larger --max-seq-len"
        )
    lengths = of_prompts if config.objective == "grpo" else config.max_seq_len, config.truncate_long
    return prepare_sources(sources, tokenizer, *lengths, cache, config.bad_records)


def _describe(parts: Sequence[Prepared]) -> str:
    """Sources in one line, and a line for each of the first bad records."""
    lines = [line for part in parts for line in part.bad_lines]
    return "\n    ".join(["; ".join(part.describe() for part in parts), *lines])


def _with_validation(
    config: TrainConfig, prepared: list[Prepared], evaluated: list[Prepared]
) -> tuple[list[Prepared], ValidationBatches | None]:
    """Return what is trained of the prepared sources, and what is evaluated: sources of its own, or a part of these."""
    if not config.validates:
        return prepared, None
    if config.val_fraction is not None:
        split = [hold_out(part, config.val_fraction, config.seed) for part in prepared]
        prepared, evaluated = [part for part, _ in split], [part for _, part in split]
    sizes = config.max_global_batch_tokens, room_of(config), config.max_image_tokens
    return prepared, ValidationBatches.of_parts(evaluated, *sizes)
