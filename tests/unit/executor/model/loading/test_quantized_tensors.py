"""Boxes of coded tensors stand for boxes of what the formats' documents say, code by code."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.executor.core.sharding import ShardRange
from services.executor.model.loading import quantization_schemes
from services.executor.model.loading.quantization_schemes import coded_tensors, scheme_of, unreadable
from services.executor.model.loading.quantized_tensors import CodedTensor, unpacked
from shared.errors import ModelLoadError
from tests.unit.executor.model.loading.quantized_weights import (
    FORMS,
    Written,
    awq,
    bit_stream,
    compressed,
    fp8,
    gptq,
    mxfp4,
    nf4,
)

NAME = "model.layers.0.self_attn.q_proj"
GROUPED: dict[str, Callable[..., Written]] = {
    "gptq": lambda *sizes: gptq(*sizes[:3], group=sizes[3]),
    "gptq symmetric": lambda *sizes: gptq(*sizes[:3], group=sizes[3], symmetric=True),
    "gptq act-order": lambda *sizes: gptq(*sizes[:3], group=sizes[3], ordered=True),
    "gptq symmetric act-order": lambda *sizes: gptq(*sizes[:3], group=sizes[3], symmetric=True, ordered=True),
    "gptq of 8 bits": lambda *sizes: gptq(*sizes[:3], group=sizes[3], bits=8),
    "gptq of 8 bits act-order": lambda *sizes: gptq(*sizes[:3], group=sizes[3], bits=8, ordered=True),
    "awq": lambda *sizes: awq(*sizes[:3], group=sizes[3]),
    "compressed-tensors": lambda *sizes: compressed(*sizes[:3], group=sizes[3]),
    "compressed-tensors asymmetric": lambda *sizes: compressed(*sizes[:3], group=sizes[3], symmetric=False),
    "compressed-tensors of 8 bits": lambda *sizes: compressed(*sizes[:3], group=sizes[3], bits=8),
}


def read(written: Written, name: str = f"{NAME}.") -> CodedTensor:
    find = scheme_of(SimpleNamespace(quantization_config=written.settings))
    assert find is not None
    coded, made_of = coded_tensors(find, {name + part: tensor for part, tensor in written.tensors.items()})
    [(of, tensor)] = coded.items()
    assert of == (f"{NAME}.weight" if name == f"{NAME}." else name)
    assert sorted(made_of[of]) == sorted(name + part for part in written.tensors)
    assert tensor.shape == written.values.shape
    return tensor


def spans(draw: st.DrawFn, size: int) -> slice:
    first = draw(st.integers(0, size - 1))
    return slice(first, draw(st.integers(first + 1, size)))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_boxes_hold_what_the_format_says(form: str, data: st.DataObject, seed: int) -> None:
    outputs, inputs = 32 * data.draw(st.integers(1, 3)), 32 * data.draw(st.integers(1, 5))
    written = FORMS[form](np.random.default_rng(seed), outputs, inputs)
    tensor = read(written)
    box = (data.draw(st.composite(spans)(outputs)), data.draw(st.composite(spans)(inputs)))
    np.testing.assert_array_equal(tensor.values(box).numpy(), written.values[box])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_rows_are_kept_as_codes_where_they_can_be_cut(form: str, data: st.DataObject, seed: int) -> None:
    outputs, inputs = 64, 32 * data.draw(st.integers(1, 5))
    written = FORMS[form](np.random.default_rng(seed), outputs, inputs)
    rows, columns = (data.draw(st.composite(spans)(size)) for size in (outputs, inputs // 16))
    cut = slice(columns.start * 16, columns.stop * 16)
    held = read(written).rows(ShardRange(rows.start, rows.stop), ShardRange(cut.start, cut.stop))
    assert held.bits in (2, 3, 4, 8)
    # The values of NF4 are rounded to bf16, all else is the file's.
    rounded = 2.0**-8 if form.startswith("nf4") else 0.0
    np.testing.assert_allclose(held.dequantized().numpy(), written.values[rows, cut], rtol=rounded)


@pytest.mark.parametrize("group", [16, 32, 64, 128, -1])
@pytest.mark.parametrize("kind", GROUPED)
def test_groups_of_every_size(kind: str, group: int) -> None:
    written = GROUPED[kind](np.random.default_rng(group + 1), 32, 256, group)
    held = read(written).rows(ShardRange(0, 32), ShardRange(0, 256))
    assert held.group == (group if group > 0 else 256)
    np.testing.assert_array_equal(held.dequantized().numpy(), written.values)


def test_codes_and_scales_are_the_files() -> None:
    made = np.random.default_rng(0)
    held = read(gptq(made, 64, 128, symmetric=True)).rows(ShardRange(0, 64), ShardRange(0, 128))
    assert (held.bits, held.group, held.offset, held.zeros) == (4, 32, 8, None)
    assert held.scales.dtype is torch.float16
    ordered = read(gptq(made, 64, 128, ordered=True)).rows(ShardRange(0, 64), ShardRange(0, 128))
    assert ordered.group == 32
    assert ordered.permutation is not None
    assert read(gptq(made, 64, 128)).rows(ShardRange(0, 64), ShardRange(8, 24)) is None
    assert read(fp8(made, 64, 128, block=24)).rows(ShardRange(0, 64), ShardRange(0, 128)) is None


@settings(max_examples=30, deadline=None)
@given(data=st.data(), bits=st.sampled_from([2, 3, 4, 8]))
def test_codes_come_out_of_words_as_they_went_in(data: st.DataObject, bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 96))
    kept = data.draw(st.composite(spans)(96))
    np.testing.assert_array_equal(unpacked(bit_stream(codes, bits), bits, kept).numpy(), codes[:, kept])


@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=st.integers(0, 100))
def test_experts_of_mxfp4(data: st.DataObject, seed: int) -> None:
    written = mxfp4(np.random.default_rng(seed), 3, 24, 96)
    box = tuple(data.draw(st.composite(spans)(size)) for size in (3, 24, 96))
    tensor = read(written, "experts.down_proj")
    np.testing.assert_array_equal(tensor.values(box).numpy(), written.values[box])
    _, rows, columns = box
    codes = tensor.matrix(1).rows(ShardRange(rows.start, rows.stop), ShardRange(columns.start, columns.stop))
    assert (codes is None) == bool(columns.start % 16 or columns.stop % 16)
    if codes is not None:
        np.testing.assert_array_equal(codes.dequantized().numpy(), written.values[1, rows, columns])


def read_all_of(written: Written) -> None:
    tensor = read(written)
    try:
        tensor.values((slice(0, tensor.shape[0]), slice(0, tensor.shape[1])))
    except ValueError as error:
        raise unreadable(NAME, error) from error


def refused(written: Written, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason) as raised:
        read_all_of(written)
    assert NAME in str(raised.value)
    assert "\n" not in str(raised.value)


def changed(tensor: Tensor, value: float) -> Tensor:
    flat = tensor.flatten().clone()
    flat[1] = value
    return flat.view(tensor.shape)


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_part_is_named(form: str) -> None:
    written = FORMS[form](np.random.default_rng(0), 64, 64)
    optional = {"g_idx", "weight_zero_point", "weight_g_idx"} - ({"g_idx"} if "act-order" in form else set())
    # What says that a weight is coded cannot be missed.
    sign = {"gptq": "qweight", "awq": "qweight", "compressed": "weight_packed", "nf4": "weight.absmax"}
    signs = {part for start, part in sign.items() if form.startswith(start)} | {"weight"}
    for part in written.tensors.keys() - optional - signs:
        less = {name: tensor for name, tensor in written.tensors.items() if name != part}
        refused(Written(less, written.values, written.settings), "no tensor|has no nested")


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_other_shapes_and_types_are_refused(form: str) -> None:
    written = FORMS[form](np.random.default_rng(0), 64, 96)
    for part, tensor in written.tensors.items():
        if ("per" in form or "fp8" in form) and part in ("qweight", "weight"):
            continue  # a weight of another shape, which is for the model to refuse
        shorter = tensor[:-1] if tensor.numel() > 1 else torch.zeros(3, dtype=tensor.dtype)
        refused(Written({**written.tensors, part: shorter}, written.values, written.settings), "cannot be read")
        if part != "weight":  # whose type says whether it is coded
            other = tensor.to(torch.int16) if tensor.dtype is not torch.uint8 else tensor.float()
            refused(Written({**written.tensors, part: other}, written.values, written.settings), "weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", [form for form in FORMS if "per tensor" not in form])
def test_scales_that_are_no_numbers_are_refused(form: str, value: float) -> None:
    written = FORMS[form](np.random.default_rng(0), 64, 64)
    scales = ("scales", "weight_scale", "weight_scale_inv", "weight.nested_quant_map", "weight.absmax")
    part = next(name for name in scales if name in written.tensors)
    tensor = written.tensors[part]
    worse = torch.full_like(tensor, value)
    refused(Written({**written.tensors, part: worse}, written.values, written.settings), "NaN or infinite")


def test_codes_of_fp8_that_are_no_numbers_are_refused() -> None:
    written = fp8(np.random.default_rng(0), 64, 128)
    written.tensors["weight"].view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(ValueError, match="NaN or infinite"):
        read(written).rows(ShardRange(0, 64), ShardRange(0, 128))
    assert read(written).rows(ShardRange(4, 64), ShardRange(0, 128)) is not None


def test_an_order_that_is_none_is_refused() -> None:
    written = gptq(np.random.default_rng(0), 64, 64, ordered=True)
    for value in (-1, 2, 1 << 30, int(1 - written.tensors["g_idx"][1])):
        worse = {**written.tensors, "g_idx": changed(written.tensors["g_idx"], value)}
        refused(Written(worse, written.values, written.settings), "g_idx does not give each of 2 groups 32")


def test_states_of_nf4_that_lie_are_refused() -> None:
    written = nf4(np.random.default_rng(0), 64, 64)
    state = "weight.quant_state.bitsandbytes__nf4"
    for text in (b"{}", b"\xff", b'{"shape": [64, 64], "blocksize": 0}', b'{"shape": [1, 1], "blocksize": 64}', b"[]"):
        worse = {**written.tensors, state: torch.tensor(list(text), dtype=torch.uint8)}
        refused(Written(worse, written.values, written.settings), "cannot be read")


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ({"quant_method": "aqlm"}, "by the method 'aqlm', which is not served; served are gptq, awq"),
        (
            {"quant_method": "gptq", "bits": 5, "group_size": 128},
            "5 bits, which is not served; served are 2, 3, 4 and 8",
        ),
        ({"quant_method": "gptq", "bits": 4}, "group_size is None"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 100}, "groups of 100"),
        ({"quant_method": "gptq", "bits": "4", "group_size": 128}, "bits is '4'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {".*q": {"bits": 8}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "awq with 3 bits"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "makes no sense"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}}, "'sparse-24'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of \[128\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 as e5m2"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "4 bits as fp4"),
    ],
)
def test_what_is_not_served_is_refused_by_name(described: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        scheme_of(SimpleNamespace(quantization_config=described))


def places(described: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where there is a value, at any depth."""
    for key, value in described.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


@pytest.mark.parametrize("form", FORMS)
def test_descriptions_of_any_values_are_read_or_refused_in_a_sentence(form: str) -> None:
    written = FORMS[form](np.random.default_rng(0), 64, 64)
    for place in places(written.settings):
        for value in (None, -1, 0, 3.5, "x", [[1]], {}, True, 10**30, float("nan")):
            inner = lying = copy.deepcopy(written.settings)
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            try:
                read_all_of(replace(written, settings=lying))
            except ModelLoadError as error:
                assert "\n" not in str(error)  # noqa: PT017  # some change nothing
            except AssertionError:
                continue  # nothing is quantized any more, or other tensors of it


def test_a_model_without_a_quantization_config_has_no_coded_weights() -> None:
    assert scheme_of(SimpleNamespace()) is None


@pytest.mark.parametrize("left_out", quantization_schemes._METHODS)
def test_without_one_method_the_rest_is_served(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(quantization_schemes._METHODS, left_out)
    with pytest.raises(ModelLoadError, match=f"by the method '{left_out}', which is not served") as raised:
        scheme_of(SimpleNamespace(quantization_config={"quant_method": left_out}))
    assert left_out not in str(raised.value).partition("; served are ")[2].split(" (nf4)")[0].split(", ")
    for make in FORMS.values():
        written = make(np.random.default_rng(0), 32, 64)
        if str(written.settings.get("quant_method")) != left_out:
            read(written)
