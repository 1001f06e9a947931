"""Compiles Triton kernels without a GPU: for compute capability 9.0, where it looks for matrix products whose operands
are overwritten while they run, and for consumer cards, whose programs have 99 KiB of shared memory.

Such products (wgmma) run on while a warp goes on. Triton's pipelining of loads lets the one of an iteration run into
the next; where the loaded tile is read in another way too, Triton 3.6 and 3.9 keep one copy of it all the same, and
the next iteration's load overwrites it while the product still reads. Triton's interpreter knows nothing of that, and
on a GPU it shows in some runs, in some rows.

    python tests/hopper_compile.py [--hopper CASE ...] [--small CAPABILITY ... [--cases CASE ...] [--only KERNEL]]

prints the kernels that were compiled for 9.0 (default: all cases), with what is wrong with them, as JSON; and how many
bytes of shared memory kernels of the cases (default: all, which takes minutes) take on cards of the capabilities, such
as 86, 89, 120.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit
from triton.runtime.driver import driver

SMALL_BYTES = 99 * 1024
_NAME = r"%[\w#]+"


class Compiled(Exception):  # noqa: N818 - no error
    """Thrown once there is the code of a kernel, before it would be assembled."""


class CompilingDriver:
    """What Triton asks a driver before it compiles for cards of a compute capability. Each has a device number of its
    own, so that Triton keeps their kernels apart."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def compiling(
    capability: int = 90, stage: str = "make_ttgir", only: str = ""
) -> Iterator[list[tuple[str, str, dict[str, Any]]]]:
    """Launches compile only, as far as a stage of Triton's compiler: the kernels' names, their code after it and what
    Triton knows of them then. only: a kernel's name, the others are left out. This process is left with a driver that
    cannot launch."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    getitem, make = jit.KernelInterface.__getitem__, CUDABackend.__dict__[stage]

    def launch(self, grid) -> Callable[..., None]:
        def compiled(*args, **options) -> None:
            if only not in ("", self.fn.__name__):
                return
            # CPU tensors ask for what the interpreter can do.
            changes = {n: v for n, v in {"WIDE": False, "NATIVE": capability >= 89}.items() if n in options}
            try:
                self.run(*args, grid=(1,), warmup=True, **{**options, **changes})
            except Compiled as done:
                found.append((self.fn.__name__, *done.args))

        return compiled

    def stop(*args, **options) -> None:
        code = getattr(make, "__func__", make)(*args, **options)
        raise Compiled(str(code), next(each for each in args if isinstance(each, dict)))

    driver.set_active(cast("Any", CompilingDriver(capability)))
    jit.KernelInterface.__getitem__ = launch
    setattr(CUDABackend, stage, staticmethod(stop) if isinstance(make, staticmethod) else stop)
    try:
        yield found
    finally:
        jit.KernelInterface.__getitem__ = getitem
        setattr(CUDABackend, stage, make)


def hazards(code: str) -> list[str]:
    """Products that may still read a buffer when a copy to it begins, or whose registers are needed again before they
    have been waited for; lines are looked at twice, as the end of a loop comes before its begin."""
    found: list[str] = []
    for body in _loops(code.splitlines()):
        found += _hazards_of(code, body)
    return found


def _loops(lines: list[str]) -> Iterator[list[str]]:
    """The bodies of the loops that hold products."""
    for start, line in enumerate(lines):
        if "scf.for" in line:
            indent = len(line) - len(line.lstrip())
            end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith(" " * indent + "}"))
            body = lines[start + 1 : end]
            if any("warp_group_dot " in each for each in body):
                yield body


def _hazards_of(code: str, body: list[str]) -> list[str]:
    depth = {
        name: int(n) for name, n in re.findall(rf"({_NAME}) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", code)
    }
    views = dict(re.findall(rf"({_NAME}) = ttg\.memdesc_\w+ ({_NAME})", code))

    def buffer(name: str) -> str:
        while name in views:
            name = views[name]
        return name

    running: list[list[str]] = []
    found = []
    for line in body * 2:
        if dot := re.search(rf"warp_group_dot ({_NAME}), ({_NAME})", line):
            if "dot_op" in line:
                running.append(["registers", buffer(dot[2])])
            else:
                running.append([buffer(name) for name in dot.groups()])
        elif wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
            running = running[len(running) - int(wait[1]) :] if int(wait[1]) else []
            if any("registers" in operands for operands in running):
                found.append(f"registers of a product are not waited for: {line.strip()}")
        elif copy := re.search(
            rf"async_(?:copy_global_to_local {_NAME},|tma_copy_global_to_local {_NAME}\[.*?\]) ({_NAME})", line
        ):
            target = buffer(copy[1])
            if depth[target] == 1 and any(target in operands for operands in running):
                found.append(f"a product may still read {target}, which there is once: {line.strip()}")
    return sorted(set(found))


# -- what is compiled --------------------------------------------------------------------------------------------------


def delta_rule(key_dim: int, value_dim: int, dtype: torch.dtype, between: torch.dtype = torch.float32) -> None:
    """Both halves of the gated delta rule. between: what it stores between kernels."""
    from flexengine.ops.delta import kernels as delta_kernels  # noqa: PLC0415
    from flexengine.ops.delta.tiles import Ends, Operands, Sizes  # noqa: PLC0415

    sizes, lengths = Sizes(1, 2, key_dim, value_dim), (65, 3)
    tokens = sum(lengths)
    qkv, gates = torch.zeros(tokens, 2 * key_dim + 2 * value_dim, dtype=dtype), torch.zeros(2, tokens, 2)
    given = Operands(qkv, (gates[0], gates[1]), torch.tensor((0, 65, 68), dtype=torch.int32), lengths, sizes, Ends())
    given = given._replace(between=between)
    o = torch.zeros(tokens, 2 * value_dim, dtype=dtype)
    delta_kernels.forward(given, o)
    delta_kernels.fill_window(given)
    delta_kernels.backward(given, o, Ends(), qkv.clone(), (gates[0].clone(), gates[1].clone()))


def scan(state: int, head_dim: int, dtype: torch.dtype) -> None:
    """Both halves of Mamba-2's scan."""
    from flexengine.ops.delta import scan_kernels  # noqa: PLC0415
    from flexengine.ops.delta.tiles import Ends, Operands, Sizes  # noqa: PLC0415

    sizes, lengths = Sizes(1, 4, state, head_dim), (65, 3)
    xbc, gates = torch.zeros(sum(lengths), 4 * head_dim + 2 * state, dtype=dtype), torch.zeros(3, sum(lengths), 4)
    ends, skip, o = torch.tensor((0, 65, 68), dtype=torch.int32), torch.zeros(4), torch.zeros(68, 4 * head_dim)
    given = Operands(xbc, (gates[0], gates[1]), ends, lengths, sizes, Ends(), skip)
    scan_kernels.forward(given, o.to(dtype))
    scan_kernels.fill_window(given)
    scan_kernels.backward(given, o.to(dtype), Ends(), xbc.clone(), tuple(gates.clone()))


def experts(tiling: tuple[int, ...]) -> None:
    """Products of experts and their weights' gradients."""
    from flexengine.kernels import grouped as kernels  # noqa: PLC0415

    rows, bounds = torch.zeros(256, 128, dtype=torch.bfloat16), torch.tensor((0, 100, 256), dtype=torch.int32)
    weight, acc = torch.zeros(2, 128, 128, dtype=torch.bfloat16), torch.zeros(2, 128, 128)
    with patch.object(kernels, "_tiling", lambda _: kernels.Tiling(*tiling)):
        for transposed in (False, True):
            kernels.grouped_product(rows, weight, bounds, rows.clone(), transposed)
            low = kernels.LowRank(rows[:, :32].contiguous(), weight[:, :32].contiguous(), transposed=True)
            operands = (rows, weight, bounds, rows.clone(), transposed, None, None, low, None)
            kernels.launch(*operands, kernels.Tiling(*tiling))
            kernels.grouped_walk.launch(*operands, kernels.grouped_walk.Walk(kernels.Tiling(*tiling)))
    kernels.grouped_weight_gradient(rows, rows, bounds, acc, True)
    for accumulate in (False, True):
        kernels.grouped_gradient_tma.launch(rows, rows, bounds, acc, accumulate)


def attention(heads: tuple[int, int], widths: tuple[int, int], soft_cap: float = 0.0, window: int = 0) -> None:
    """Both directions of attention, with the tiles of a Hopper card."""
    from flexengine.kernels import attention as forward  # noqa: PLC0415
    from flexengine.kernels import attention_backward as backward  # noqa: PLC0415
    from flexengine.kernels.attention_tilings import Scoring  # noqa: PLC0415

    (n, g), (h, v), tokens = heads, widths, 256
    q, k, out = (torch.zeros(tokens, *shape, dtype=torch.bfloat16) for shape in ((n, h), (g, h), (n, v)))
    values, lse = torch.zeros(tokens, g, v, dtype=torch.bfloat16), torch.zeros(n, tokens)
    operands = forward.Operands(q, k, values, torch.tensor((0, 100, tokens), dtype=torch.int32))
    scoring = Scoring(h**-0.5, soft_cap, window)
    forward.attention_forward(operands, scoring, out, lse)
    grads = backward.Gradients(q.clone(), k.clone(), values.clone())
    backward.attention_backward(operands, scoring, backward.Forward(out, out, lse), grads)


def adapted_unit() -> None:
    """Both directions of a gated unit that adds what adapters change before and behind it, and a sum with them."""
    from flexengine.kernels import adapted_glu, lora_glu, lora_grads, lora_sum, rounded_lora_glu  # noqa: PLC0415

    gate_up, out, low = (torch.zeros(256, columns, dtype=torch.bfloat16) for columns in (512, 256, 32))
    up, halves = torch.zeros(512, 16, dtype=torch.bfloat16), ((0, 0, 0), (256, 16, 256))
    lora_glu.glu_forward(gate_up, low, up, halves, out, "silu")
    behind = torch.zeros(256, 16, dtype=torch.bfloat16), torch.zeros(16, 256, dtype=torch.bfloat16)
    lora_glu.glu_backward(out, gate_up, low, up, halves, gate_up, "silu", behind)
    parts = torch.zeros(256, 16), torch.zeros(2, 16 * 256)
    both = (adapted_glu.Behind(*behind, each) for each in parts)
    adapted_glu.unit_forward(gate_up, (low, up, halves), next(both), 256, out, "silu")
    adapted_glu.unit_backward(out, gate_up, (low, up, halves), next(both), gate_up, "silu")
    kept = torch.zeros(256, 512, dtype=torch.uint8), torch.zeros(256, 4)
    rounded_lora_glu.round_sums(gate_up, low, up, halves, *kept, 448.0, 1e-30, out, "silu")
    rounded_lora_glu.glu_backward_from_codes(out, *kept, gate_up, "silu", behind)
    lora_sum.add_product(out, low[:, :16], up[:256], out)
    parts, sums = torch.zeros(256, 2 * 16), torch.zeros(16, 512 * 16)
    lora_grads.write_gradients(gate_up, low, up, 1.0, low, parts, sums, (256, 256), 256)


def fp8_blocks() -> None:
    """What rounds to FP8 with scales for blocks, and what multiplies it, of experts, too."""
    from flexengine.kernels import fp8_block_product, fp8_blocks, fp8_glu, grouped  # noqa: PLC0415

    x, codes = torch.zeros(256, 256, dtype=torch.bfloat16), torch.zeros(256, 256, dtype=torch.float8_e4m3fn)
    scales, squares = torch.zeros(2, 256), torch.zeros(2, 4)
    fp8_blocks.round_vectors(x, 448.0, 1e-30, (codes, scales), (codes.clone(), scales.clone()))
    for transposed in (False, True):
        fp8_blocks.round_squares(x, 448.0, 1e-30, codes, squares, transposed)
    fp8_blocks.transpose_squares(codes, squares[:, :2].contiguous(), codes.clone(), squares)
    unit = (codes[:, :128].contiguous(), scales[:1].contiguous())
    fp8_glu.glu_forward(x, *unit, 448.0, 1e-30, "silu", None)
    fp8_glu.glu_backward(x[:, :128].contiguous(), x, codes, scales, 448.0, 1e-30, "silu")
    fp8_block_product.block_product(codes, codes, scales, squares, True, x, None, False)
    fp8_block_product.block_product(codes, codes, scales, scales, False, x.float(), None, True)
    of_experts = grouped.Scales(scales, torch.zeros(2, 1, 4), blocks=True)
    operands = (
        codes,
        codes.view(2, 128, 256),
        torch.tensor((0, 100, 256), dtype=torch.int32),
        x[:, :128].clone(),
        False,
    )
    grouped.grouped_product(*operands, scales=of_experts)
    grouped.launch(*operands, None, None, None, None, grouped._BLOCK_TILING, of_experts)


WIDE_TILES = "experts, wide tiles"
CASES: dict[str, Callable[[], None]] = {
    "attention, 64": lambda: attention((8, 1), (64, 64)),
    "attention, 64, window": lambda: attention((8, 1), (64, 64), window=128),
    "attention, 128": lambda: attention((8, 2), (128, 128)),
    "attention, 128, window": lambda: attention((7, 1), (128, 128), window=4096),
    "attention, 256, soft cap": lambda: attention((4, 2), (256, 256), 50.0),
    "attention, 192 and 128": lambda: attention((2, 2), (192, 128)),
    "delta rule, 128": lambda: delta_rule(128, 128, torch.bfloat16),
    "delta rule, 128, stored in bf16": lambda: delta_rule(128, 128, torch.bfloat16, torch.bfloat16),
    "delta rule, 256, stored in bf16": lambda: delta_rule(256, 256, torch.bfloat16, torch.bfloat16),
    "delta rule, 64 and 256": lambda: delta_rule(64, 256, torch.bfloat16),
    "delta rule, 256 and 128": lambda: delta_rule(256, 128, torch.bfloat16),
    "delta rule, 128, fp32": lambda: delta_rule(128, 128, torch.float32),
    "scan, 128 and 64": lambda: scan(128, 64, torch.bfloat16),
    "adapted unit": adapted_unit,
    "FP8 blocks": fp8_blocks,
    "experts": lambda: experts((128, 128, 64, 8, 8, 3)),
    WIDE_TILES: lambda: experts((128, 256, 64, 8, 8, 3)),
}


def hopper_kernels(cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The kernels of cases for 9.0, each with its products and what may overwrite their operands."""
    for case in cases:
        with compiling() as kernels, torch.no_grad():
            CASES[case]()
        for name, code in dict.fromkeys((name, code) for name, code, _ in kernels):
            products = code.count("warp_group_dot ")
            yield {"case": case, "kernel": name, "products": products, "hazards": hazards(code)}


def gradients() -> Iterator[dict[str, Any]]:
    """Experts' weight gradients that the engine for tiles moves, as PTX for 9.0: how many products may run on at a wait
    of the loop, and how many selections of numbers there are: of sums that a product may still be adding to."""
    from flexengine.kernels import grouped_gradient_tma  # noqa: PLC0415

    rows, bounds = torch.zeros(256, 2048, dtype=torch.bfloat16), torch.tensor((0, 100, 256), dtype=torch.int32)
    for accumulate in (False, True):
        with compiling(stage="make_ptx") as kernels:
            grouped_gradient_tma.launch(rows, rows, bounds, torch.zeros(2, 2048, 2048), accumulate)
        ((_, code, known),) = kernels
        yield {
            "accumulate": accumulate,
            "pending": [int(each) for each in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", code)],
            "selections": code.count("selp.f32"),
            "additions": code.count("cp.reduce.async.bulk.tensor"),
            "shared_bytes": known["shared"],
        }


def sums_of_ranks() -> Iterator[dict[str, Any]]:
    """What adds up the rows of four ranks in bf16, as PTX for 9.0: how many roundings there are in a thread. Rows of
    one element are a case of their own, as Triton takes a stride of 1 for a constant."""
    from flexengine.kernels import grad_accumulate  # noqa: PLC0415

    for elements in (1, 4096):
        stored = torch.zeros(elements, dtype=torch.bfloat16)
        with compiling(stage="make_ptx") as kernels:
            elsewhere = 1, torch.zeros(elements)
            grad_accumulate.fold(torch.zeros(4, elements), None, stored, True, torch.zeros(1), elsewhere=elsewhere)
        ((_, code, _),) = kernels
        yield {"elements": elements, "roundings": len(re.findall(r"cvt\.rn\.bf16(?:x2)?\.f32", code))}


def small_kernels(capability: int, cases: Sequence[str], only: str = "") -> Iterator[dict[str, Any]]:
    """The kernels of cases (only: of one name) for cards with little shared memory, each with what it takes of it."""
    from flexengine.kernels import attention_tilings  # noqa: PLC0415

    for case in cases:
        little = patch.object(attention_tilings, "_shared_memory_bytes", lambda _: SMALL_BYTES)
        with little, compiling(capability, "make_llir", only) as kernels, torch.no_grad():
            CASES[case]()
        for name, shared_bytes in dict.fromkeys((name, known["shared"]) for name, _, known in kernels):
            yield {"case": case, "kernel": name, "capability": capability, "shared_bytes": shared_bytes}


def main() -> None:
    """Compile all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hopper", nargs="*", default=[*CASES], metavar="CASE")
    parser.add_argument("--small", type=int, nargs="*", default=[], help="compute capabilities, such as 89")
    parser.add_argument("--cases", nargs="*", default=[name for name in CASES if name != WIDE_TILES])
    parser.add_argument("--only", default="", metavar="KERNEL", help="of the kernels for small cards")
    args = parser.parse_args()
    small = [row for capability in args.small for row in small_kernels(capability, args.cases, args.only)]
    found = {"kernels": [*hopper_kernels(args.hopper)], "gradients": [*gradients()], "small": small}
    found["sums"] = [*sums_of_ranks()]
    print(json.dumps({"triton": triton.__version__, **found}, indent=2))


if __name__ == "__main__":
    main()
