"""Cuts of quantized weights stand for the same cuts of the values."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.model.quantized import QuantizedRows
from tests.unit.executor.model.quantized_weights import FORMS, random_rows


@st.composite
def weights(draw: st.DrawFn, rows: int = 24) -> QuantizedRows:
    form = draw(st.sampled_from(FORMS))
    group = draw(st.sampled_from([16, 32, 64, 128, 256]))
    return random_rows(
        form,
        rows,
        256 * draw(st.integers(1, 2)),
        bits=4 if form == "table" else draw(st.sampled_from([2, 3, 4, 5, 6, 8])),
        group=group,
        seed=draw(st.integers(0, 1000)),
        dtype=draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        per=1 if group == 256 else 2,
        ordered=draw(st.booleans()),
    )


def by_the_definition(weight: QuantizedRows, output: int, column: int) -> float:
    group = column // weight.group
    code = int(weight.codes[output, column])
    scale = float(weight.scales[output, group])
    least = 0.0 if weight.mins is None else float(weight.mins[output, group])
    if weight.supers is not None:
        scale *= float(weight.supers[output, group // weight.per])
    if weight.super_mins is not None:
        least *= float(weight.super_mins[output, group // weight.per])
    if weight.zeros is not None:
        least = scale * int(weight.zeros[output, group])
    return scale * (weight.table[code] if weight.table else code - weight.offset) - least


@given(weights(), st.integers(0, 23), st.integers(0, 255))
def test_a_value_is_what_the_definition_says(weight: QuantizedRows, output: int, column: int) -> None:
    place = column if weight.permutation is None else int(weight.permutation[column])
    expected = by_the_definition(weight, output, column)
    assert float(weight.dequantized()[output, place]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(weights(), st.data())
def test_cuts_stand_for_cuts_of_the_values(weight: QuantizedRows, data: st.DataObject) -> None:
    first, end = sorted(data.draw(st.tuples(st.integers(0, 12), st.integers(13, 24))))
    left, right = sorted(data.draw(st.tuples(st.integers(0, 7), st.integers(8, 16))))
    cut = weight.rows(first, end).columns(left * 16, right * 16)
    assert cut.shape == (end - first, (right - left) * 16)
    torch.testing.assert_close(
        cut.dequantized(), weight.dequantized()[first:end, left * 16 : right * 16], rtol=0, atol=0
    )


@given(weights(), st.integers(1, 23))
def test_rows_that_are_joined_are_the_weight(weight: QuantizedRows, cut: int) -> None:
    joined = QuantizedRows.joined([weight.rows(0, cut), weight.rows(cut, 24)])
    torch.testing.assert_close(joined.dequantized(), weight.dequantized(), rtol=0, atol=0)


def test_a_scale_of_the_row_is_cut_anywhere() -> None:
    weight = random_rows("offset", 4, 48, bits=8, group=48)
    assert torch.equal(weight.columns(5, 17).dequantized(), weight.dequantized()[:, 5:17])


def test_weights_of_different_formats_are_not_joined() -> None:
    with pytest.raises(ValueError, match="different formats"):
        QuantizedRows.joined([random_rows("plain", 4, 64), random_rows("plain", 4, 64, group=64)])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"group": 48}, "do not divide"),
        ({"bits": 7}, "7 bits"),
        ({"table": (1, 2)}, "table of 2"),
        ({"scales": torch.full((4, 2), float("nan"))}, "NaN or infinite"),
        ({"scales": torch.ones(4, 2, dtype=torch.uint8)}, "scales of torch.uint8"),
        ({"mins": torch.ones(4, 2)}, "scales of torch.float32"),
        ({"zeros": torch.ones(3, 2, dtype=torch.uint8)}, "do not fit"),
        ({"super_mins": torch.ones(4, 1)}, "scales of torch.float32"),
        ({"per": 2}, "do not divide"),
        ({"offset": 300}, "beyond eight bits"),
        ({"permutation": torch.zeros(64, dtype=torch.int32)}, "each of 64 inputs once"),
        ({"permutation": torch.zeros(63, dtype=torch.int32)}, "does not fit 64 columns"),
        ({"of_inputs": 32}, "its columns"),
        ({"codes": torch.zeros(4, 64, dtype=torch.int32)}, "kept as torch.int32"),
        ({"codes": torch.zeros(0, 64, dtype=torch.uint8)}, "without outputs"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(random_rows("plain", 4, 64), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "end"), [(8, 64), (0, 0), (32, 65)])
def test_cuts_that_no_kernel_serves_are_refused(first: int, end: int) -> None:
    with pytest.raises(ValueError, match="inputs"):
        random_rows("plain", 4, 64).columns(first, end)
