"""Owns memory, moves bytes, issues work: arenas, the executor, the optimizer step and the engine."""
