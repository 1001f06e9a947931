"""Where inputs that backward makes again wait, and what they take, in plans of segments of one length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from flexengine.models.spec import ModelSpec
from flexengine.plan import Home, Request
from flexengine.planner.blocks import BlockKind
from flexengine.schedule.group_storage import DTYPE_BYTES
from flexengine.schedule.layer_program import align

ON_GPU = 16
"""They wait on the GPU where they take at most this share of its budget, else on the host."""


class InputsAgain:
    """The inputs that wait in one segment at a time, of blocks of kinds `kind_of` [L]."""

    def __init__(self, model: ModelSpec, request: Request, kinds: Sequence[BlockKind], kind_of: np.ndarray) -> None:
        self._request, self._kinds, self._kind_of = request, kinds, kind_of
        self._token_bytes = model.hidden.num_bytes(1, DTYPE_BYTES[request.numerics.compute])

    @cached_property
    def places(self) -> np.ndarray:
        """By block [L] its place among those of a segment that run again, 0 for the first; -1 where it does not."""
        runs_again = np.array([kind.runs_again for kind in self._kinds])[self._kind_of]
        found = np.full(len(runs_again), -1)
        for i in np.flatnonzero(runs_again).tolist():
            found[i] = found[i - 1] + 1 if i else 0
        return found

    def hidden_bytes(self, chunk_tokens: int) -> int:
        """Bytes of one chunk of the tensor between layers."""
        return align(chunk_tokens * self._token_bytes)

    def num_bytes(self, chunk_tokens: int, chunks_per_round: int) -> int:
        """Bytes of a round's inputs that wait at one time."""
        return (int(self.places.max(initial=-1)) + 1) * self.chunks(chunks_per_round) * self.hidden_bytes(chunk_tokens)

    def chunks(self, chunks_per_round: int) -> int:
        """Chunks whose inputs wait at one time, and what else is kept when blocks run again."""
        return 1 if self._request.segments_by_chunk else chunks_per_round

    def home(self, chunk_tokens: int, chunks_per_round: int) -> Home:
        """Where they wait."""
        if self._request.segments_by_chunk:
            return "gpu"
        few = self.num_bytes(chunk_tokens, chunks_per_round) <= self._request.max_gpu_bytes // ON_GPU
        return "gpu" if few else "host"
