"""What do adapters cost in a block, and what do gated units and joint gradients spare? Needs a GPU.

    python -m bench.lora_products --model preset:llama-3.1-8b --tokens 16384 --json out.json

Times linear layers and gated units of a block, back to back, in four forms: frozen without adapters; with adapters,
each layer by itself; where gated units take passes over (ops/adapters/lora_glu.py); and as adapters are trained, where
besides one pass over the gradient of an output serves both products with it (ops/adapters/lora_grads.py). The frozen
form has no weight halves. --matmul-dtype fp8: beside FP8 products.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from unittest.mock import patch

import torch

from bench.block_ops import HALVES, OpTime, block_times
from bench.environment import require_gpu, write_json
from flexengine.hardware.measure.timing import Timer, cuda_timer
from flexengine.models.freezing import freeze_groups
from flexengine.models.lora import with_lora
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.ops.adapters.lora import LoraDown, LoraUp
from flexengine.ops.glu import GLU
from flexengine.ops.linear import Linear
from flexengine.options.lora import LoRA

LEAST_S = 0.1  # of every half of an op, back to back
FORMS = ("no adapters", "by themselves", "with gated units", "joint gradients")


def forms(spec: ModelSpec, rank: int) -> dict[str, ModelSpec]:
    """The four forms of a model, by name."""
    lora = LoRA(rank=rank)
    blocks = {i for i, group in enumerate(spec.groups) if group.name.startswith("block.")}
    with patch("flexengine.ops.adapters.lora.partial_sums", lambda *_: None):
        with_units = with_lora(spec, lora)
        with patch("flexengine.models.lora_layers._takes_sums", lambda _: False):
            apart = with_lora(spec, lora)
    # The embedding stays trained, or the blocks would have no backward at all.
    found = (freeze_groups(spec, blocks), apart, with_units, with_lora(spec, lora))
    return dict(zip(FORMS, found, strict=True))


def measure(spec: ModelSpec, tokens: int, seq_len: int, device: torch.device, timer: Timer) -> list[OpTime]:
    """Time the linear layers, adapters and gated units of a model's second block, which has gradients in every form."""
    names = {op.name for op in spec.blocks[1].ops if isinstance(op, (Linear, GLU, LoraDown, LoraUp))}
    times = block_times(spec, tokens, seq_len, device, torch.bfloat16, timer, LEAST_S, 1)
    return [time for time in times if time.op in names]


def table(found: dict[str, list[OpTime]]) -> str:
    """Milliseconds by op and half, and their sums."""
    rows = {(time.op, time.half): dict.fromkeys(FORMS, 0.0) for times in found.values() for time in times}
    for form, times in found.items():
        for time in times:
            rows[time.op, time.half][form] += 1e3 * time.seconds
    for half in HALVES:
        own = [row for (_, h), row in rows.items() if h == half]
        rows["all", half] = {form: sum(row[form] for row in own) for form in FORMS}
    everything = [row for (op, _), row in rows.items() if op == "all"]
    rows["all", "all"] = {form: sum(row[form] for row in everything) for form in FORMS}
    lines = [f"{'op':<16}{'half':<18}" + "".join(f"{form:>24}" for form in FORMS)]
    for (op, half), row in rows.items():
        lines.append(f"{op:<16}{half:<18}" + "".join(f"{row[form]:>21.3f} ms" for form in FORMS))
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--matmul-dtype", choices=("compute", "fp8"), default="compute")
    parser.add_argument("--json")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, write."""
    args = parse()
    require_gpu("bench.lora_products")
    device = torch.device("cuda", torch.cuda.current_device())
    spec = with_matmul_dtype(open_model(args.model, needs_weights=False).spec, args.matmul_dtype)
    found = {}
    with torch.no_grad():
        for form, model in forms(spec, args.rank).items():
            found[form] = measure(model, args.tokens, args.seq_len, device, cuda_timer)
            torch.cuda.empty_cache()
    print(table(found))
    sizes = {"model": args.model, "tokens": args.tokens, "seq_len": args.seq_len, "rank": args.rank}
    times = {form: [time._asdict() for time in times] for form, times in found.items()}
    write_json(args.json, {**sizes, "matmul_dtype": args.matmul_dtype, "times": times})


if __name__ == "__main__":
    main()
