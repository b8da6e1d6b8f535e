"""Error bounds of the codecs, over values of any size."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from services.executor import native
from services.executor.core.settings import ExecutorSettings, parse_layers
from services.executor.kv_cache.codecs import (
    AS_COMPUTED,
    COMPRESSING,
    FP8,
    INT8,
    SMALLEST_SCALE,
    Codec,
    codecs_of,
    e4m3_to_float,
)
from services.executor.kv_cache.codecs import CODECS as KV_CODECS
from shared.config import load_settings
from shared.data_types import BLOCK_DTYPES, BlockDType
from shared.messages import ModelSettings
from shared.registry import settings_problems

each = pytest.mark.parametrize("codec", COMPRESSING, ids=lambda codec: codec.name)
ROWS = stn.arrays(
    np.float32,
    stn.array_shapes(min_dims=1, max_dims=3, max_side=8),
    elements=st.one_of(
        st.floats(-(2.0**100), 2.0**100, width=32),
        st.floats(-8, 8, width=32),
        st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 448.0, -127.0]),
    ),
)
ROUNDING = 1 + 2.0**-20  # what float32's own rounding may add to a bound


def bound(codec: Codec, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The largest error that each value may have, float64."""
    scale = scales.double().unsqueeze(-1)
    if not codec.dtype.is_floating_point:
        return (scale / 2).expand(rows.shape) * ROUNDING
    # Three bits of mantissa: half of an eighth; denormals below 2^-6 are multiples of 2^-9.
    return torch.maximum(rows.double().abs() / 16, scale * 2.0**-10) * ROUNDING


@each
@given(rows=ROWS)
def test_errors_stay_within_their_bound(codec: Codec, rows: np.ndarray) -> None:
    values = torch.from_numpy(rows)
    codes, scales = codec.encode(values)
    decoded = codec.decode(codes, scales)
    assert (codes.dtype, codes.shape) == (codec.dtype, values.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, values.shape[:-1])
    assert (decoded.dtype, decoded.shape) == (torch.float32, values.shape)
    assert decoded.isfinite().all()
    assert ((values.double() - decoded.double()).abs() <= bound(codec, values, scales)).all()
    assert (decoded[values == 0] == 0).all()


@given(rows=ROWS)
def test_int8_is_off_by_a_254th_of_the_largest_at_most(rows: np.ndarray) -> None:
    values = torch.from_numpy(rows)
    largest = values.double().abs().amax(-1, keepdim=True)
    error = (values.double() - INT8.decode(*INT8.encode(values)).double()).abs()
    assert (error <= largest / 254 * ROUNDING + SMALLEST_SCALE / 2).all()


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_value_and_zeros_are_kept(codec: Codec, dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, 3.0, -12.0], [0.0, 0.0, 0.0]], dtype=dtype)
    decoded = codec.decode(*codec.encode(values))
    assert decoded[0, 2].item() == pytest.approx(-12.0, rel=1e-6)
    assert not decoded[1].any()
    assert not decoded[:, 0].any()


@each
def test_encoding_leaves_its_input_alone(codec: Codec) -> None:
    values = torch.randn(3, 8)
    before = values.clone()
    codec.encode(values)
    assert torch.equal(values, before)


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_hidden(codec: Codec, bad: float) -> None:
    decoded = codec.decode(*codec.encode(torch.tensor([[1.0, bad], [1.0, 2.0]])))
    assert not decoded[0].isfinite().any()
    assert decoded[1].isfinite().all()


def test_every_finite_code_of_e4m3_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = codes.float()
    finite = expected.isfinite()
    assert finite.sum() == 254
    assert torch.equal(e4m3_to_float(codes)[finite], expected[finite])


def test_codecs_by_name() -> None:
    assert codecs_of(["bf16", "fp8", "int8"]) == (None, FP8, INT8)


# --- the door --------------------------------------------------------------------------------------


def test_every_codec_that_settings_name_is_declared_once() -> None:
    assert set(KV_CODECS) == set(BLOCK_DTYPES)
    assert [codec.name for codec in COMPRESSING] == [name for name in KV_CODECS if name != AS_COMPUTED]
    numbers = [codec.number for codec in COMPRESSING]
    assert len({0, *numbers}) == 1 + len(numbers)


def test_triton_kernels_number_codecs_alike() -> None:
    codes = pytest.importorskip("services.executor.gpu.kernels.codes")
    assert (INT8.number, FP8.number) == (codes.INT8, codes.E4M3)
    assert codes.PLAIN not in {codec.number for codec in COMPRESSING}


@pytest.mark.parametrize("name", BLOCK_DTYPES)
def test_what_is_declared_is_what_is_asked_for(name: BlockDType) -> None:
    settings = load_settings(ExecutorSettings, kv_dtype=name, kv_dtype_layers=f"0={name}")
    assert parse_layers(settings.kv_dtype_layers) == {0: name}
    assert not settings_problems(ModelSettings(kv_dtype=name, kv_dtype_layers=f"-1={name}"))


def test_native_kernels_number_codecs_alike() -> None:
    header = (Path(native.__file__).parent / "codec.h").read_text()
    numbered = {name.lower(): int(number) for name, number in re.findall(r"RZ_CODEC_(\w+) = (\d)", header)}
    assert numbered == {"none": 0, **{codec.name: codec.number for codec in COMPRESSING}}
