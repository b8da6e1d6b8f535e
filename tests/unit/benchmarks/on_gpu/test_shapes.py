"""The arithmetic that limits come from."""

import pytest

from benchmarks.on_gpu.shapes import LLAMA_7B, LLAMA_8B, LLAMA_13B, TINY, at_most
from benchmarks.on_gpu.training_speed import QLORA


def test_parameters_are_those_of_the_models() -> None:
    assert LLAMA_8B.parameters == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_13B.parameters == pytest.approx(13.02e9, rel=1e-3)


def test_bytes_of_a_step() -> None:
    assert LLAMA_8B.held_bytes("bf16") == pytest.approx(16.06e9, rel=1e-3)
    assert LLAMA_8B.weight_bytes("bf16") == pytest.approx(15.01e9, rel=1e-3)
    assert LLAMA_8B.weight_bytes("int4") == pytest.approx(4.25e9, rel=1e-3)
    assert LLAMA_8B.kv_bytes("bf16") == 128 * 1024
    assert LLAMA_13B.kv_bytes("bf16") == 819200
    assert LLAMA_8B.kv_bytes("fp8") < 0.51 * LLAMA_8B.kv_bytes("bf16")


def test_operations_of_a_prompt_do_not_depend_on_its_chunks() -> None:
    chunks = TINY.flops(32) + TINY.flops(32, 32) - 2.0 * TINY.head_weights
    assert chunks == pytest.approx(TINY.flops(64))
    assert LLAMA_8B.flops(1) == pytest.approx(2 * LLAMA_8B.weight_bytes("bf16") / 2, rel=1e-3)


def test_what_does_not_fit_is_said_by_arithmetic() -> None:
    why = at_most(128, 8192, LLAMA_13B, "bf16", "bf16", 150e9)
    assert why == "does not fit: weights 26 GB and KV 859 GB are 885 GB of 150 GB"
    assert not at_most(128, 8192, LLAMA_8B, "bf16", "fp8", 150e9)


def test_the_work_of_a_7b_is_six_operations_a_weight_and_some() -> None:
    weights = LLAMA_7B.layers * LLAMA_7B.layer_weights
    assert weights == 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert QLORA.factors == 32 * 16 * (4 * 2 * 4096 + 3 * (4096 + 11008)), "as peft has with all linears"
    each = QLORA.flops(10) / (10 * QLORA.length)
    assert 6.0 * weights < each < 6.3 * weights
    assert 5e9 < QLORA.held_bytes < 8e9
