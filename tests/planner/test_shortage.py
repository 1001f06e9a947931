"""PlanError: both numbers, what is largest, and advice that works when it is followed."""

import re
from dataclasses import replace

import pytest

from flexengine.hardware.presets import preset, with_memory
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.keep_dtype import with_coded_inputs
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import Numerics, PlanError, PlanReason, Request
from flexengine.planner.feasibility.remedies import LARGEST_CARD_BYTES, Least, Try, remedies, remedy_note
from flexengine.planner.feasibility.shortage import ADAPTERS, FOUR_BITS, Feasibility, ShortageError
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from tests.schedule.small_plans import FLOAT32, small_model

GIB = 1 << 30
pytestmark = pytest.mark.usefixtures("quick_search")


def refused(request: Request, profile) -> ShortageError:
    with pytest.raises(ShortageError) as caught:
        make_plan(small_model(hidden=128), request, profile)
    return caught.value


def advised(error: PlanError, flag: str) -> float:
    found = re.search(rf"{flag} ([0-9.]+)", str(error))
    assert found, str(error)
    return float(found[1])


@pytest.mark.parametrize("name", ["cpu-test", "rtx-4090"])
def test_too_little_gpu_memory(name):
    profile = preset(name)
    request = Request(64, 512, 1 << 20, 1 << 40, numerics=FLOAT32)
    error = refused(request, profile)
    assert error.reason is PlanReason.INSUFFICIENT_DEVICE_MEMORY
    assert error.required_bytes > error.budget_bytes == 1 << 20
    assert "largest:" in str(error)
    budget = int(advised(error, "--max-gpu-mem-gib") * GIB)
    assert budget < 1.05 * error.required_bytes
    plan = make_plan(small_model(hidden=128), replace(request, max_gpu_bytes=budget), profile)
    assert plan.predicted.gpu_bytes <= budget


def test_too_little_host_memory():
    profile = preset("cpu-test")
    request = Request(64, 512, 8 << 20, profile.memory.host_base_bytes + 1024, numerics=FLOAT32)
    error = refused(request, profile)
    assert error.reason is PlanReason.INSUFFICIENT_HOST_MEMORY
    budget = int(advised(error, "--max-host-mem-gib") * GIB)
    plan = make_plan(small_model(hidden=128), replace(request, max_host_bytes=budget), profile)
    assert plan.predicted.host_bytes <= budget


def test_pinned_chunk_too_large_advises_a_smaller_one():
    profile = preset("cpu-test")
    request = Request(64, 65536, 8 << 20, 1 << 40, chunk_tokens=4096, numerics=FLOAT32)
    error = refused(request, profile)
    chunk = int(advised(error, "--chunk-tokens"))
    assert chunk < 4096
    make_plan(small_model(hidden=128), replace(request, chunk_tokens=chunk), profile)


@pytest.mark.parametrize("budget_gib", [1.34])
def test_what_fits_is_planned_however_small_its_chunks_must_be(budget_gib):
    """A long sequence in a small budget fits only in so many chunks that the search would not look at them."""
    model, profile = open_model("preset:tiny-llama3-150m").spec, preset("h100")
    asked = Request(40000, 280000, int(budget_gib * GIB), 64 * GIB)
    assert Feasibility(Problem(model, asked, profile)).fits()
    plan = make_plan(model, asked, profile)
    assert plan.predicted.gpu_bytes <= asked.max_gpu_bytes


def test_advice_beyond_the_machine_says_so():
    """A card without the memory that the model takes, beside a host with hardly any."""
    profile = with_memory(preset("rtx-4090"), gpu_total_bytes=preset("rtx-4090").memory.gpu_context_bytes + 1024)
    request = Request(64, 512, profile.memory.gpu_total_bytes, profile.memory.host_total_bytes, numerics=FLOAT32)
    first = refused(request, profile).remedies[0]
    assert first.flags.startswith("--max-gpu-mem-gib ")
    assert re.fullmatch(r"more than this card's [0-9.]+ [GM]iB", first.note)
    assert f"{first.flags} ({first.note})" in str(refused(request, profile))
    assert refused(request, preset("rtx-4090")).remedies[0].note == ""


def test_both_budgets_of_a_cpu_are_of_its_memory():
    request = Request(64, 512, 7 * GIB, 7 * GIB, numerics=FLOAT32)
    notes = [remedy_note(replace(request, max_host_bytes=n * GIB), request, preset("cpu-test")) for n in (8, 12)]
    assert notes == ["", "both budgets together more than this machine's 16.00 GiB"]


@pytest.mark.parametrize(("gpu_bytes", "advised"), [(LARGEST_CARD_BYTES, True), (LARGEST_CARD_BYTES + GIB, False)])
def test_no_card_larger_than_there_is_is_advised(gpu_bytes, advised):
    """Only more of both memories fits here."""
    request = Request(64, 64, GIB, GIB, numerics=FLOAT32)
    judge = Try(
        lambda r: r.max_gpu_bytes >= gpu_bytes and r.max_host_bytes >= 4 * GIB, lambda r: Least(gpu_bytes, 4 * GIB)
    )
    found = [remedy.flags for remedy in remedies(request, Least(gpu_bytes, None), judge)]
    assert found == (["--max-gpu-mem-gib 288.0 --max-host-mem-gib 4.00"] if advised else [])


def test_what_fits_without_clipping_fits_with_it_in_steps_that_run_twice():
    def fits(asked):
        return asked.numerics.state == "int8" and not asked.clipping

    request, least = Request(64, 64, GIB, GIB, whole_steps=True), Least(2 * GIB, None)
    first, second, *_ = remedies(request, least, Try(fits, lambda _: least))
    small = "--optimizer-state-dtype int8 --master-dtype bfloat16"
    assert [str(first), str(second)] == [f"{small} --max-grad-norm 0", f"{small} (every step runs twice)"]
    assert second.request.clipping


@pytest.mark.thorough
@pytest.mark.usefixtures("quick_search")
def test_states_of_8_bits_and_adapters_are_among_the_remedies():
    """All weights of 8B beside 60 GiB of host memory fit with int8 states; frozen weights get no such advice."""
    profile, model = with_memory(preset("rtx-4090"), host_total_bytes=64 * GIB), open_model("preset:llama-3.1-8b").spec
    request = Request(1024, 65536, 22 * GIB, 58 * GIB)
    with pytest.raises(ShortageError, match="adapters beside frozen weights take less: --mode lora") as error:
        make_plan(model, request, profile)
    assert "--optimizer-state-dtype int8" in [remedy.flags for remedy in error.value.remedies]
    frozen, less = with_frozen(model, ("embed",)), replace(request, max_host_bytes=GIB)
    with pytest.raises(ShortageError) as error:
        make_plan(frozen, less, profile)
    assert "adapters" not in str(error.value)


def test_fewer_bits_are_advised_where_blocks_are_frozen():
    """And adapters where nothing is; neither where what is frozen is stored in few bits, or is no block."""
    model, tight = open_model("preset:demo").spec, Request(64, 512, 1 << 20, 1 << 20)
    stored = replace(tight, numerics=Numerics(base="nf4"))
    adapted = with_frozen(model, ("blocks",))

    def advice(trained: ModelSpec, request: Request) -> str:
        return Feasibility(Problem(trained, request, preset("rtx-4090"))).least_gpu().advice

    assert advice(model, tight) == ADAPTERS
    assert advice(adapted, tight) == FOUR_BITS
    assert advice(with_base_dtype(adapted, "nf4"), stored) == advice(with_frozen(model, ("embed",)), tight) == ""


@pytest.mark.usefixtures("quick_search")
def test_inputs_in_fp8_are_among_the_remedies_of_long_sequences():
    profile, model, tokens = preset("cpu-test"), small_model(hidden=256), 1 << 15
    request = Request(tokens, tokens, 160 << 20, 1 << 40, 4096, tokens)
    needs = Feasibility(Problem(model, request, profile)).least_host()
    assert needs is not None
    tight = replace(request, max_host_bytes=needs.host_bytes * 99 // 100, segment_blocks=1)
    with pytest.raises(ShortageError) as error:
        make_plan(model, tight, profile)
    (found,) = [remedy for remedy in error.value.remedies if remedy.flags == "--keep-dtype fp8-inputs"]
    plan = make_plan(with_coded_inputs(model, "fp8-inputs"), found.request, profile)
    assert plan.predicted.host_bytes <= tight.max_host_bytes


def test_what_is_far_from_fitting_is_not_laid_out(monkeypatch):
    request = Request(64, 512, 1 << 30, 1 << 40, numerics=FLOAT32)
    problem = Problem(small_model(hidden=128), request, preset("cpu-test"))
    least = Feasibility(problem).least_host()
    assert least is not None
    tight, just = (
        replace(problem, request=replace(request, max_host_bytes=most))
        for most in (least.host_bytes * 9 // 10, least.host_bytes)
    )
    assert Feasibility(just).fits()
    monkeypatch.setattr(Problem, "layout", None)
    assert not Feasibility(tight).fits()
