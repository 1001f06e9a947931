"""Attention by packages that a person may have installed: flash-attn, FlashAttention-3, and flash-attn-4.

Each package names its kernels' functions and arguments in its own way; all take packed sequences by running sums, and
leave log-sum-exps as [N, T] float32. None is required. A release whose functions are called otherwise raises
RuntimeError in the probe, which then leaves it out.
Source: Dao 2023, "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3"; https://github.com/Dao-AILab/flash-attention.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.ops.attention.choice import KernelName
from flexengine.ops.attention.kernel_calls import Kernels, Lengths, Results, Rows
from flexengine.ops.attention.style import CAUSAL, AttentionStyle

MOST_SEQUENCES = 31
"""Sequences of a call. Backward pads each to a tile of up to 128 rows, and its float32 sums of queries, keys and values
then fit in `kernel_workspace_bytes`, whose padding is that of 64 sequences of queries alone."""


class Call(NamedTuple):
    """Running sums and the longest sequence of queries and of keys, and the scoring."""

    cu_queries: Tensor
    cu_keys: Tensor
    longest: tuple[int, int]
    scale: float
    causal: bool
    window: int

    @staticmethod
    def of(rows: Rows, lengths: Lengths | None, style: AttentionStyle) -> Call:
        """A call; of a slice, whose keys are all of its sequence, both sums are those of one sequence."""
        causal, scale = lengths is not None, style.scale_of(rows.q.shape[2])
        window = style.window if causal else 0
        if lengths is not None and len(rows.k) == len(rows.q):
            longest = max(lengths.seq_lens)
            return Call(lengths.cu_seqlens, lengths.cu_seqlens, (longest, longest), scale, causal, window)
        counts = len(rows.q), len(rows.k)
        queries, keys = (torch.arange(0, n + 1, n, dtype=torch.int32, device=rows.q.device) for n in counts)
        return Call(queries, keys, counts, scale, causal, window)


class Package(Kernels):
    """Kernels of a package: the module that has both functions, and the major compute capabilities that they run on."""

    module: str
    functions: tuple[str, str]
    majors: range
    deterministic_majors: range
    """On which cards backward has a fixed order of sums in no more memory."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, style: AttentionStyle = CAUSAL
    ) -> tuple[Tensor, Tensor]:
        rows = Rows(q, k, v)
        arguments, options = self._forward(rows, Call.of(rows, lengths, style))
        out, lse, *_ = self._run(0, arguments, options)
        return out, lse

    def backward(
        self, grad_out: Tensor, rows: Rows, results: Results, lengths: Lengths | None, rng: Tensor,
        style: AttentionStyle = CAUSAL,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        grads = Rows(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in rows))
        lse = results.lse.contiguous()
        operands = (grad_out.contiguous(), rows, Results(results.out.contiguous(), lse))
        arguments, options = self._backward(*operands, grads, Call.of(rows, lengths, style))
        self._run(1, arguments, options)
        return grads

    @abstractmethod
    def _forward(self, rows: Rows, call: Call) -> tuple[tuple, dict[str, Any]]:
        """Arguments and options of the forward function, whose first results are (out, lse)."""

    @abstractmethod
    def _backward(
        self, grad_out: Tensor, rows: Rows, results: Results, grads: Rows, call: Call
    ) -> tuple[tuple, dict[str, Any]]:
        """Arguments and options of the backward function, which writes grads."""

    def _run(self, half: int, arguments: tuple, options: dict[str, Any]) -> Any:
        """Raises: RuntimeError in whatever way the package refuses a call."""
        try:
            return self._function(half)(*arguments, **options)
        except RuntimeError:
            raise
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{self.module}.{self.functions[half]} cannot be called so: {found}") from error

    def _function(self, half: int) -> Callable[..., Any]:
        return getattr(_loaded(self.module), self.functions[half])


@lru_cache
def _loaded(module: str) -> ModuleType:
    """A package's module. The DSL warns at every compilation of arguments that flash-attn-4 leaves out."""
    warnings.filterwarnings("ignore", r"(?s).*cannot be converted to a JitArgument", UserWarning)
    return import_module(module)


def _sides(window: int, nothing: Any) -> dict[str, Any]:
    """How many keys before and after its own a query sees."""
    left, right = (window - 1, 0) if window else (nothing, nothing)
    return {"window_size_left": left, "window_size_right": right}


def _fixed_order() -> bool:
    return torch.are_deterministic_algorithms_enabled()


class FlashAttn2(Package):
    """flash-attn 2.8. With a fixed order its backward takes a sum of queries' gradients for every program."""

    module, functions = "flash_attn.flash_attn_interface", ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
    majors, deterministic_majors = range(8, 13), range(0)

    def _forward(self, rows: Rows, call: Call) -> tuple[tuple, dict[str, Any]]:
        sums = (call.cu_queries, call.cu_keys, *call.longest)
        return (*rows, *sums, 0.0, call.scale, call.causal), _sides(call.window, -1)

    def _backward(
        self, grad_out: Tensor, rows: Rows, results: Results, grads: Rows, call: Call
    ) -> tuple[tuple, dict[str, Any]]:
        sums, sides = (call.cu_queries, call.cu_keys, *call.longest), _sides(call.window, -1).values()
        tensors = (grad_out, *rows, *results, *grads)
        return (*tensors, *sums, 0.0, call.scale, call.causal, *sides, 0.0, None, False), {}


class FlashAttn3(Package):
    """FlashAttention-3 for Hopper, as its repository builds it."""

    module, functions = "flash_attn_interface", ("_flash_attn_forward", "_flash_attn_backward")
    majors, deterministic_majors = range(9, 10), range(9, 10)

    def _forward(self, rows: Rows, call: Call) -> tuple[tuple, dict[str, Any]]:
        options = _packed(call) | {"softmax_scale": call.scale, "causal": call.causal} | _sides(call.window, -1)
        return tuple(rows), options

    def _backward(
        self, grad_out: Tensor, rows: Rows, results: Results, grads: Rows, call: Call
    ) -> tuple[tuple, dict[str, Any]]:
        options = _packed(call) | {"softmax_scale": call.scale, "is_causal": call.causal} | _sides(call.window, -1)
        options |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        return (grad_out, *rows, *results), options | {"deterministic": _fixed_order()}


class FlashAttn4(Package):
    """flash-attn-4: kernels in the CuTe DSL, compiled when first called."""

    module, functions = "flash_attn.cute.interface", ("_flash_attn_fwd", "_flash_attn_bwd")
    majors, deterministic_majors = range(9, 13), range(9, 12)

    def _forward(self, rows: Rows, call: Call) -> tuple[tuple, dict[str, Any]]:
        options = _packed(call) | {"softmax_scale": call.scale, "causal": call.causal} | _sides(call.window, None)
        return tuple(rows), options | {"return_lse": True}

    def _backward(
        self, grad_out: Tensor, rows: Rows, results: Results, grads: Rows, call: Call
    ) -> tuple[tuple, dict[str, Any]]:
        options = _packed(call) | {"softmax_scale": call.scale, "causal": call.causal} | _sides(call.window, None)
        options |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
        return (*rows, results.out, grad_out, results.lse), options | {"deterministic": _fixed_order()}


def _packed(call: Call) -> dict[str, Any]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, (call.cu_queries, call.cu_keys, *call.longest), strict=True))


PACKAGES: dict[KernelName, Package] = {"flash2": FlashAttn2(), "flash3": FlashAttn3(), "flash4": FlashAttn4()}


@lru_cache
def installed(name: KernelName) -> bool:
    """Whether a package's module can be found, which loads the packages that it lies in."""
    try:
        return find_spec(PACKAGES[name].module) is not None
    except Exception:  # whatever a package that does not fit this torch raises
        return False


def installed_packages() -> tuple[KernelName, ...]:
    """The packages whose kernels a probe may find."""
    return tuple(name for name in PACKAGES if installed(name))


def package_runs_on(name: KernelName, major: int) -> bool:
    """Whether a package has kernels for cards of this compute capability in torch's mode of now."""
    package = PACKAGES[name]
    return major in (package.deterministic_majors if _fixed_order() else package.majors)
