"""Mixtures of experts as Triton compiles them for an H200, run by what knows PTX."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernels are compiled where Triton is (Linux on x86-64)")

from services.executor.gpu.kernels.grouped import PackedRows
from tests.unit.executor.gpu.kernels.ptx.cases import (
    CHOSEN,
    EXPERT_OUTPUTS,
    EXPERT_ROWS,
    EXPERTS,
    GROUPED_INPUTS,
    RULES,
    grouped_weight,
)
from tests.unit.executor.gpu.kernels.ptx.emit import emitted
from tests.unit.executor.gpu.kernels.ptx.memory import Memory
from tests.unit.executor.gpu.kernels.test_ptx import bf16, bits, normal
from tests.unit.executor.gpu.kernels.test_ptx_grouped import given, values_of

PAIRS = EXPERT_ROWS * CHOSEN


def scores(logits: Tensor, correction: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """(weights, experts) of each row"""
    rule, logits = RULES[form], logits[:, :EXPERTS]
    if not rule.sigmoid:
        weights, chosen = logits.softmax(-1).topk(CHOSEN)
        return weights / weights.sum(-1, keepdim=True), chosen
    by = (logits.sigmoid() + correction).view(-1, rule.groups, EXPERTS // rule.groups)
    best = by.sum(-1).topk(rule.top_groups)[1]
    kept = torch.zeros(by.shape[:2]).scatter_(1, best, 1.0) > 0
    chosen = by.masked_fill(~kept[:, :, None], -torch.inf).flatten(1).topk(CHOSEN)[1]
    return rule.scale * logits.sigmoid().gather(1, chosen), chosen


def check(case: str, form: str, weight: dict[str, Any], values: Tensor, grid: tuple[int, int, int]) -> None:
    """`values` [experts, outputs, inputs]; the last row only fills up."""
    choose, sort, product, combine = emitted(case)[case]
    logits, correction = normal(EXPERT_ROWS, EXPERTS + 1), normal(EXPERTS, seed=1)
    slots = np.array([0] * (EXPERT_ROWS - 1) + [-1], np.int32)
    bound, memory = grid[0], Memory()
    x, shared = (
        normal(EXPERT_ROWS, GROUPED_INPUTS, seed=2).bfloat16(),
        normal(EXPERT_ROWS, EXPERT_OUTPUTS, seed=3),
    )
    arrays = {
        "logits": logits.numpy().copy(), "correction": correction.numpy().copy(), "slots": slots, "x": bits(x),
        "chosen": np.full((EXPERT_ROWS, CHOSEN), -9, np.int32), "order": np.full(PAIRS, -9, np.int32),
        "weights": np.zeros((EXPERT_ROWS, CHOSEN), np.float32), "tiles": np.full((3, bound), -9, np.int32),
        "made": np.full((PAIRS, EXPERT_OUTPUTS), 0x7FC0, np.int16), "arrivals": np.zeros(264, np.int32),
        "parts": np.full((2, PAIRS, EXPERT_OUTPUTS), np.nan, np.float32), "shared": bits(shared.bfloat16()),
        "out": np.zeros((EXPERT_ROWS, EXPERT_OUTPUTS), np.int16),
    }  # fmt: skip
    at = {name: memory.give(array) for name, array in arrays.items()}
    sizes = {
        "pairs": PAIRS,
        "bound": bound,
        "stride": EXPERTS + 1,
        "outputs": EXPERT_OUTPUTS,
        "width": EXPERT_OUTPUTS,
    }
    sizes |= {"x_stride": GROUPED_INPUTS, "splits": 2, "inputs": GROUPED_INPUTS}
    choose.run((EXPERT_ROWS,), memory, **at, **sizes, scale=RULES[form].scale)
    weights, chosen = scores(logits, correction, form)
    rows = EXPERT_ROWS - 1
    assert np.array_equal(arrays["chosen"][:rows], chosen[:rows].numpy())
    assert (arrays["chosen"][rows:] == EXPERTS).all()
    np.testing.assert_allclose(arrays["weights"], weights.numpy(), rtol=1e-5)

    sort.run((EXPERTS,), memory, **at, **sizes)
    wanted = arrays["chosen"].ravel()
    there = rows * CHOSEN
    assert arrays["order"][:there].tolist() == sorted(range(there), key=lambda pair: (wanted[pair], pair))
    counts = np.bincount(wanted[:there], minlength=EXPERTS)
    used = np.flatnonzero(counts)
    assert arrays["tiles"][0, : len(used)].tolist() == used.tolist()
    assert arrays["tiles"][2].tolist() == [*counts[used], *[0] * (bound - len(used))]

    product.run(grid, memory, **(at | sizes | {"out": at["made"]} | weight))
    exact = torch.stack(
        [values[expert].double() @ x[row].double() for row in range(rows) for expert in chosen[row]]
    )
    found = bf16(arrays["made"])[:there].double()
    torch.testing.assert_close(found, exact, rtol=2**-8 * 1.01, atol=2e-3)
    assert not arrays["arrivals"].any()

    combine.run((EXPERT_ROWS, 1), memory, **at, **sizes)
    gate = logits[:, EXPERTS:].double().sigmoid()
    summed = gate * shared.bfloat16().double()
    summed[:rows] += (weights[:rows, :, None].double() * found.view(rows, CHOSEN, -1)).sum(1)
    torch.testing.assert_close(bf16(arrays["out"]).double(), summed, rtol=2**-8 * 1.01, atol=1e-4)


@pytest.mark.slow
def test_plain_experts() -> None:
    values = normal(EXPERTS * EXPERT_OUTPUTS, GROUPED_INPUTS, seed=4).bfloat16()
    by_expert = values.view(EXPERTS, EXPERT_OUTPUTS, GROUPED_INPUTS)
    check("mixture", "softmax", {"codes": bits(values), "scales": 0}, by_expert, (PAIRS, 2, 2))


@pytest.mark.slow
def test_experts_with_scales_for_groups() -> None:
    """Of which each is the first one, over and over."""
    one = grouped_weight("int4")
    stacked = PackedRows.stacked([one] * EXPERTS)
    values = values_of(one).expand(EXPERTS, -1, -1)
    check("mixture int4", "sigmoid", given(replace(stacked, outputs=one.outputs)), values, (PAIRS, 2, 2))
