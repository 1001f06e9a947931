"""Runs one op as the engine does: with the declared tensors only, over buffers filled with NaN."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch

from flexengine.ops.attention.choice import KernelName
from flexengine.ops.base import ChunkContext, Op, OpEnv, TensorSpec, Window
from flexengine.ops.columns import Columns

BYTES_UNWRITTEN = {"uint8": (0x7F, torch.uint8), "int32": (-(2**31), torch.int32)}
"""What buffers of whole numbers hold until somebody writes them: NaN in FP8, an index that no tensor has."""


@dataclass
class OpResult:
    """Outputs, gradients of inputs and gradients of parameters, by name."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    param_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: torch.Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class OpHarness:
    """Builds chunks and runs ops on a device in a compute dtype."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float64) -> None:
        self.device, self.dtype = torch.device(device), dtype

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Drawn on the CPU, so that every device and dtype sees the same numbers up to rounding."""
        return (torch.randn(*shape, dtype=torch.float64) * scale).to(self.device, self.dtype)

    def nan(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.device)

    def chunk(
        self,
        seq_lens: tuple[int, ...],
        vocab_size: int = 11,
        inv_freq: torch.Tensor | None = None,
        window: Window | None = None,
        labels: torch.Tensor | None = None,
        attention: KernelName = "flash",
    ) -> ChunkContext:
        tokens, start = sum(seq_lens), window.start if window else 0
        ids = torch.randint(vocab_size, (tokens,))
        constants = {"attention_rng": torch.zeros(2, dtype=torch.int64, device=self.device)}
        if inv_freq is not None:
            constants["inv_freq"] = inv_freq.to(self.device, wide(self.dtype))
        positions = torch.cat([torch.arange(start, start + n) for n in seq_lens])
        cu = torch.tensor([0, *seq_lens]).cumsum(0)
        return ChunkContext(
            tokens=tokens,
            input_ids=ids.to(self.device),
            labels=(ids if labels is None else labels).to(self.device),
            positions=positions.to(self.device, torch.int32),
            cu_seqlens=cu.to(self.device, torch.int32),
            seq_lens=seq_lens,
            losses=self.nan(tokens, dtype=wide(self.dtype)),
            constants=constants,
            window=window,
            attention=attention,
        )

    def window(self, op: Op, sequence_tokens: int, chunk_tokens: int) -> Window:
        """Unwritten rows of all that an op carries along a sequence, and of their gradients."""
        window = Window(0, 0, chunk_tokens)
        for spec in (carried.spec(sequence_tokens, chunk_tokens) for carried in op.carried):
            window.carried |= self._buffers((spec,), chunk_tokens)
            window.grads[spec.name] = self.nan(spec.height(0), *spec.shape, dtype=wide(self.dtype))
        return window

    def _buffers(self, specs: tuple[TensorSpec, ...], tokens: int) -> dict[str, torch.Tensor]:
        dtypes = {"compute": self.dtype, "float32": wide(self.dtype)}
        buffers = {}
        for s in specs:
            shape = (s.height(tokens), *s.shape)
            filled = None
            if s.dtype in BYTES_UNWRITTEN:
                filled = torch.full(shape, BYTES_UNWRITTEN[s.dtype][0], dtype=BYTES_UNWRITTEN[s.dtype][1])
            buffers[s.name] = self.nan(*shape, dtype=dtypes[s.dtype]) if filled is None else filled.to(self.device)
        return buffers

    def run(
        self,
        op: Op,
        chunk: ChunkContext,
        inputs: dict[str, torch.Tensor],
        params: dict[str, torch.Tensor] | None = None,
        grad_outputs: dict[str, torch.Tensor] | None = None,
        previous: dict[str, torch.Tensor] | None = None,
        previous_params: dict[str, torch.Tensor] | None = None,
        write_over: bool = False,
    ) -> OpResult:
        """Forward, then the input half, then the weight half, each with what it declares and nothing else.

        previous: gradients of inputs to add to; previous_params: accumulators to add to (then first=False).
        write_over: gradients in op.grad_over are written over the saved value.
        """
        params, previous = params or {}, previous or {}
        assert set(inputs) == set(op.inputs)
        assert set(params) == {*op.params, *op.buffers}
        result = OpResult()
        saved = {**inputs, **self.forward(op, chunk, inputs, params)}
        result.outputs = {o.name: saved[o.name].clone() for o in op.outputs}
        result.losses = chunk.losses.clone()
        if grad_outputs is None:
            return result
        first = previous_params is None
        accumulators = {
            name: self.nan(*params[name].shape, dtype=wide(self.dtype)) if first else previous_params[name].clone()
            for name in op.params
        }
        given = {name: g.clone() for name, g in grad_outputs.items()}
        left: dict[str, torch.Tensor] = {}
        if op.grad_inputs:
            left = self._buffers(op.scratch("input"), chunk.tokens)
            sides = (params, given, previous, accumulators, left)
            result.grads = self._input_half(op, chunk, saved, *sides, first, write_over)
        if op.has_weight_half:
            tensors = {name: saved[name] for name in op.needs_weight}
            needed = self._buffers(op.scratch("weight"), chunk.tokens)
            tensors |= {name: left.get(name, buffer) for name, buffer in needed.items()}
            op.backward_weight(OpEnv(tensors, params, given, accumulators, chunk, first=first))
        result.param_grads = accumulators
        return result

    def env(self, op: Op, chunk: ChunkContext, inputs: dict, params: dict, grad_outputs: dict) -> OpEnv:
        """All that any half of an op touches, for tests that call them one by one."""
        buffers = tuple(spec for half in ("forward", "input", "weight") for spec in op.scratch(half))
        tensors = {**inputs, **self._buffers((*op.outputs, *buffers), chunk.tokens)}
        grads = {name: self.nan(*inputs[name].shape) for name in op.grad_inputs if name not in dict(op.grad_alias)}
        accumulators = {name: self.nan(*p.shape, dtype=wide(self.dtype)) for name, p in params.items()}
        return OpEnv(tensors, params, {**grads, **grad_outputs}, accumulators, chunk)

    def forward(
        self, op: Op, chunk: ChunkContext, inputs: dict[str, torch.Tensor], params: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The outputs of forward; inputs stay as they are."""
        given = {name: x.clone() for name, x in inputs.items()}
        outputs = self._buffers(op.outputs, chunk.tokens)
        if op.in_place:
            source, target = op.in_place
            outputs[target] = given[source]
        tensors = {**given, **outputs, **self._buffers(op.scratch("forward"), chunk.tokens)}
        op.forward(OpEnv(tensors, params, {}, {}, chunk))
        for name, x in inputs.items():
            if not op.in_place or op.in_place[0] != name:
                assert torch.equal(given[name], x), f"{op.name} changed its input {name}"
        return outputs

    def run_cut(
        self, op: Op, inputs: dict[str, torch.Tensor], params: dict[str, torch.Tensor], grad_y: torch.Tensor,
        cuts: tuple[int, ...],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:  # fmt: skip
        """Output, gradients of inputs and of parameters of a sequence in slices: forward over these in order, the
        window filled anew, backward in reverse, as the schedule does."""
        bounds, y, slices = [0, *torch.tensor(cuts).cumsum(0).tolist()], op.outputs[0].name, []
        shared = self.window(op, bounds[-1], max(cuts))
        for i, (a, b) in enumerate(pairwise(bounds)):
            chunk = self.chunk((b - a,), window=replace(shared, start=a, chunk=i))
            own = {name: x[a:b] for name, x in inputs.items()}
            slices.append((slice(a, b), chunk, own, self.forward(op, chunk, own, params)))
        for rows in shared.carried.values():
            rows.fill_(float("nan"))
        for _, chunk, own, _ in slices:
            op.fill_window(OpEnv(own, params, {}, {}, chunk))
        for grad in shared.grads.values():
            grad.zero_()
        grads, sums = {name: self.nan(*x.shape) for name, x in inputs.items()}, {}
        for rows, chunk, own, outputs in reversed(slices):
            again = self.forward(op, chunk, own, params)
            assert all(torch.equal(again[name], outputs[name]) for name in outputs)  # as where it is recomputed
            result = self.run(op, chunk, own, params, {y: grad_y[rows]}, previous_params=sums or None)
            for name in inputs:
                grads[name][rows] = result.grads[name]
            sums = result.param_grads
        return torch.cat([outputs[y] for *_, outputs in slices]), grads, sums

    def _input_half(self, op, chunk, saved, params, given, previous, accumulators, left, first, write_over):
        tensors = {name: saved[name].clone() for name in op.needs_input} | left
        grads = dict(given)
        for name in op.grad_inputs:
            aliases = dict(op.grad_alias)
            if name in aliases:
                grads[name] = grads[aliases[name]]
            elif op.in_place and op.in_place[0] == name:
                grads[name] = grads[op.in_place[1]]
            elif name in previous:
                grads[name] = previous[name].clone()
            elif write_over and name in op.grad_over:
                grads[name] = tensors[name]
            else:
                grads[name] = self.nan(*saved[name].shape, dtype=saved[name].dtype)
        env = OpEnv(tensors, params, grads, accumulators, chunk, frozenset(previous), first)
        op.backward_input(env)
        return {name: grads[name].clone() for name in op.grad_inputs}


@pytest.fixture
def harness() -> OpHarness:
    """Plain path on the CPU in float64."""
    return OpHarness()


@pytest.fixture
def make_harness() -> type[OpHarness]:
    return OpHarness


class Checks:
    """Comparisons by relative norm."""

    GPU_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # noqa: RUF012

    @staticmethod
    def close(
        actual: torch.Tensor,
        expected: torch.Tensor,
        tolerance: float = 1e-12,
        name: str = "output",
        least_norm: float = 1e-30,
    ) -> None:
        """||actual - expected|| <= tolerance * max(||expected||, least_norm); a NaN fails."""
        actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
        assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, not {list(expected.shape)}"
        error = float((actual - expected).norm() / expected.norm().clamp(min=least_norm))
        assert error <= tolerance, f"{name}: relative error {error:.2e} exceeds {tolerance:.2e}"

    @staticmethod
    def columns(parts: tuple[Columns, ...], rows: torch.Tensor) -> torch.Tensor:
        """These columns of rows [T, all], side by side."""
        return torch.cat([part.of(rows).flatten(1) for part in parts], dim=1)

    @classmethod
    def all_close(cls, actual: dict, expected: dict, tolerance: float = 1e-12) -> None:
        """Every expected name, and no other."""
        assert set(actual) == set(expected)
        for name, value in expected.items():
            cls.close(actual[name], value, tolerance, name)

    @staticmethod
    def same_bits(a: OpResult, b: OpResult) -> None:
        for kind in ("outputs", "grads", "param_grads"):
            for name, value in getattr(a, kind).items():
                bits, again = (x.contiguous().view(torch.uint8) for x in (value, getattr(b, kind)[name]))
                assert torch.equal(bits, again), f"{kind} {name} differs between two runs"


@pytest.fixture
def checks() -> type[Checks]:
    return Checks


@pytest.fixture
def deterministic():
    """Torch's deterministic algorithms for the time of a test."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
