"""What Triton makes of our kernels: for compute capability 9.0 no product's operands are overwritten while it runs, and
on consumer cards programs fit into shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hopper_compile import CASES, SMALL_BYTES, hazards

ROOT = Path(__file__).resolve().parents[2]
LOOP = """
    %q = ttg.local_alloc : () -> !ttg.memdesc<{copies}x64x64xbf16, #shared, #smem, mutable>
    %k = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xbf16, #shared, #smem, mutable>
    %place = ttg.memdesc_index %q[%c0] : !ttg.memdesc<{copies}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
    %sum = scf.for %i = %c0 to %c4 step %c1 iter_args(%total = %zero) -> (tensor<64x64xf32, #mma>) {{
      %copied = ttg.async_copy_global_to_local %pointers, %place mask %m : tensor<64x64xi64> -> <64x64xbf16>
      %q_1 = ttg.memdesc_index %q[%i] : !ttg.memdesc<{copies}x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %q_2 = ttg.memdesc_trans %q_1 {{order = array<i32: 1, 0>}} : !ttg.memdesc<64x64xbf16>
      %k_1 = ttg.memdesc_index %k[%i] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %next = ttng.warp_group_dot {first}, %q_2, %total {{isAsync = true}} : {kind} * !ttg.memdesc<64x64xbf16>
      %done:2 = ttng.warp_group_dot_wait %next, %q_2 {{pendings = {pendings} : i32}} : tensor<64x64xf32, #mma>
      scf.yield %done#0 : tensor<64x64xf32, #mma>
    }}
"""
SHARED = {"first": "%k_1", "kind": "!ttg.memdesc<64x64xbf16>"}
REGISTERS = {"first": "%a", "kind": "tensor<64x64xf32, #ttg.dot_op<{opIdx = 0, parent = #mma}>>"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"copies": 1, "pendings": 1, **SHARED}, "may still read %q"),
        ({"copies": 2, "pendings": 1, **SHARED}, None),
        ({"copies": 1, "pendings": 0, **SHARED}, None),
        ({"copies": 2, "pendings": 1, **REGISTERS}, "registers of a product are not waited for"),
        ({"copies": 2, "pendings": 0, **REGISTERS}, None),
    ],
    ids=["one copy", "two copies", "one copy, waited for", "registers", "registers, waited for"],
)
def test_a_product_that_runs_into_the_next_copy_is_found(changes, message):
    found = hazards(LOOP.format(**changes))
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


FIRST = ("attention, 128", "delta rule, 128", "experts")
"""Every kernel but those of scans and adapted units; the others compile them for other widths and options."""


@pytest.fixture(scope="module")
def compiled():
    """What the script compiles: cases for 9.0, and for a card with less shared memory the kernel that needs most."""
    return compiled_of(120, *FIRST)


def compiled_of(small_card, *names):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_ALWAYS_COMPILE"] = "1"  # what another run left in Triton's cache is not looked at
    small = ["--small", str(small_card), "--cases", "delta rule, 128, fp32", "--only", "_states_kernel"]
    command = [sys.executable, str(ROOT / "tests" / "hopper_compile.py"), *small]
    command += ["--hopper", *names]
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.long
@pytest.mark.thorough
def test_no_product_runs_on_while_its_operands_are_overwritten(compiled):
    check_hazards(compiled, FIRST)


@pytest.mark.long
@pytest.mark.thorough
def test_other_widths_and_another_small_card():
    others = [name for name in CASES if name not in FIRST]
    compiled = compiled_of(89, *others)
    check_hazards(compiled, others)
    check_small(compiled, 89)


def check_hazards(compiled, names):
    kernels = compiled["kernels"]
    assert {row["case"] for row in kernels if row["products"]} == set(names)  # else nothing was looked at
    assert [row for row in kernels if row["hazards"]] == []


def test_a_load_by_the_engine_for_tiles_is_looked_at_too():
    loads = LOOP.replace(
        "ttg.async_copy_global_to_local %pointers, %place mask %m",
        "ttng.async_tma_copy_global_to_local %rows[%c0, %i] %place, %barrier, %m",
    )
    assert len(hazards(loads.format(copies=1, pendings=1, **SHARED))) == 1
    assert hazards(loads.format(copies=2, pendings=1, **SHARED)) == []


@pytest.mark.long
@pytest.mark.thorough
def test_sums_of_experts_gradients_stay_where_products_add_to_them(compiled):
    """A product runs into the next iteration; only where the sums are stored, and at the end, all are waited for."""
    for row in compiled["gradients"]:
        assert (row["pending"], row["selections"]) == ([1, 0, 0], 0)
        assert row["additions"] == 8 * row["accumulate"]
        assert row["shared_bytes"] <= 227 * 1024


@pytest.mark.long
@pytest.mark.thorough
def test_every_sum_of_ranks_gradients_is_rounded(compiled):
    """Two roundings may be one instruction; 16 elements of a thread have four sums each."""
    assert [row["elements"] for row in compiled["sums"]] == [1, 4096]
    assert all(row["roundings"] >= 4 * 16 // 2 for row in compiled["sums"])


@pytest.mark.long
@pytest.mark.thorough
def test_states_in_fp32_fit_the_shared_memory_of_consumer_cards(compiled):
    check_small(compiled, 120)


def check_small(compiled, capability):
    assert {row["capability"] for row in compiled["small"]} == {capability}
    assert all(row["shared_bytes"] <= SMALL_BYTES for row in compiled["small"])
