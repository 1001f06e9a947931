"""What crosses the network of gradients that nodes exchange: as they are stored, rounded to a dtype, or FP8 codes.

FP8 has error feedback: what rounding loses of a copy, or of a sum, is kept where it was rounded and added to what is
rounded there in the next step. So the sum over many steps is off by one step's rounding, and each by at most 1/16.
Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training
of Speech DNNs"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
https://arxiv.org/abs/1901.09847; both ways: Tang et al. 2019, "DoubleSqueeze", https://arxiv.org/abs/1905.05957.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexengine.native.fp8 import BLOCK, decode_fp8, encode_fp8
from flexengine.parallel.nodes import Sent
from flexengine.runtime.arena import DTYPES
from flexengine.schedule.ranks.node_exchange import SentAs


def sent_gradients(sent: SentAs, error_factor: float = 1.0) -> Sent:
    """What crosses. error_factor: of what earlier steps lost, where gradients are not those of the same mean."""
    if sent.name == "fp8":
        assert sent.block == BLOCK, "the planner counts the bytes that are sent"
        return Fp8(error_factor)
    return AsStored(DTYPES[sent.name]) if sent.name == sent.stored else Rounded(DTYPES[sent.name])


@dataclass(frozen=True)
class Rounded:
    """Elements in another dtype than they are stored in."""

    dtype: torch.dtype
    in_place = False
    keeps_errors = False

    def num_bytes(self, count: int) -> int:
        return count * self.dtype.itemsize

    def write(self, values: Tensor, error: Tensor | None, out: Tensor) -> None:
        out.view(self.dtype).copy_(values)

    def read(self, data: Tensor, out: Tensor) -> None:
        out.copy_(data.view(self.dtype))

    def add(self, data: Tensor, total: Tensor) -> None:
        total.add_(data.view(self.dtype))


@dataclass(frozen=True)
class AsStored(Rounded):
    """Elements in the dtype that they are stored in."""

    in_place = True


@dataclass(frozen=True)
class Fp8:
    """Codes of a strip, then their scales. error_factor: of what earlier steps lost."""

    error_factor: float = 1.0
    in_place = False
    keeps_errors = True

    def num_bytes(self, count: int) -> int:
        return count + -(-count // BLOCK)

    def write(self, values: Tensor, error: Tensor | None, out: Tensor) -> None:
        assert error is not None, "FP8 is sent with error feedback"
        left = values.to(torch.float32, copy=True)
        # two roundings: one fused one would differ between the vectors and the tail of torch's loop
        left.add_(error if self.error_factor == 1.0 else error.float().mul_(self.error_factor))
        encode_fp8(left, out[: len(values)], out[len(values) :])
        error.copy_(left)

    def read(self, data: Tensor, out: Tensor) -> None:
        if out.dtype == torch.float32:
            decode_fp8(data[: len(out)], data[len(out) :], out)
        else:
            out.copy_(self._wide(data, len(out)))

    def add(self, data: Tensor, total: Tensor) -> None:
        if total.dtype == torch.float32:
            decode_fp8(data[: len(total)], data[len(total) :], total, add=True)
        else:
            total.add_(self._wide(data, len(total)))

    def _wide(self, data: Tensor, count: int) -> Tensor:
        found = torch.empty(count)
        decode_fp8(data[:count], data[count:], found)
        return found
