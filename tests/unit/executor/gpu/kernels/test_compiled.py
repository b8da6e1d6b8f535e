"""What Triton's compiler makes of the launches for an H200, which need not be there: the interpreter takes what the
compiler refuses, and what binds a kernel's arguments does. In a process of its own, since the interpreter has
decorated this one's kernels."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU kernels are compiled where Triton is (Linux on x86-64)")
MOST_SHARED = 227 << 10  # bytes of shared memory that a processor of Hopper has for its programs
REGISTERS = 65_536  # that it has, for at most 2,048 threads
MOST_STACK = 160  # bytes of each thread that attention may spill around its loops (compiled.py)


def compiled(family: str) -> dict[str, Any]:
    """By name."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.executor.gpu.kernels.compiled"]
    found = subprocess.run(
        [*command, "--only", family],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return {one["name"]: one for one in map(json.loads, found.stdout.splitlines())}


@pytest.mark.nightly
def test_attention_multiplies_by_tensor_cores_and_spills_in_no_loop() -> None:
    found = compiled("attention")
    decode, prefill = (found["decode fp8 d128 group4 splits8"], found["prefill512 writable d128 group4 splits1"])
    assert {"decode fp8 d128 group4 splits8 merge", "write", "compress fp8"} <= found.keys()
    assert max(one["shared"] for one in found.values()) <= MOST_SHARED
    # Models in float32 are for checks: they have to run, not to be fast.
    assert max(one["stack"] for name, one in found.items() if "fp32" not in name) <= MOST_STACK
    assert prefill["counts"]["wgmma"] > 0
    assert decode["counts"]["mma"] > 0
    assert decode["counts"]["wide async"] > 0


@pytest.mark.nightly
def test_choosing_blocks_spills_nothing_and_scores_by_tensor_cores() -> None:
    found = compiled("pages")
    assert {name.split()[-1] for name in found} == {"group4", "score_kernel", "choose_kernel"}
    assert max(one["stack"] for one in found.values()) <= 8  # a number or two, by Triton 3.7
    assert max(one["registers"] for one in found.values()) * 128 * 2 <= REGISTERS
    assert max(one["shared"] for one in found.values()) * 2 <= MOST_SHARED
    assert found["pages int8 d128 group4 score_kernel"]["counts"]["mma"] > 0


@pytest.mark.nightly
def test_what_lies_between_products_reads_16_bytes_at_a_time_and_spills_nothing() -> None:
    found = compiled("fused")
    assert [name for name, one in found.items() if one["stack"]] == []
    assert [name for name, one in found.items() if not one["counts"]["wide load"]] == []
    # Half of the threads that a processor holds find registers.
    assert [name for name, one in found.items() if one["registers"] * 1024 > REGISTERS] == []


@pytest.mark.nightly
def test_products_multiply_while_weights_come() -> None:
    found = compiled("products")
    assert all(one["stack"] == 0 for one in found.values()), found
    few, one, grouped = found["few rows"], found["one row"], found["few rows int4"]
    assert few["counts"]["wgmma"] > 0
    assert grouped["counts"]["wgmma"] > 0
    assert grouped["counts"]["wide async"] > 0
    assert grouped["counts"]["convert"] < 16  # of rows; codes become numbers without any
    assert min(few["counts"]["async"], one["counts"]["async"]) > 0
    # Two programs of the largest tiles fit, four of one row: enough weights are on their way.
    for kernel, programs in ((few, 2), (one, 4), (grouped, 4)):
        assert kernel["registers"] * 128 * programs <= REGISTERS
        assert kernel["shared"] * programs <= MOST_SHARED


@pytest.mark.nightly
def test_experts_multiply_while_weights_come() -> None:
    found = compiled("experts")
    assert all(one["stack"] == 0 for one in found.values()), found
    products = [one for name, one in found.items() if name.startswith(("expert_rows", "expert_groups"))]
    assert min(one["counts"]["wgmma"] for one in products) > 0
    assert min(one["counts"]["async"] for one in products) > 0
    # Two programs of the largest tiles fit.
    assert max(one["registers"] for one in products) * 128 * 2 <= REGISTERS
    assert max(one["shared"] for one in products) * 2 <= MOST_SHARED


@pytest.mark.nightly
def test_adapters_multiply_by_tensor_cores_and_spill_nothing() -> None:
    found = compiled("adapters")
    assert len(found) == 2
    assert all(one["stack"] == 0 for one in found.values()), found
    assert min(one["counts"]["mma"] + one["counts"]["wgmma"] for one in found.values()) > 0
    assert max(one["shared"] for one in found.values()) * 2 <= MOST_SHARED


@pytest.mark.nightly
def test_what_samples_leaves_its_processor_room() -> None:
    found = compiled("sampling")
    assert {name.split()[0] for name in found} == {"tally_kernel", "choose_kernel", "weigh_kernel", "draw_kernel"}
    assert max(one["shared"] for one in found.values()) <= 8192
    assert max(one["stack"] for one in found.values()) == 0
