"""Parameters at rest: what is loaded is what is read, in every format, wherever it lives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    FLOAT64,
    build_engine,
    make_plan,
    random_weights,
    same_bits,
    saved_model,
    spec_of,
    streamed_plan,
    tiny_config,
)

from flexengine.checkpoint.reader import ReadRequest
from flexengine.models.registry import open_model
from flexengine.plan import GroupPlan, Numerics
from flexengine.runtime.weights import loading, staging

SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")
STOCHASTIC = Numerics("bfloat16", "stochastic", "bfloat16", "bfloat16")
BESIDE = Numerics("float16", "beside", "float32", "float32")
CONFIG = tiny_config(attention_bias=True, mlp_bias=True)
PLANS = {"resident": make_plan, "streamed": streamed_plan}


def engine_of(source, numerics, plan=streamed_plan, **options):
    return build_engine(source, plan(source.spec, numerics=numerics), **options)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("stored", "numerics"),
    [
        (torch.float32, FLOAT32),
        (torch.bfloat16, FLOAT32),
        (torch.float32, SPLIT),
        (torch.bfloat16, SPLIT),
        (torch.float16, SPLIT),
        (torch.float64, FLOAT64),
        (torch.bfloat16, STOCHASTIC),
        (torch.float32, BESIDE),
        (torch.bfloat16, BESIDE),
    ],
    ids=lambda x: str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else f"{x.compute}-{x.master}",
)
def test_masters_are_read_exactly_as_stored(stored, numerics, tied, plan, tmp_path):
    model = saved_model(tmp_path, {**CONFIG, "tie_word_embeddings": tied}, stored)
    engine = engine_of(open_model(tmp_path), numerics, plan)
    exact = torch.float64 if numerics == FLOAT64 else torch.float32
    same_bits(engine.state_dict(), {name: p.detach().to(exact) for name, p in model.named_parameters()})


@pytest.mark.parametrize("half_bytes", [256, 1000, 1 << 20])
@pytest.mark.parametrize(
    ("stored", "numerics"),
    [(torch.float32, SPLIT), (torch.bfloat16, SPLIT), (torch.float64, FLOAT64), (torch.float16, STOCHASTIC)],
    ids=lambda x: str(x).removeprefix("torch.") if isinstance(x, torch.dtype) else f"{x.compute}-{x.master}",
)
def test_loading_through_the_staging_buffer(stored, numerics, half_bytes, tmp_path, monkeypatch):
    """What goes to a GPU is cut to fit the buffer; the planes have the bits of direct reading."""
    saved_model(tmp_path, CONFIG, stored)
    direct = engine_of(open_model(tmp_path), numerics)
    monkeypatch.setattr(staging, "HALF_BYTES", half_bytes)
    monkeypatch.setattr(loading, "on_host", lambda request: "mlp" not in request.name)
    staged = engine_of(open_model(tmp_path), numerics)
    for name, run in staged.weights.runs.items():
        for kind in ("weights", "remainder"):
            a, b = direct.weights.plane(kind, run), staged.weights.plane(kind, run)
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), f"{kind} of {name}"


def test_a_half_is_waited_for_on_the_device_it_goes_to(monkeypatch):
    """Copies go to the target's device, on its stream, whichever device is the current one."""
    given = torch.arange(5000, dtype=torch.float32)
    waited = []

    class Reader:
        def read_many(self, requests):
            for request in requests:
                first = request.first_element
                request.target.copy_(given[first : first + request.target.numel()])

    class Event:
        def record(self, stream=None):
            self.stream = stream

        def synchronize(self):
            waited.append(self.stream)

    allocate = staging.allocate_host
    monkeypatch.setattr(staging, "HALF_BYTES", 4096)
    monkeypatch.setattr(staging, "allocate_host", lambda num_bytes, page_locked: allocate(num_bytes, page_locked=False))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    target, device = torch.zeros_like(given), torch.device("cuda", 1)
    staging.load_staged(Reader(), [ReadRequest("w", target, None, 0)], device)
    assert torch.equal(target, given)
    halves = len(waited) - 1
    assert halves > 2
    assert waited == [("stream of", device)] * halves + [device]


LOAD_AND_WATCH = """
import sys
import torch
from pathlib import Path
from engine_helpers import make_plan, streamed_plan
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.hardware.memory_usage import peak_resident_bytes, resident_bytes
from flexengine.models.registry import open_model
from flexengine.plan import Numerics
from flexengine.runtime.arena import Arenas
from flexengine.runtime.weights.loading import CheckpointLoader
from flexengine.runtime.weights.weight_store import WeightStore
from flexengine.schedule.layout import Layout

spec = open_model(Path(sys.argv[1])).spec
device = torch.device(sys.argv[2])
make = streamed_plan if device.type == "cpu" else make_plan  # weights on the GPU where there is one
plan = make(spec, numerics=Numerics("bfloat16", "split", "bfloat16", "bfloat16"))
layout = Layout(spec, plan)
torch.zeros(1, device=device)
arenas = Arenas(device, layout.gpu_bytes, layout.host_bytes)
before, peak = resident_bytes(), peak_resident_bytes()
assert device.type == "cuda" or before >= peak - (16 << 20), "nothing before took more than the arenas do"
with CheckpointReader.open(sys.argv[1]) as reader:
    CheckpointLoader(WeightStore(layout, arenas), reader).load()
print(peak_resident_bytes() - (before if device.type == "cpu" else max(before, peak)), layout.host_bytes)
"""


def grown_bytes(folder, device="cpu"):
    """(most resident bytes while loading, beyond what the arenas hold; bytes of the host arena), in its own process."""
    command = [sys.executable, "-c", LOAD_AND_WATCH, str(folder), device]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    grown, host = done.stdout.split()[-2:]
    return int(grown), int(host)


def save_blocks(folder, num_blocks):
    """A float32 checkpoint of blocks of 13 MB in many tensors; returns the bytes of all, and of the largest."""
    config = tiny_config(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=num_blocks,
        num_attention_heads=8,
        head_dim=64,
        vocab_size=4000,
    )
    model = saved_model(folder, config, torch.float32, max_shard_size="50MB")
    sizes = [p.nbytes for p in model.parameters()]
    return sum(sizes), max(sizes)


def test_loading_takes_no_more_than_one_tensor_beside_the_arenas(tmp_path):
    total_bytes, largest_bytes = save_blocks(tmp_path, 10)
    assert total_bytes > 125e6 > 10 * largest_bytes
    grown, host_bytes = grown_bytes(tmp_path)
    assert host_bytes > total_bytes  # the arenas were touched before
    assert grown < largest_bytes


@pytest.mark.gpu
def test_loading_onto_the_gpu_takes_no_more_than_the_staging_buffer(tmp_path):
    total_bytes, _ = save_blocks(tmp_path, 20)
    grown, _ = grown_bytes(tmp_path, "cuda")
    assert grown < 2 * staging.HALF_BYTES + (64 << 20) < total_bytes / 2


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_gpu_holds_what_the_cpu_holds(stored, tmp_path, monkeypatch):
    """Staged in small pieces, weights and remainders on the same and on different sides."""
    monkeypatch.setattr(staging, "HALF_BYTES", 1000)
    saved_model(tmp_path, CONFIG, stored)
    source = open_model(tmp_path)
    homes = [GroupPlan("gpu", "host", "gpu"), GroupPlan("gpu", "gpu", "host"), GroupPlan()]
    groups = [homes[i % 3] for i in range(len(source.spec.groups))]
    numerics = FLOAT64 if stored == torch.float64 else SPLIT
    plan = make_plan(source.spec, numerics=numerics, groups=groups)
    cpu, gpu = (build_engine(source, plan, device=device) for device in ("cpu", "cuda"))
    same_bits(gpu.state_dict(), cpu.state_dict())
    gpu.close()


def test_a_split_master_computes_with_the_nearest_bf16(tmp_path):
    model = saved_model(tmp_path, CONFIG, torch.float32)
    engine = engine_of(open_model(tmp_path), SPLIT)
    for name, parameter in model.named_parameters():
        weight = engine.weights.plane("weights", engine.weights.runs[name])
        nearest = parameter.detach().flatten().bfloat16()
        # ties go away from zero here and to even in torch
        assert (weight != nearest).float().mean() < 1e-3
        assert torch.allclose(weight.float(), nearest.float(), rtol=2**-7)


def test_sources_lie_one_after_the_other():
    """Fused parameters are their sources stacked, and every element of a group belongs to one source."""
    engine = engine_of(random_weights(CONFIG), FLOAT32)
    spans = {}
    for run in engine.weights.runs.values():
        first = run.segment.first_element + run.start
        spans.setdefault(run.group, []).append((first, first + run.count))
    for group, found in spans.items():
        ends = [end for _, end in sorted(found)]
        assert [start for start, _ in sorted(found)] == [0, *ends[:-1]]
        assert ends[-1] == engine.layout.groups[group].numel
    q, k = (engine.weights.runs[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qk")
    assert k.start == q.start + q.count
    assert q.source.shape == (24, 24)


def test_only_matrices_lose_their_remainder_and_wide_states():
    """With stochastic rounding and bf16 states, norms and biases keep exact masters and float32 states."""
    engine = engine_of(random_weights(CONFIG), STOCHASTIC)
    for name, run in engine.weights.runs.items():
        is_vector = len(run.source.shape) == 1
        assert (engine.weights.plane("remainder", run) is not None) == is_vector, name
        wanted = torch.float32 if is_vector else torch.bfloat16
        assert engine.weights.plane("exp_avg", run).dtype == wanted, name


def test_initial_weights_depend_on_the_seed_alone():
    source = random_weights(CONFIG)
    a, b, other = (
        engine_of(source, SPLIT, plan, seed=seed).state_dict()
        for plan, seed in ((make_plan, 5), (streamed_plan, 5), (streamed_plan, 6))
    )
    same_bits(a, b)
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(a[name], other[name])
    assert not torch.equal(a[name], a["model.layers.0.mlp.up_proj.weight"])
    assert float(a[name].std()) == pytest.approx(CONFIG["initializer_range"], rel=0.1)
    assert torch.equal(a["model.norm.weight"], torch.ones(24))
    assert not a["model.layers.0.self_attn.q_proj.bias"].any()


def test_states_start_at_zero():
    engine = engine_of(random_weights(CONFIG), FLOAT32)
    for run in engine.weights.runs.values():
        assert not engine.weights.plane("exp_avg", run).any()
        assert not engine.weights.plane("exp_avg_sq", run).any()


def test_reading_in_another_dtype_rounds_the_master(tmp_path):
    model = saved_model(tmp_path, CONFIG, torch.float32)
    engine = engine_of(open_model(tmp_path), SPLIT)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(engine.weights.read(name, torch.bfloat16), dict(model.named_parameters())[name].bfloat16())


def test_an_incomplete_checkpoint_is_refused(tmp_path):
    saved_model(tmp_path, CONFIG)
    more = spec_of({**CONFIG, "num_hidden_layers": 3})
    with pytest.raises(ValueError, match=r"lacks 16 .*51 tensors.*model\.layers\.2"):
        engine_of(open_model(tmp_path)._replace(spec=more), FLOAT32)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    saved_model(tmp_path, CONFIG)
    wider = spec_of({**CONFIG, "intermediate_size": 48})
    with pytest.raises(ValueError, match=r"gate_proj\.weight has shape \[40, 24\] .* asks for \[48, 24\]"):
        engine_of(open_model(tmp_path)._replace(spec=wider), FLOAT32)
