"""The gated delta rule: our kernels beside flash-linear-attention's. Needs an NVIDIA GPU and `pip install fla-core`.

    python -m bench.delta_rule --model preset:qwen3.5-9b --json out.json

Both start from the same fused queries, keys and values in bf16 and the same raw gates, and end with gradients of those:
what a block calls. Times are of calls back to back; memory is what a call allocates at its highest, results of the
peer's included, as ours has places for them; errors are ||result - reference|| / ||reference|| against the plain path
in float64, on packed sequences of odd lengths. A half that the peer refuses is null, with its reason: some versions of
Triton miscompile its backward on some GPUs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bench.block_ops import block_env
from bench.environment import require_gpu, write_json
from flexengine.hardware.measure.timing import cuda_timer
from flexengine.models.registry import open_model
from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import OpEnv
from flexengine.ops.delta.delta_rule import DeltaRule

LEAST_S = 0.3  # of calls back to back
CHECK_LENGTHS = (700, 1, 64, 65, 173)
MIB = 2**20
RESULTS = ("output", "queries, keys, values", "strength", "decay")
"""The output, and what gradients are of."""


class Half(NamedTuple):
    """Seconds of a call, and what it allocates at its highest."""

    seconds: float
    mib: float


class Peer:
    """flash-linear-attention's op under autograd, on the tensors of our op."""

    def __init__(self, op: DeltaRule, env: OpEnv) -> None:
        self.rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        self.op, self.env = op, env
        self.leaves = [env.t[op.qkv], *(columns.of(env.t[op.gates]).flatten(1) for columns in op.columns)]
        self.leaves = [x.detach().clone().requires_grad_() for x in self.leaves]
        packed = len(env.chunk.seq_lens) > 1
        self.cu_seqlens = env.chunk.cu_seqlens.long() if packed else None
        self.o = self.forward()

    def forward(self) -> Tensor:
        with torch.enable_grad():
            op, (qkv, strength, decay) = self.op, self.leaves
            g, n, k, v = op.sizes
            queries, keys, values = qkv[None].split((g * k, g * k, n * v), dim=-1)
            a_log, dt_bias = (self.env.p[name].float() for name in op.params)
            log_decay = -a_log.exp() * softplus(decay.float() + dt_bias)
            o, _ = self.rule(
                queries.unflatten(-1, (g, k)), keys.unflatten(-1, (g, k)), values.unflatten(-1, (n, v)),
                log_decay[None], strength.sigmoid()[None],
                use_qk_l2norm_in_kernel=True, cu_seqlens=self.cu_seqlens,
            )  # fmt: skip
            self.o = o[0].flatten(1)
        return self.o

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.o, self.leaves, self.env.g[self.op.y], retain_graph=True)


def rule_of(spec: ModelSpec) -> tuple[DeltaRule, LayerSpec]:
    """The first gated delta rule and its block. Raises: SystemExit where a model has none."""
    for layer in spec.blocks:
        for op in layer.ops:
            if isinstance(op, DeltaRule):
                return op, layer
    raise SystemExit(f"--model names a {spec.family} model without linear attention; try preset:qwen3.5-9b")


def measured(call: Callable[[], object]) -> Half:
    seconds = cuda_timer(call, LEAST_S)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return Half(seconds, (torch.cuda.max_memory_allocated() - before) / MIB)


def ours(op: DeltaRule, env: OpEnv) -> tuple[Tensor, ...]:
    """RESULTS by the op, in the dtype of env."""
    op.forward(env)
    op.backward_input(env)
    return (env.t[op.y], env.g[op.qkv], *(columns.of(env.g[op.gates]).flatten(1) for columns in op.columns))


def widened(env: OpEnv) -> OpEnv:
    """The same operands in float64, which the plain path takes."""

    def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}

    return replace(env, t=wide(env.t), p=wide(env.p), g=wide(env.g), gp=wide(env.gp))


def errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """By RESULTS, as far as there are results."""
    return {name: relative(x, y) for name, x, y in zip(RESULTS, results, exact, strict=False)}


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm())


def compare(spec: ModelSpec, tokens: int, seq_len: int, device: torch.device) -> dict:
    """Both engines' halves, errors, and why the peer refused backward, if it did."""
    op, layer = rule_of(spec)
    odd = env_of(spec, layer, sum(CHECK_LENGTHS), sum(CHECK_LENGTHS), device)
    odd, env = packed(odd, CHECK_LENGTHS), env_of(spec, layer, tokens, seq_len, device)
    exact = ours(op, widened(odd))
    peer, checked, refusal = Peer(op, env), Peer(op, odd), None
    their_results: tuple[Tensor, ...] = (checked.o,)
    theirs = {"forward": measured(peer.forward), "backward": None}
    try:
        their_results += checked.backward()
        theirs["backward"] = measured(peer.backward)
    except RuntimeError as error:
        refusal = str(error)
    mine = {"forward": measured(lambda: op.forward(env)), "backward": measured(lambda: op.backward_input(env))}
    return {
        "flexengine": {"errors": errors(ours(op, odd), exact), **as_json(mine)},
        "peer": {"errors": errors(their_results, exact), "refused": refusal, **as_json(theirs)},
    }


def as_json(halves: Mapping[str, Half | None]) -> dict:
    return {name: half and half._asdict() for name, half in halves.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:qwen3.5-9b", help="whose shapes")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args(arguments)
    require_gpu("bench.delta_rule")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    spec = open_model(args.model, needs_weights=False).spec
    with torch.no_grad():
        found = compare(spec, args.tokens, args.seq_len, device)
    found = {
        "model": args.model,
        "tokens": args.tokens,
        "seq_len": args.seq_len,
        "fla-core": version("fla-core"),
    } | found
    print(json.dumps(found, indent=2))
    write_json(args.json, found)


def env_of(spec: ModelSpec, layer: LayerSpec, tokens: int, seq_len: int, device: torch.device) -> OpEnv:
    return block_env(spec, layer, tokens, seq_len, device, torch.bfloat16)


def packed(env: OpEnv, seq_lens: Sequence[int]) -> OpEnv:
    """The same rows as packed sequences of these lengths."""
    ends = torch.tensor((0, *seq_lens), device=env.chunk.cu_seqlens.device).cumsum(0).int()
    return replace(env, chunk=replace(env.chunk, cu_seqlens=ends, seq_lens=tuple(seq_lens)))


if __name__ == "__main__":
    main()
