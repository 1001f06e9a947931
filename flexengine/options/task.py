"""What a model is for, where it does not predict tokens: labels of tokens, or labels and scores of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from flexengine.options.option import Need, Option, check_each_once

Task = Literal["sequence", "token"]
Problem = Literal["single_label_classification", "multi_label_classification", "regression"]
"""What labels are: one of several classes, any number of them, or numbers; as transformers names them."""


class TaskHead(NamedTuple):
    """A head with `num_labels` outputs for each token, or for each sequence, read at its last token but padding.

    pad_token_id: what the config calls padding, if it does.
    """

    task: Task
    num_labels: int
    problem: Problem
    pad_token_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Whose code describes the model, and what its head is for: without these what its config.json says."""

    trust_remote_code: Annotated[
        bool,
        Option(
            "run the Python code that the model's folder or repository brings (auto_map in config.json), where"
            " transformers has none for its type; one line tells what is run"
        ),
    ] = False
    task: Annotated[
        Task | None,
        Option(
            "train a head for labels: sequence = classes or scores of whole sequences, token = classes of tokens"
            " (default: what architectures in config.json says); one that the checkpoint lacks begins with random"
            " weights"
        ),
    ] = None
    labels: Annotated[
        Sequence[str],
        Option(
            "names of the classes, in the order of the head's outputs (default: those of config.json)",
            needs=(Need("task", ("sequence", "token"), why="names classes"),),
        ),
    ] = ()
    problem_type: Annotated[
        Problem | None,
        Option(
            "what a sequence's labels are: one of several classes, any number of them, or numbers (default: classes, or"
            " a number where there is one label)",
            needs=(Need("task", ("sequence",), why="is about labels of sequences"),),
        ),
    ] = None

    def check_task(self) -> None:
        """Raise ValueError for a class that has no name, or two of one name."""
        check_each_once("labels", self.labels, "name each class once")
