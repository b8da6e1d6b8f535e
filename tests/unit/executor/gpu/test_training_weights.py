"""Frozen weights of a trainer on GPUs, against what their codes stand for; in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

from benchmarks.random_model import random_rows
from services.executor.model.quantizing import CODECS
from services.executor.training.base.gpu_weights import grouped_weight
from services.executor.training.base.weights import Scratch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("codec", ["q4_k", "q6_k", "q8_0", "int4"])
def test_rows_are_unpacked_as_their_codes_say(codec: str) -> None:
    rows = random_rows(CODECS[codec], 70, 256, DEVICE)
    weight, scratch = grouped_weight(rows), Scratch(torch.bfloat16, DEVICE)
    assert (weight.outputs, weight.inputs) == (70, 256)
    expected = rows.dequantized()
    for first, end in ((0, 70), (3, 66)):
        torch.testing.assert_close(weight.rows(first, end, scratch).float(), expected[first:end], rtol=1e-2, atol=1e-4)
    wanted = torch.tensor([69, 0, 7, 7], device=DEVICE)
    torch.testing.assert_close(weight.picked(wanted, scratch).float(), expected[wanted], rtol=1e-2, atol=1e-4)
    assert weight.rows(0, 9, scratch).data_ptr() == weight.rows(9, 18, scratch).data_ptr(), "one buffer for all"


def test_columns_that_are_no_inputs_are_left_to_pytorch() -> None:
    rows = random_rows(CODECS["q8_0"], 8, 96, DEVICE)
    shuffled = torch.arange(95, -1, -1, dtype=torch.int32, device=DEVICE)
    assert grouped_weight(replace(rows, permutation=shuffled)) is None
