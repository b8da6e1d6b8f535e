import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.model.loading.gguf_blocks import BLOCKS, by_torch, has_codes, quantized, values
from services.executor.native.library import why_not

QUANTIZED = [kind for kind in GGMLQuantizationType if has_codes(kind)]
FLOATS = {  # bytes of a block at which a float16 begins
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Bits of memory for a weight
OF_BOOKS = {
    "IQ1_S": 3.4,
    "IQ1_M": 3.7,
    "IQ2_XXS": 3.4,
    "IQ2_XS": 3.7,
    "IQ2_S": 3.7,
    "IQ3_XXS": 4.4,
    "IQ3_S": 4.4,
    "TQ1_0": 2.1,
}


def any_rows(kind: GGMLQuantizationType, seed: int, rows: int, blocks: int) -> np.ndarray:
    """Blocks of any bytes, but with scales that are numbers."""
    size = GGML_QUANT_SIZES[kind][1]
    random = np.random.default_rng(seed)
    made = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in FLOATS[kind.name]:
        scales = random.standard_normal((rows, blocks, 1)).astype(np.float16)
        made[..., at : at + 2] = scales.view(np.uint8)
    if kind is GGMLQuantizationType.MXFP4:
        made[..., 0] %= 252  # more are no values of a float32
    if kind is GGMLQuantizationType.IQ1_M:
        made[..., 55] &= 0x3F  # the highest bits of its scale: more is no number
    return made.reshape(rows, -1)


def test_all_formats_that_are_promised_are_there() -> None:
    assert {kind.name for kind in QUANTIZED} == FLOATS.keys()


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_codes_and_scales_are_the_files(kind: GGMLQuantizationType, seed: int, rows: int, blocks: int) -> None:
    raw = any_rows(kind, seed, rows, blocks)
    made = quantized(torch.from_numpy(raw), kind)
    expected = torch.from_numpy(dequantize(raw, kind))
    assert torch.equal(made.dequantized(), expected)
    assert torch.equal(values(torch.from_numpy(raw), kind), expected)
    assert int(made.codes.max()) < 1 << made.bits


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_kernels_take_blocks_apart_as_pytorch_does(kind: GGMLQuantizationType) -> None:
    raw = torch.from_numpy(any_rows(kind, 3, 7, 5))
    made, expected = quantized(raw[1::2], kind), by_torch(raw[1::2], kind)
    for name in ("codes", "scales", "mins", "supers", "super_mins"):
        found, part = getattr(made, name), getattr(expected, name)
        assert found is part or torch.equal(found, part), name
    assert made.same_format(expected)
    rounded = values(raw, kind, torch.bfloat16)
    assert torch.equal(rounded.bfloat16(), by_torch(raw, kind).dequantized().bfloat16())


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_the_form_takes_hardly_more_memory_than_the_file(kind: GGMLQuantizationType) -> None:
    raw = any_rows(kind, 0, 8, 4)
    made = quantized(torch.from_numpy(raw), kind)
    # Scales of four and six bits are kept in eight; what lies in books has a code of its own.
    assert made.nbytes <= raw.nbytes * 1.2 or made.nbytes * 8 <= made.codes.numel() * OF_BOOKS[kind.name]


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZED if FLOATS[kind.name]], ids=lambda kind: kind.name)
@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00])
def test_scales_that_are_no_numbers_are_refused(kind: GGMLQuantizationType, bits: int) -> None:
    for at in FLOATS[kind.name]:
        raw = any_rows(kind, 1, 3, 2)
        size = GGML_QUANT_SIZES[kind][1]
        raw.reshape(3, 2, size)[1, 1, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
        with pytest.raises(ValueError, match="NaN or infinite"):
            quantized(torch.from_numpy(raw), kind)


def test_an_exponent_that_is_no_number_is_refused() -> None:
    raw = any_rows(GGMLQuantizationType.MXFP4, 1, 1, 2)
    raw[0, 0] = 255
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantized(torch.from_numpy(raw), GGMLQuantizationType.MXFP4)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_values(kind: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    type_ = GGMLQuantizationType[kind]
    raw = np.ascontiguousarray(gguf.quantize(numbers, type_)).view(np.uint8).reshape(3, -1)
    assert torch.equal(values(torch.from_numpy(raw), type_).float(), torch.from_numpy(dequantize(raw, type_)))
    assert not has_codes(type_)


@pytest.mark.parametrize("left_out", QUANTIZED, ids=lambda kind: kind.name)
def test_without_one_type_its_tensors_are_unpacked(
    left_out: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(BLOCKS, left_out)
    for kind in QUANTIZED:
        raw = any_rows(kind, 1, 3, 2)
        assert has_codes(kind) == (kind is not left_out)
        assert torch.equal(values(torch.from_numpy(raw), kind), torch.from_numpy(dequantize(raw, kind)))
