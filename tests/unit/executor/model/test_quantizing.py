"""How near quantized weights are, against gguf's own quantizers and formats."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from services.executor.kv_cache.codecs import FP8
from services.executor.model import quantizing
from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS, RowsCodec
from services.executor.native import library
from shared.data_types import WEIGHT_FORMATS
from shared.errors import ConfigurationError


def rows(outputs: int = 48, inputs: int = 512) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(outputs, inputs) * torch.rand(outputs, 1) * 0.1


def quantized(codec: RowsCodec, weight: Tensor) -> QuantizedRows:
    room = codec.empty(*weight.shape)
    codec.encode_into(room, weight)
    return room


def error(weight: Tensor, other: Tensor) -> float:
    return float((weight - other).norm() / weight.norm())


def test_q8_0_has_the_codes_of_ggufs_quantizer() -> None:
    weight = rows()
    theirs = torch.from_numpy(
        dequantize(quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    )
    ours = quantized(CODECS["q8_0"], weight)
    assert (ours.dequantized() - theirs).abs().max() <= ours.scales.float().max()  # one step, where it ties
    assert error(weight, ours.dequantized()) <= 1.001 * error(weight, theirs)


def test_fp8_has_the_codes_and_scales_that_gpus_have() -> None:
    weight = rows(40, 576).bfloat16()
    codes, scales = FP8.encode(weight)
    ours = quantized(CODECS["fp8"], weight)
    assert torch.equal(ours.codes, codes.view(torch.uint8))
    assert torch.equal(ours.scales.flatten(), scales)


@pytest.mark.parametrize(
    ("name", "most"),
    [("int8", 0.008), ("fp8", 0.028), ("q8_0", 0.006), ("q6_k", 0.019), ("q4_k", 0.074), ("int4", 0.09)],
)
def test_errors_are_those_of_so_many_bits(name: str, most: float) -> None:
    """Of normally distributed weights, in parts of their size."""
    weight = rows()
    assert error(weight, quantized(CODECS[name], weight).dequantized()) < most


def test_scales_are_searched_for() -> None:
    """Better than GGUF's Q4_1, which has a scale and a minimum per 32 inputs in float16 and half a bit more."""
    weight = rows()
    kind = gguf.GGMLQuantizationType.Q4_1
    spanned = torch.from_numpy(np.asarray(dequantize(quantize(weight.numpy(), kind), kind)))
    assert error(weight, quantized(CODECS["q4_k"], weight).dequantized()) < error(weight, spanned)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("inputs", [16, 24, 32, 48, 64, 96, 576])
def test_any_number_of_inputs_is_served(name: str, inputs: int) -> None:
    weight = rows(7, inputs)
    made = quantized(CODECS[name], weight)
    assert made.shape == (7, inputs)
    assert error(weight, made.dequantized()) < 0.1


@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_equal_values(name: str) -> None:
    weight = torch.zeros(4, 256)
    weight[1] = 0.25
    weight[2, :32] = -3.0
    made = quantized(CODECS[name], weight).dequantized()
    assert made[0].eq(0).all()
    torch.testing.assert_close(made, weight, rtol=0.04, atol=1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_rows_are_quantized_by_themselves(name: str) -> None:
    weight = rows(40)
    whole = quantized(CODECS[name], weight)
    part = quantized(CODECS[name], weight[10:20])
    assert torch.equal(whole.rows(10, 20).dequantized(), part.dequantized())


@pytest.mark.parametrize("name", CODECS)
def test_codes_do_not_depend_on_level_threads_or_dtype(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = rows(70, 576).to(torch.bfloat16)
    expected = quantized(CODECS[name], weight.float())
    monkeypatch.setattr(quantizing, "_WORTH_A_THREAD", 1000)
    for level in library.levels():
        monkeypatch.setattr(quantizing, "best_level", lambda level=level: level)
        made = quantized(CODECS[name], weight)
        assert torch.equal(made.codes, expected.codes)
        assert torch.equal(made.dequantized(), expected.dequantized())


def test_without_kernels_nothing_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "best_level", lambda: "")
    with pytest.raises(ConfigurationError, match="compiled kernels"):
        quantized(CODECS["q4_k"], rows())


def test_every_format_that_settings_name_is_declared_once() -> None:
    assert set(CODECS) == set(WEIGHT_FORMATS)
    assert all(codec.bits <= codec.stored_bits < codec.bits + 1 for codec in CODECS.values())
    assert {codec.vocabulary for codec in CODECS.values()} <= set(CODECS)


@pytest.mark.parametrize("left_out", CODECS)
def test_without_one_format_the_rest_quantizes(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those whose embedding and head are of that format."""
    monkeypatch.delitem(CODECS, left_out)
    rest = [codec for codec in CODECS.values() if codec.vocabulary != left_out]
    assert len(rest) >= 3
    weight = rows(48, 256)
    for codec in rest:
        assert error(weight, quantized(codec, weight).dequantized()) < 0.1
        assert codec.for_vocabulary().bits >= codec.bits
