"""Products with codes that have scales for groups as Triton compiles them for an H200, run by what knows PTX."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernels are compiled where Triton is (Linux on x86-64)")

from services.executor.gpu.kernels.grouped import PackedRows, widened
from tests.unit.executor.gpu.kernels.ptx.cases import GROUPED_INPUTS, GROUPED_OUTPUTS, grouped_weight
from tests.unit.executor.gpu.kernels.ptx.emit import emitted
from tests.unit.executor.gpu.kernels.ptx.memory import Memory
from tests.unit.executor.gpu.kernels.test_ptx import bf16, bits, normal

PARTS = ("codes", "high", "scales", "zeros", "mins", "supers", "super_mins")


def given(weight: PackedRows) -> dict[str, Any]:
    """What both kernels are passed."""
    parts = {name: getattr(weight, name) for name in PARTS}
    found = {name: weight.scales if part is None else part for name, part in parts.items()}
    sizes = {"columns": weight.columns, "blocks": weight.blocks, "run": weight.run}
    return {name: array(part) for name, part in found.items()} | sizes | {"super_run": weight.super_run}


def array(tensor: Tensor) -> np.ndarray[Any, Any]:
    return bits(tensor) if tensor.dtype == torch.bfloat16 else tensor.numpy().copy()


def values_of(weight: PackedRows) -> Tensor:
    """As the interpreter widens them."""
    wide = torch.empty((GROUPED_OUTPUTS, GROUPED_INPUTS))
    widened(weight, 0, wide)
    return wide


def check(form: str) -> None:
    weight = grouped_weight(form)
    kernels = emitted(f"grouped {form}", f"rows {form}")
    (product,), (lookup,) = kernels.values()
    values = values_of(weight)

    out = np.zeros((2, GROUPED_INPUTS), np.int16)
    index = np.array([70, 3])
    lookup.run((1, weight.blocks), Memory(), **given(weight), index=index, out=out, first=0, rows=2)
    assert torch.equal(bf16(out), values[index].bfloat16())

    x, bias, memory = normal(3, GROUPED_INPUTS, seed=2).bfloat16(), normal(80, seed=3).bfloat16(), Memory()
    out, parts = np.zeros((3, 80), np.int16), np.full((2, 3, 80), np.nan, np.float32)
    arrivals = np.zeros(16, np.int32)
    arrays = {"x": bits(x), "bias": bits(bias), "out": out, "parts": parts, "arrivals": arrivals}
    at = {name: memory.give(one) for name, one in arrays.items()}
    sizes = {"rows": 3, "outputs": GROUPED_OUTPUTS, "x_stride": GROUPED_INPUTS, "splits": 2}
    product.run((1, 2, 2), memory, **given(weight), **at, **sizes)
    exact = x.double() @ values.double().T + bias.double()
    # What bf16 rounds, and not a hundredth of it more.
    torch.testing.assert_close(bf16(out).double(), exact, rtol=2**-8 * 1.01, atol=1e-4)
    assert not arrivals.any()


def test_a_format_with_scales_and_minimums_above_each_other() -> None:
    check("q4_k")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4", "q6_k", "q8_0", "mxfp4"])
def test_other_formats(form: str) -> None:
    check(form)
