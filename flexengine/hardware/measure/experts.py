"""Measures the products of a model's experts beside those of its linear layers.

Shapes: R rows sorted by expert, E experts: x [R, D], weight [E, F, D], y [R, F]. Experts have uneven shares of the
rows, as routing leaves them. The calls are those of the engine: weights' gradients are added to sums in float32.
"""

import torch
from torch import Tensor

from flexengine.hardware.curve import Points, interpolate
from flexengine.hardware.measure.timing import Timer, without_traffic
from flexengine.ops.experts.grouped_products import grouped_product, grouped_weight_gradient
from flexengine.ops.experts.shape import ExpertShape

EXPERT_TOKENS = (1024, 4096, 16384)
ACC_BYTES = 4


class Buffers:
    """Operands of one shape's products, of as many experts as fit some bytes with their share of the rows."""

    def __init__(
        self, shape: ExpertShape, tokens: int, dtype: torch.dtype, device: torch.device, most_bytes: int
    ) -> None:
        """Raises: ValueError where not even one expert fits."""
        experts = shape.experts
        while self.num_bytes(shape, tokens, experts, dtype) > most_bytes:
            experts //= 2
            if experts == 0:
                raise ValueError(f"one expert of {shape} takes more than {most_bytes} bytes")
        rows = _rows(shape, tokens, experts)
        self.shape = shape._replace(experts=experts)
        self.rows = rows
        self.bounds = _uneven(rows, experts).to(device)
        self.x, self.grad_x, self.y, self.grad_y = (
            torch.randn(rows, width, device=device, dtype=dtype)
            for width in (shape.in_features, shape.in_features, shape.out_features, shape.out_features)
        )
        self.weight = torch.randn(experts, shape.out_features, shape.in_features, device=device, dtype=dtype)
        self.sums = torch.zeros(self.weight.shape, device=device, dtype=torch.float32)

    @staticmethod
    def num_bytes(shape: ExpertShape, tokens: int, experts: int, dtype: torch.dtype) -> int:
        """Bytes of the operands of so many experts."""
        matrices = experts * shape.in_features * shape.out_features * (dtype.itemsize + ACC_BYTES)
        return matrices + 2 * _rows(shape, tokens, experts) * (shape.in_features + shape.out_features) * dtype.itemsize

    def seconds(self, timer: Timer, least_s: float, memory_bytes_per_s: float) -> float:
        """Seconds of the three passes, without those in which the sums are read and written."""
        w, b = self.weight, self.bounds
        forward_s = timer(lambda: grouped_product(self.x, w, b, self.y, False), least_s)
        input_s = timer(lambda: grouped_product(self.grad_y, w, b, self.grad_x, True), least_s)
        weight_s = timer(lambda: grouped_weight_gradient(self.grad_y, self.x, b, self.sums, True), least_s)
        return forward_s + input_s + without_traffic(weight_s, 2 * self.sums.nbytes, memory_bytes_per_s)

    def flops(self) -> float:
        """FLOPs of the three passes."""
        return 3 * 2.0 * self.rows * self.shape.in_features * self.shape.out_features


def grouped_shares(
    shapes: tuple[ExpertShape, ...], matmul: Points, memory_bytes_per_s: float, dtype: torch.dtype,
    device: torch.device, most_bytes: int, timer: Timer, least_s: float,
) -> Points:  # fmt: skip
    """(tokens, share of a linear layer's rate that products of all these shapes attain together).

    matmul: the linear layers' rates by tokens; counts beyond those are left out. Empty where nothing fits.
    """
    found = []
    for tokens in (count for count in EXPERT_TOKENS if count <= matmul[-1][0]):
        flops = seconds = 0.0
        for shape in shapes:
            try:
                buffers = Buffers(shape, tokens, dtype, device, most_bytes)
            except ValueError:
                continue
            whole = 3 * shape.flops(tokens)
            flops += whole
            seconds += whole / buffers.flops() * buffers.seconds(timer, least_s, memory_bytes_per_s)
            del buffers  # before the next ones are made
            torch.cuda.empty_cache()
        if seconds:
            found.append((tokens, flops / seconds / interpolate(matmul, tokens)))
    return tuple(found)


def _rows(shape: ExpertShape, tokens: int, experts: int) -> int:
    return max(1, tokens * shape.per_token * experts // shape.experts)


def _uneven(rows: int, experts: int) -> Tensor:
    """Bounds [E + 1] of shares between half and one and a half of the mean."""
    shares = 0.5 + torch.rand(experts, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = (shares.cumsum(0) / shares.sum() * rows).round().to(torch.int32)
    return torch.cat([torch.zeros(1, dtype=torch.int32), ends])
