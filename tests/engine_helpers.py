"""Tiny models, hand-made plans and engines over buffers filled with NaN, for the tests of models and runtime."""

import math
import random
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile, record_function

from flexengine.models.registry import ModelSource, build_model
from flexengine.models.spec import ModelSpec
from flexengine.optim import AdamW
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan, Request
from flexengine.runtime.engine import Engine, EngineSettings
from flexengine.runtime.update import UpdateRunner, UpdateSettings
from flexengine.schedule.commands import STREAMS, Command, Program, Stream
from flexengine.schedule.save_sets import savable_ops

GIB = 2**30
FLOAT32 = Numerics("float32", "full", "float32", "float32")
FLOAT64 = Numerics("float64", "full", "float64", "float64")
ON_GPU = GroupPlan("gpu", "gpu", "gpu")

transformers.utils.logging.disable_progress_bar()


def tiny_config(**changes: Any) -> dict:
    """A Hugging Face config of a tiny model; initializer_range is large so that no gradient is all but zero."""
    config = {
        "model_type": "llama",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 67,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    return {**config, **changes}


def random_batch(seed: int, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Ragged token lists of the given lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths]


def spec_of(config: dict) -> ModelSpec:
    return build_model("tiny", config)


def random_weights(config: dict) -> ModelSource:
    """A source without files: the engine draws initial weights from its seed."""
    return ModelSource(spec_of(config), None, None)


def config_of(config: dict) -> Any:
    """The config of transformers, skipping where its version has no such model."""
    kind, options = config["model_type"], {name: value for name, value in config.items() if name != "model_type"}
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    made = transformers.AutoConfig.for_model(kind, **options)
    text = made.get_text_config()
    if "partial_rotary_factor" in (getattr(text, "rope_parameters", None) or {}):
        vars(text).pop("partial_rotary_factor", None)  # some versions write their default beside it
    return made


def saved_model(
    folder: Path, config: dict, dtype: torch.dtype = torch.float32, attention: str = "eager",
    kind_of_model: Any = transformers.AutoModelForCausalLM, **save: Any,
) -> Any:  # fmt: skip
    """A transformers model of the config with random weights (norms and biases too), saved in `folder`."""
    torch.manual_seed(7)
    model = kind_of_model.from_config(config_of(config), attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "ln_" in name:
                parameter.normal_(1.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
            elif name.endswith(("layer_scalar", "std_bias", "std_scale")):
                buffer.uniform_(0.6, 1.2)
    model = model.to(dtype)
    model.save_pretrained(folder, **save)
    return model


def resident_layers(spec: ModelSpec) -> list[LayerPlan]:
    """Every output of the blocks that some backward reads is kept on the GPU."""
    return [LayerPlan(savable_ops(block.ops), (), "gpu") for block in spec.blocks]


def make_plan(
    spec: ModelSpec,
    *,
    chunk_tokens: int = 32,
    chunks_per_round: int = 2,
    max_seq_len: int = 48,
    max_tokens: int = 4096,
    numerics: Numerics = FLOAT32,
    blocks: Sequence[LayerPlan] | None = None,
    groups: Sequence[GroupPlan] | None = None,
    hidden_home: Literal["auto", "host"] = "auto",
    **decisions: Any,
) -> Plan:
    """A plan made by hand; by default everything stays on the GPU and nothing is recomputed."""
    blocks, homes = blocks or resident_layers(spec), groups or [ON_GPU] * len(spec.groups)
    request = Request(max_seq_len, max_tokens, GIB, GIB, numerics=numerics, hidden_home=hidden_home)
    return Plan(
        model=spec.name,
        request=request,
        chunk_tokens=chunk_tokens,
        chunks_per_round=chunks_per_round,
        layers=(LayerPlan(), *blocks, LayerPlan()),
        groups=tuple(h.of_frozen() if g.frozen else h for g, h in zip(spec.groups, homes, strict=True)),
        **{"optimizer_tile": 1 << 16, **decisions},
    )


def streamed_plan(spec: ModelSpec, **decisions: Any) -> Plan:
    """A plan that keeps nothing on the GPU: weights stream, layer inputs wait on the host, the rest is recomputed."""
    blocks = [LayerPlan((), (), "host")] * len(spec.blocks)
    return make_plan(spec, blocks=blocks, **{"groups": [GroupPlan()] * len(spec.groups), **decisions})


def chunk_by_chunk(plan: Plan) -> Plan:
    """The plan whose segments are walked chunk by chunk, where what is made again stays on the GPU."""
    layers, following = list(plan.layers), [*plan.layers[1:], LayerPlan()]
    for number, (kept, above) in enumerate(zip(plan.layers, following, strict=True)):
        if kept.input_again:
            layers[number] = replace(layers[number], input_home="gpu")
        if above.input_again:
            layers[number] = replace(layers[number], keep_gpu=(*kept.keep_gpu, *kept.keep_host), keep_host=())
    longest = max(2, len(plan.layers))
    request = replace(plan.request, segment_order="chunks", segment_blocks=longest, hidden_home="auto")
    return replace(plan, layers=tuple(layers), request=request, weight_slots=longest)


class NanEngine(Engine):
    """An engine whose memory holds NaN bytes until somebody writes it."""

    def _load(self) -> None:
        self.arenas.fill("gpu", 255)
        self.arenas.fill("host", 255)
        if self.layout.drive_bytes:
            self.arenas.fill("drive", 255)
        if self.plan.shares_node:
            with self.context.together():  # before any of them loads
                self.arenas.fill("node", 255)
        super()._load()


def build_engine(
    source: ModelSource,
    plan: Plan,
    optimizer: AdamW | None = None,
    device: str = "cpu",
    **options: Any,
) -> Engine:
    if plan.uses_drive:
        options = {"offload_dir": tempfile.gettempdir(), **options}
    return NanEngine(source, plan, torch.device(device), optimizer or AdamW(lr=1e-2), EngineSettings(**options))


def shuffled_order(seed: int, respect_waits: bool = True) -> Callable[[Program], Iterable[int]]:
    """A random order of a program's commands that respects stream order and waits.

    Each program draws how eager each stream is, so that copies run as far ahead, or lag as far behind, as waits allow.
    Without `respect_waits` only stream order is kept, which is wrong on purpose. On the CPU streams run in one thread:
    where ranks wait for each other both ways, as in stages, what awaits or raises semaphores keeps its order.
    """

    def order(program: Program) -> Iterable[int]:
        rng = random.Random(seed + len(program.commands))
        eagerness = {stream: rng.choice((0.01, 1.0, 100.0)) for stream in STREAMS}
        queues = {s: [c for c in program.commands if c.stream == s] for s in STREAMS}
        heads, done = dict.fromkeys(STREAMS, 0), set()
        told = [c for c in program.commands if c.awaits or c.signals]
        both_ways = any(isinstance(signal.of, int) for c in told for signal in c.awaits)
        before = {c.index: {earlier.index} for earlier, c in pairwise(told)} if both_ways else {}

        def may_start(stream: Stream) -> bool:
            queue, head = queues[stream], heads[stream]
            if head == len(queue) or not respect_waits:
                return head < len(queue)
            return done.issuperset(queue[head].waits) and done.issuperset(before.get(queue[head].index, ()))

        while len(done) < len(program.commands):
            ready = [s for s in STREAMS if may_start(s)]
            stream = rng.choices(ready, [eagerness[s] for s in ready])[0]
            index = queues[stream][heads[stream]].index
            heads[stream] += 1
            done.add(index)
            yield index

    return order


def same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every tensor has the same bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{name} differs"


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected||; NaN when anything is NaN."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def worst_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error and the tensor it is in; a NaN counts as infinite."""
    assert actual.keys() == expected.keys()
    errors = [(relative_error(actual[name], value), name) for name, value in expected.items()]
    return max((float("inf") if math.isnan(error) else error, name) for error, name in errors)


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes at one moment that a call has allocated and not yet given back."""
    return peaks_of([call])[0]


def peaks_of(calls: Sequence[Callable[[], object]]) -> list[int]:
    """`peak_bytes` of each call, seen by one profiler, which takes longer to start than most calls."""
    for call in calls:
        call()  # what is made once is no part of it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for number, call in enumerate(calls):
            with record_function(f"call {number}"):
                call()
    events = recorded.profiler.kineto_results.events()
    begins = {e.name(): e.start_ns() for e in events if e.name().startswith("call ")}
    starts = [begins[f"call {number}"] for number in range(len(calls))]
    held, peaks = [0] * len(calls), [0] * len(calls)
    for time_ns, num_bytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        if number := bisect_right(starts, time_ns):  # before the first call, the profiler itself
            held[number - 1] += num_bytes
            peaks[number - 1] = max(peaks[number - 1], held[number - 1])
    assert all(peaks), "the profiler saw no allocation of a call"
    return peaks


def before_cpu_updates(monkeypatch: Any, call: Callable[[], object]) -> None:
    """Every update by the CPU begins with a call, on its thread."""
    update = UpdateRunner.update

    def wrapped(self: UpdateRunner, command: Command, slots: tuple, settings: UpdateSettings) -> None:
        if command.stream is Stream.CPU:
            call()
        update(self, command, slots, settings)

    monkeypatch.setattr(UpdateRunner, "update", wrapped)
