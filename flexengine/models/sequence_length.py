"""Compares the longest sequence of a job with the positions that a model was made for."""

from __future__ import annotations

import logging

from flexengine.models.spec import ModelSpec

logger = logging.getLogger(__name__)


def check_sequence_length(spec: ModelSpec, max_seq_len: int) -> None:
    """Warn of sequences longer than the model was made for, with what its rotations do there.

    Raises: ValueError for sequences that it cannot take.
    """
    longest = spec.longest_sequence
    if longest is not None and max_seq_len > longest:
        if spec.beyond_longest:
            raise ValueError(
                f"max_seq_len={max_seq_len}, but {spec.name} has {spec.beyond_longest} in sequences of more than"
                f" {longest} tokens, which is not trained; give --max-seq-len {longest} or less"
            )
        has = "frequencies that change with the length of a longer sequence" if spec.tables else "none for later ones"
        raise ValueError(
            f"max_seq_len={max_seq_len}, but {spec.name} has {'rotations' if spec.tables else 'learned positions'} for"
            f" {longest} tokens and {has}; give --max-seq-len {longest} or less"
        )
    beyond = min((table.long_from for table in spec.tables if table.long_values), default=max_seq_len)
    if max_seq_len > beyond:
        logger.warning(
            "max_seq_len=%d is longer than the %d tokens that %s was made for before longrope: all sequences take its"
            " frequencies for long ones, where transformers has others for those of up to %d tokens",
            max_seq_len,
            beyond,
            spec.name,
            beyond,
        )
    if max_seq_len > spec.max_position_embeddings:
        logger.warning(
            "max_seq_len=%d is longer than the %d positions that %s was made for (max_position_embeddings): %s",
            max_seq_len,
            spec.max_position_embeddings,
            spec.name,
            _rotations_there(spec, max_seq_len),
        )


def _rotations_there(spec: ModelSpec, max_seq_len: int) -> str:
    """Tell which scaling of rotations a model has, and what that means for positions beyond its own."""
    if spec.whole_sequences:
        return "its layers run as opaque blocks, and their own code says what later positions are"
    if not spec.tables:
        return "it has no rotations, so later positions are like others, but it was not trained over such distances"
    first = spec.max_position_embeddings
    scaled = [table for table in spec.tables if table.extended]
    if not scaled:
        return (
            f"its rotations are not scaled, so those from position {first} on are new to it; training has to teach"
            " them, or rope_parameters in its config.json set a scaling (yarn, llama3, linear, longrope)"
        )
    told = ", ".join(dict.fromkeys(table.extended for table in scaled))
    if all(table.reach >= max_seq_len for table in scaled):
        return f"its rotations are scaled for that ({told}: up to {min(table.reach for table in scaled)} positions)"
    return (
        f"the scaling of its rotations ({told}) stays as its config.json has it and was not made for positions from"
        f" {max(first, *(table.reach for table in scaled))} on; training has to teach them, or a larger factor there"
    )
