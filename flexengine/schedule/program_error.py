"""The error of all that proves programs."""

from __future__ import annotations


class ProgramError(AssertionError):
    """A program breaks an invariant; the message names the commands and the slot."""
