"""Do two ranks on one GPU train to the bits of one, and what do their signals and shared pages cost? As JSON.

python -m bench.ranks_on_one_gpu --json out.json
python -m bench.ranks_on_one_gpu --device cpu --json out.json

- train: blocks shaped as Llama-3.1-8B's, a step of four rounds, by one rank and by two that share the card, each capped
  at half of its memory. Two ranks run five times: streams wait for each other, then the hosts; then ranks walk the
  layers together (`--transport split`), with the host's memory between them; then each has blocks of its own
  (`--transport stages`), some of them resident, and streams wait for each other, then the hosts. Digests of losses,
  norms and weights have to be equal.
- hops: seconds from a signal of one rank until the other has seen it, and answers. Streams of the GPU, and hosts.
- pages: GB/s of mapping, of page-locking and of copies to the GPU, for memory that ranks share (in huge pages where the
  kernel gives them, and in small ones) and for private memory.
- adamw: parameters/s of the CPU's update on shared pages and on private ones, taken in turn.

On a CPU the model is small, and parts that need a GPU are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import rank_processes
from bench.cpu_adamw import MODES, native_update
from bench.environment import write_json
from bench.rank_hops import hops
from bench.rank_processes import required, told
from bench.shared_pages import KINDS, pages
from flexengine.hardware.measure.timing import cpu_timer
from flexengine.models.registry import ModelSource, build_model
from flexengine.optim import AdamW
from flexengine.parallel.team import Team, join, leave
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan, Request
from flexengine.runtime.engine import Engine, EngineSettings
from flexengine.runtime.execution.executor import STREAM_SIGNALS_VARIABLE
from flexengine.runtime.ranks.context import RankGroup

PARTS = ("train", "hops", "pages", "adamw")
GIB = 2**30
ADAMW_MODE = "split master, float32 states, bf16 gradient"
BF16 = Numerics("bfloat16", "split", "bfloat16", "float32")


class Size(NamedTuple):
    """What is trained, and how much memory is measured."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    blocks: int
    vocab: int
    chunk_tokens: int
    pages_bytes: int
    adamw_numel: int


EIGHT_B = Size(4096, 14336, 32, 8, blocks=2, vocab=32000, chunk_tokens=2048, pages_bytes=8 * GIB, adamw_numel=2**27)
SMALL = Size(256, 512, 4, 2, blocks=2, vocab=1000, chunk_tokens=64, pages_bytes=GIB, adamw_numel=2**25)
STEPS, ROUNDS, CHUNKS_PER_ROUND = 3, 4, 2


# ---- what each rank does ----------------------------------------------------------------------------------------


def model_of(size: Size) -> ModelSource:
    """Blocks of a Llama model with random weights."""
    config = {
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.blocks,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.hidden // size.heads,
        "vocab_size": size.vocab,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
    }
    return ModelSource(build_model("blocks", config), None, None)


def plan_of(source: ModelSource, size: Size, ranks: int) -> Plan:
    """Nothing stays on the GPU; the CPU updates every other group."""
    tokens = size.chunk_tokens * CHUNKS_PER_ROUND * ROUNDS
    request = Request(size.chunk_tokens, tokens, GIB, GIB, numerics=BF16, ranks=ranks, round_multiple=ROUNDS)
    blocks = [LayerPlan((), (), "host")] * size.blocks
    return Plan(
        model=source.spec.name,
        request=request,
        chunk_tokens=size.chunk_tokens,
        chunks_per_round=CHUNKS_PER_ROUND,
        layers=(LayerPlan(), *blocks, LayerPlan()),
        groups=tuple(GroupPlan(update="cpu" if i % 2 else "gpu") for i in range(len(source.spec.groups))),
        optimizer_tile=1 << 22,
    )


def in_stages(plan: Plan) -> Plan:
    """The plan with blocks that have a rank; the state of the first lies on the GPU of its rank."""
    groups = (plan.groups[0], GroupPlan("gpu", "gpu", "gpu"), *plan.groups[2:])
    return replace(plan, transport="stages", groups=groups)


def train(team: Team | None, device: torch.device, size: Size, transport: str = "relay") -> dict[str, Any]:
    """Train a few steps; gives digests of what came of them."""
    ranks = 1 if team is None else team.ranks.size
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.95 / ranks, device)
    source = model_of(size)
    group = None if team is None else RankGroup(*team)
    began = time.perf_counter()
    settings = EngineSettings(deterministic=True, group=group)
    plan = replace(plan_of(source, size, ranks), transport="split" if transport == "split" else "relay")
    plan = in_stages(plan) if transport == "stages" else plan
    engine = Engine(source, plan, device, AdamW(lr=1e-3), settings)
    shown, seconds, loaded_s = [], [], time.perf_counter() - began
    generator, rows = random.Random(0), ROUNDS * CHUNKS_PER_ROUND
    for _ in range(STEPS):
        batch = [[generator.randrange(size.vocab) for _ in range(size.chunk_tokens)] for _ in range(rows)]
        start = time.perf_counter()
        output, result = engine.train_step(batch)
        engine.executor.synchronize()
        seconds.append(time.perf_counter() - start)
        shown.append((repr(output.loss), repr(result.grad_norm)))
    weights = digest_of(engine.state_dict())
    gpu_bytes = engine.meter.peak_bytes()
    by_streams = getattr(engine.executor, "_by_streams", None)
    engine.close()
    return {
        "losses_and_norms": shown,
        "weights": weights,
        "step_s": seconds,
        "load_s": loaded_s,
        "gpu_peak_bytes": gpu_bytes,
        "parameters": source.spec.num_parameters,
        "streams_signal": bool(by_streams),
    }


def digest_of(tensors: dict[str, Tensor]) -> str:
    """A digest of the bytes of all tensors."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        found.update(tensors[name].contiguous().view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()


def adamw(numel: int, repeats: int = 9) -> dict[str, Any]:
    """Parameters per second of updates on each kind of memory; the kinds take turns, so that others' load is alike."""
    mode, updates = MODES[ADAMW_MODE], dict[str, Any]()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        for kind, make in KINDS.items():
            memory = stack.enter_context(make(numel * sum(plane.itemsize for plane in mode.planes)))
            planes, offset = list[Tensor](), 0
            for dtype in mode.planes:
                planes.append(memory[offset : offset + numel * dtype.itemsize].view(dtype))
                offset += numel * dtype.itemsize
            planes[2].normal_()
            planes[3].normal_()
            updates[kind] = native_update(planes, torch.get_num_threads())
        for _ in range(repeats):
            for kind, update in updates.items():
                seconds[kind].append(cpu_timer(update, 0.2))
        updates.clear()
        del planes, memory
    best = {kind: min(found) for kind, found in seconds.items()}
    rates = {f"{kind}, parameters_per_s": numel / found for kind, found in best.items()}
    rates |= {f"{kind}, median_s": statistics.median(found) for kind, found in seconds.items()}
    rates["shared_over_private_time"] = best["shared"] / best["private"]
    print("adamw: " + told(rates), flush=True)
    return {"mode": ADAMW_MODE, "numel": numel, "threads": torch.get_num_threads(), **rates}


# ---- processes --------------------------------------------------------------------------------------------------


def run_ranks(part: str, count: int, args: argparse.Namespace, **environment: str) -> list[dict[str, Any]]:
    """What each of `count` processes makes of a part. Raises: RuntimeError with what they have printed."""
    flags = ["--worker", part, "--device", args.device, *(["--small"] if args.small else [])]
    return rank_processes.run_ranks("bench.ranks_on_one_gpu", flags, count, environment=environment)


def work(args: argparse.Namespace) -> None:
    """Be one of the ranks."""
    team = join()
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device("cuda", 0 if team is None else team.ranks.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # the order of sums depends on it
    found = hops(required(team), device) if args.worker == "hops" else train(team, device, size_of(args), args.worker)
    Path(args.out).write_text(json.dumps(found))
    leave()


def size_of(args: argparse.Namespace) -> Size:
    """A small model on a CPU."""
    return SMALL if args.small or args.device == "cpu" else EIGHT_B


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Train with one rank, and with two by each transport, whose streams wait for each other or whose hosts do."""
    [one] = run_ranks("train", 1, args)
    print("one rank: " + told(one), flush=True)
    found = {"one": one}
    kinds = [("two", "train", "1"), ("two, hosts wait", "train", "0"), ("two, split", "split", "1")]
    kinds += [("two, stages", "stages", "1"), ("two, stages, hosts wait", "stages", "0")]
    on_cpu = [(name, part, "0") for name, part, _ in kinds if "hosts wait" not in name]
    for name, part, value in kinds if args.device != "cpu" else on_cpu:
        both = run_ranks(part, 2, args, **{STREAM_SIGNALS_VARIABLE: value})
        names = ("losses_and_norms", "weights")
        equal = all(rank[shown] == one[shown] for rank in both for shown in names)
        found[name] = {"equal_bits": equal, "ranks": both}
        print(f"{name}: equal bits {equal}; " + told(both[0]), flush=True)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts that were asked for."""
    size, found = size_of(args), {"device": args.device, "size": size_of(args)._asdict()}
    device = torch.device(args.device)
    if args.device != "cpu":
        found["gpu"] = torch.cuda.get_device_name(0)
    if "adamw" in args.parts:
        found["adamw"] = adamw(size.adamw_numel)
    if "train" in args.parts:
        found["train"] = compare(args)
    if "hops" in args.parts:
        found["hops"] = run_ranks("hops", 2, args)[0]
        print("hops: " + told(found["hops"]), flush=True)
    if "pages" in args.parts:  # last: it makes a context of this process
        found["pages"] = pages(device, size.pages_bytes)
    return found


def main() -> None:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model also on a GPU")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", default=None, help="write the figures to this file")
    parser.add_argument("--worker", choices=["train", "split", "stages", "hops"], default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
        return
    write_json(args.json, measure(args))


if __name__ == "__main__":
    main()
