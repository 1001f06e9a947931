"""`flexengine plan --gpus N --nodes K`: what each GPU, each node and all do, without a GPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from flexengine.commands.plan import main
from flexengine.hardware.nodes import assumed_node_rate, rank_profile, with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB, format_bytes
from flexengine.models.registry import open_model
from flexengine.plan import Plan, Request
from flexengine.planner.planner import make_plan
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.reports.plan_text import describe, fewer_gpus_lines
from flexengine.schedule.node_states import PIECE_ELEMENTS
from flexengine.schedule.ranks.node_exchange import WIDENED_BYTES
from flexengine.schedule.timeline import SIMULATED
from flexengine.schedule.trace_reader import read_trace

MODEL, TOKENS = "preset:qwen3-0.6b", 16384
SIZES = ["--max-seq-len", "1024", "--chunk-tokens", "4096", "--round-tokens", "16384"]
ARGUMENTS = ["--model", MODEL, "--gpu", "rtx4090", "--max-gpu-mem-gib", "6", *SIZES]


def planned(capsys, *more: str) -> dict:
    assert main([*ARGUMENTS, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("quick_search")
def test_gpus_and_nodes_are_planned_for(capsys, tmp_path):
    one = planned(capsys, "--host-mem-gib", "24", "--max-global-batch-tokens", str(TOKENS))
    files = ["--timeline", str(tmp_path / "step.json"), "--html", str(tmp_path / "plan.html")]
    files += ["--plan-json", str(tmp_path / "plan.json")]
    several = [*("--gpus", "2"), *("--nodes", "2"), *("--host-mem-gib", "48")]
    found = planned(capsys, *several, *("--max-global-batch-tokens", str(4 * TOKENS)), *files)
    assert "several_gpus" not in one
    all_gpus, speed = found["several_gpus"], found["predicted"]["tokens_per_s"]
    assert all_gpus["gpus_per_node"] == all_gpus["nodes"] == 2
    assert all_gpus["faster_with"] is None
    assert all_gpus["tokens_per_s_per_gpu"] == pytest.approx(speed / 4)
    assert 2 * one["predicted"]["tokens_per_s"] < speed < 4.2 * one["predicted"]["tokens_per_s"]
    assert all_gpus["shared_host_bytes"] + 2 * all_gpus["host_bytes_per_gpu"] == pytest.approx(
        all_gpus["node_host_bytes"], abs=2
    )
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.request.ranks == plan.request.nodes == 2
    assert plan.predicted.host_categories["exchange between nodes"] == 2 * (3 * PIECE_ELEMENTS * 2 + WIDENED_BYTES)
    assert sum(plan.predicted.host_categories.values()) == pytest.approx(plan.predicted.host_bytes, rel=1e-3)
    described = describe(plan, None)
    assert "2 nodes of 2" in described
    assert "state once" in described
    assert "network: nodes add up gradients in bfloat16 for " in described
    on_gpus, on_hosts = format_bytes(4 * plan.predicted.gpu_bytes), format_bytes(2 * plan.predicted.host_bytes)
    assert f"all 4 GPUs: {on_gpus} of GPU memory, {on_hosts} of host memory; " in described
    assert "GPU memory of each GPU: " in described
    assert (
        "of each node" in (tmp_path / "plan.html").read_text() or "rank 0 of 2" in (tmp_path / "plan.html").read_text()
    )
    trace = json.loads((tmp_path / "step.json").read_text())
    rows = {event["pid"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert rows == {1, 2}  # a process for each rank of a node
    assert len(read_trace(trace, "step.json", SIMULATED).parts) == len(trace["metadata"]["parts"])


@pytest.mark.usefixtures("quick_search")
def test_one_gpu_is_advised_where_it_is_faster(capsys, tmp_path):
    """One GPU that holds the whole state waits for no host; ranks that relay move it through theirs in a short step."""
    asked = ["--max-gpu-mem-gib", "20", "--host-mem-gib", "64", "--max-global-batch-tokens", "2048"]
    asked += ["--chunk-tokens", "1024", "--round-tokens", "1024"]
    alone_s = planned(capsys, *asked)["predicted"]["step_s"]
    path = tmp_path / "plan.json"
    two = planned(capsys, *asked, "--gpus", "2", "--transport", "relay", "--plan-json", str(path))
    assert two["several_gpus"]["faster_with"] == {"gpus": 1, "step_s": pytest.approx(alone_s, rel=0.01)}
    assert alone_s < two["predicted"]["step_s"]
    plan, told = Plan.from_json(path.read_text()), json.loads(path.read_text())
    assert fewer_gpus_lines(plan)[0].startswith("use 1 GPU: faster, ")
    told["predicted"]["one_gpu_step_s"] = told["predicted"].pop("fewer_gpus_step_s")  # as older plans have it
    del told["predicted"]["fewer_gpus"]
    assert Plan.from_json(json.dumps(told)) == plan


@pytest.mark.usefixtures("quick_search")
def test_too_little_host_memory_is_said_for_several_gpus_with_what_fits(capsys, tmp_path):
    page = tmp_path / "plan.html"
    assert main([*ARGUMENTS, "--gpus", "4", "--host-mem-gib", "14", "--json", "--html", str(page)]) == 2
    told = capsys.readouterr()
    planned, host = r" .*planned: .* tokens/s\n *", r"--max-host-mem-gib ([0-9.]+)"
    advised = re.search(rf"fits with one of\n *--gpus 1{planned}{host}{planned}", told.err)
    assert advised, told.err
    assert float(advised[1]) > 14
    found = json.loads(told.out)
    assert "found no plan of 4 GPUs" in found["message"]
    assert [each["flags"] for each in found["fits_with"]] == ["--gpus 1", f"--max-host-mem-gib {advised[1]}"]
    asked, remedy = found["request"], found["fits_with"][1]["request"]
    assert remedy == {**asked, "max_host_bytes": pytest.approx(float(advised[1]) * GIB, abs=8)}
    needs = found["smallest_plan"]["host"]
    assert needs["missing_bytes"] == needs["bytes"] - 13 * GIB, "one of the 14 GiB is left to the system"
    assert sum(needs["categories"].values()) == pytest.approx(needs["bytes"], rel=0.01)
    assert needs["bytes"] == pytest.approx(float(advised[1]) * GIB, rel=0.01), "states are divided in both"
    assert needs["bytes"] <= float(advised[1]) * GIB
    assert "host memory" in page.read_text()
    assert main([*ARGUMENTS, "--gpus", "4", "--host-mem-gib", "64", "--max-host-mem-gib", advised[1]]) == 0


@pytest.mark.usefixtures("quick_search")
def test_state_that_exceeds_one_gpus_share_of_the_host_is_searched_for():
    """The state is there once: a node whose GPUs could not each hold it keeps activations on the host nevertheless."""
    spec = open_model("preset:llama-3.1-8b").spec
    request = Request(2048, 4 * 131072, int(23.5 * GIB), 256 * GIB, ranks=4)
    plan = plan_for_ranks(spec, request, with_gpus(preset("rtx4090"), 4))
    alone = make_plan(spec, request.of_rank, rank_profile(with_gpus(preset("rtx4090"), 4), 4)).predicted
    assert plan.predicted.recompute_share == pytest.approx(alone.recompute_share, rel=0.02)
    assert f"{100 * plan.predicted.recompute_share:.0f}% of it recomputation" in plan.predicted.limiter
    assert 0 < plan.predicted.speed_of_light_s < plan.predicted.step_s
    assert plan.predicted.host_categories["offloaded activations"] > 50 * GIB


@pytest.mark.usefixtures("quick_search")
def test_states_are_divided_over_gpus_where_the_host_is_too_small_for_them(tmp_path, capsys):
    files = ["--plan-json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]
    found = planned(capsys, "--gpus", "4", "--host-mem-gib", "21", *files)
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert {home.states for home in plan.groups} == {"dealt"}
    assert plan.predicted.host_bytes <= 21 * GIB
    assert plan.predicted.gpu_bytes <= 6 * GIB
    assert plan.predicted.gpu_categories["dealt optimizer states"] >= 2 * plan.predicted.host_categories["weights"] / 4
    assert found["predicted"]["tokens_per_s"] > 0
    assert "groups divided over the GPUs" in describe(plan, None)
    assert "divided" in (tmp_path / "plan.html").read_text()


@pytest.mark.usefixtures("quick_search")
def test_states_are_divided_over_nodes_where_one_host_is_too_small_for_them(tmp_path, capsys):
    nodes = ["--gpus", "2", "--nodes", "4", "--gpu", "h100-80", "--transport", "split"]
    files = ["--plan-json", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]
    planned(capsys, *nodes, "--host-mem-gib", "14.5", *files)
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert {(home.states, home.update) for home in plan.groups} == {("nodes", "cpu")}
    assert plan.transport == "split"
    assert plan.predicted.host_bytes <= 13.5 * GIB, "one GiB is left to the system"
    spec = open_model(MODEL).spec
    moments, halves = 8 * spec.num_parameters, 2 * spec.num_parameters
    assert plan.predicted.host_categories["optimizer states"] == pytest.approx((moments + halves) / 4, rel=0.01)
    described = describe(plan, None)
    assert "30 of 30 groups divided over the nodes" in described
    assert "nodes add up gradients in bfloat16 and give each other weights" in described
    of_one = replace(plan.request, ranks=1, transport="relay", exchange="fp8")
    coded = describe(replace(plan, request=of_one, transport="relay"), None)
    assert "4 nodes of 1, each of which runs rounds of its own" in coded
    assert re.search("gradients in fp8 .* all else waits; coding, by the CPU, is not priced", coded)
    assert "divided over the nodes" in (tmp_path / "plan.html").read_text()
    assert main([*ARGUMENTS, "--nodes", "4", "--host-mem-gib", "8"]) == 2
    told = capsys.readouterr().err
    assert "it divides the optimizer states over 4 nodes" in told
    advised = re.search(r"--max-host-mem-gib ([0-9.]+) .*planned: ", told)
    assert advised, told
    assert 7 < float(advised[1]) < 9


def test_gpus_of_a_node_share_host_memory():
    card = preset("rtx4090")
    assert with_gpus(card, 1) == card
    node = with_gpus(card, 4)
    assert node.host.bytes_per_s == assumed_node_rate(card, 4) == 150e9
    assert node.memory.host_total_bytes == 4 * card.memory.host_total_bytes
    assert with_gpus(card, 4, 300e9).host.bytes_per_s == 300e9
    measured = replace(card, source="measured")
    assert with_gpus(measured, 4) == measured
    assert rank_profile(node, 4).link.h2d_duplex_bytes_per_s == 150e9 / 8
    assert rank_profile(node, 4).link.h2d_bytes_per_s == card.link.h2d_bytes_per_s
