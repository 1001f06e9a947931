"""How long do products of experts and their gated units take, together and one after the other? Needs an NVIDIA GPU.

    python -m bench.experts --model preset:qwen3-30b-a3b --tokens 16384 --json out.json

Rows are routed evenly at random. Together: one kernel makes both (kernels/grouped_glu.py). Apart: the product, then the
unit. Median of calls back to back; adapted: with adapters of rank 16. Says whether both ways give the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.environment import require_gpu, write_json
from flexengine.hardware.measure.timing import cuda_timer
from flexengine.models.registry import open_model
from flexengine.ops.experts.experts import GroupedLinear, WeightedGLU

LEAST_S = 0.2
RANK = 16

Way = tuple[str, Callable[[], list[Tensor]], Callable[[], list[Tensor]]]
"""(name, together, apart)."""


def ops_of(name: str) -> tuple[GroupedLinear, WeightedGLU, GroupedLinear]:
    """The experts of a model's first block that has some. Raises: SystemExit where none has."""
    for block in open_model(name, needs_weights=False).spec.blocks:
        ops = {op.name: op for op in block.ops}
        found = (ops.get("experts_gate_up"), ops.get("experts_glu"), ops.get("experts_down"))
        if isinstance(found[0], GroupedLinear) and isinstance(found[1], WeightedGLU):
            assert isinstance(found[2], GroupedLinear)
            return found[0], found[1], found[2]
    raise SystemExit(f"{name} has no experts with a gated unit")


def ways(name: str, tokens: int, adapted: bool, device: torch.device) -> Iterator[Way]:
    """Both directions, on random operands."""
    from flexengine.kernels import glu, grouped, grouped_glu  # noqa: PLC0415 (Triton is imported when first used)

    gate_up_op, unit, down_op = ops_of(name)
    experts, count, activation = gate_up_op.num_experts, gate_up_op.per_token, unit.activation
    inner, width, rows = gate_up_op.in_features, unit.width, tokens * gate_up_op.per_token

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    chosen = torch.rand(tokens, experts, device=device).topk(count).indices.flatten()
    bounds = torch.searchsorted(chosen.sort().values, torch.arange(experts + 1, device=device)).int()
    x, gate_up, a, row_weight = (
        normal(rows, inner),
        normal(rows, 2 * width),
        normal(rows, width),
        chosen.float() / experts,
    )
    up = normal(experts, *((inner, 2 * width) if gate_up_op.transposed else (2 * width, inner)))
    down = normal(experts, *((width, inner) if down_op.transposed else (inner, width)))
    forward = grouped.LowRank(normal(rows, 2 * RANK), normal(experts, 2 * width, 2 * RANK)) if adapted else None
    back = grouped.LowRank(normal(rows, RANK), normal(experts, RANK, width), transposed=True) if adapted else None
    grad, of_weight = torch.empty_like(gate_up), torch.empty_like(row_weight)
    partials = torch.empty(rows, grouped_glu.tiles_of(width), device=device)

    def forward_together() -> list[Tensor]:
        operands = (x, up, bounds, gate_up, a, row_weight, gate_up_op.transposed, activation)
        grouped_glu.gated_product(*operands, adapter=forward)
        return [gate_up, a]

    def forward_apart() -> list[Tensor]:
        grouped.grouped_product(x, up, bounds, gate_up, gate_up_op.transposed, adapter=forward)
        glu.glu_forward(gate_up, a, activation, row_weight)
        return [gate_up, a]

    def backward_together() -> list[Tensor]:
        operands = (x, down, bounds, gate_up, grad, row_weight, partials, down_op.transposed, activation)
        grouped_glu.gated_gradient(*operands, back)
        grouped_glu.sum_tiles(partials, bounds, of_weight, False)
        return [grad, of_weight]

    def backward_apart() -> list[Tensor]:
        grouped.grouped_product(x, down, bounds, a, not down_op.transposed, adapter=back)
        glu.glu_backward(a, gate_up, grad, activation, row_weight, of_weight)
        return [grad, of_weight]

    yield "forward", forward_together, forward_apart
    yield "backward", backward_together, backward_apart


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", default=["preset:qwen3-30b-a3b", "preset:olmoe-1b-7b"], help="whose shapes"
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    require_gpu("bench.experts")
    device, found = torch.device("cuda", torch.cuda.current_device()), []
    torch.manual_seed(0)
    for model in args.model:
        for adapted in (False, True):
            for half, together, apart in ways(model, args.tokens, adapted, device):
                first = [each.clone() for each in together()]
                same = all(torch.equal(a, b) for a, b in zip(first, apart(), strict=True))
                together_s, apart_s = cuda_timer(together, LEAST_S), cuda_timer(apart, LEAST_S)
                row = {"model": model, "adapted": adapted, "half": half, "together_s": together_s, "apart_s": apart_s}
                found.append(row | {"same_bits": same})
                times = f"{1e3 * together_s:8.3f} ms together {1e3 * apart_s:8.3f} apart {apart_s / together_s:6.3f} x"
                print(f"{model:24}{'adapted' if adapted else '':8}{half:9}{times}  same bits: {same}", flush=True)
                torch.cuda.empty_cache()
    write_json(args.json, {"tokens": args.tokens, "rows": found})


if __name__ == "__main__":
    main()
