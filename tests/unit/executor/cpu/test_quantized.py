"""Products with quantized weights against float64 sums of what the packed weight stands for."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.executor.cpu import quantized
from services.executor.cpu.packed_linear import PackedLinear, PackedSegment, alternating, one_after_another
from services.executor.cpu.quantized import (
    PackedFormat,
    activation_span,
    format_of,
    pack_rows,
    servable,
    short_exponents,
    unpacked,
)
from services.executor.model.quantized import E4M3, DeferredRows, QuantizedRows
from services.executor.native.library import RzFormat, RzModel, kernels_at, levels, load_library, why_not
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.quantized_weights import FORMS, random_rows

pytestmark = natively
COLUMNS, OUTPUTS, ROWS = 640, 70, 13
# 320 is no group of the kernels, and becomes one that is; 640 is the row.
GROUPS = (16, 32, 64, 128, 320, 640)


class Kernels:
    """Products of one level, with the threads of one decoder."""

    def __init__(self, level: str, pool: ThreadPoolExecutor) -> None:
        self.library = kernels_at(level)
        self.pool = pool
        self._decoder = self.library.rz_decoder_new(ctypes.byref(RzModel()), 2, None)

    def pack(self, *pieces: PackedSegment) -> PackedLinear:
        return PackedLinear.of(self.library, list(pieces), self.pool, 2)

    def product(self, linear: PackedLinear, x: Tensor) -> Tensor:
        out = torch.full((len(x), sum(part.outputs for part in linear.parts)), torch.nan)
        described = ctypes.byref(linear.describe())
        assert self.library.rz_decoder_multiply(self._decoder, described, x.data_ptr(), len(x), out.data_ptr()) == 0
        return out

    def of(self, weight: QuantizedRows, x: Tensor) -> Tensor:
        return self.product(self.pack(*one_after_another([(weight, None)])), x)

    def close(self) -> None:
        self.library.rz_decoder_free(self._decoder)


def every_level() -> list[Any]:
    """The best, or the one that the environment names, is tested always."""
    if why_not():
        return []
    first = load_library().level
    return [first, *(pytest.param(level, marks=pytest.mark.slow) for level in levels() if level != first)]


@pytest.fixture(params=every_level(), scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    with ThreadPoolExecutor(2) as pool:
        made = Kernels(request.param, pool)
        yield made
        made.close()


def rounded(x: Tensor, span: int) -> Tensor:
    """float64 of what the kernels take activations for: int8, with a scale for `span` columns."""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % span)).reshape(len(x), -1, span)
    most = blocks.abs().amax(2, keepdim=True)
    codes = (blocks * torch.where(most > 0, torch.full_like(most, 127) / most, 0)).round()
    return (codes.double() * (most / 127).double()).reshape(len(x), -1)[:, : x.shape[1]]


def expected(weight: QuantizedRows, x: Tensor, form: PackedFormat | None = None) -> Tensor:
    """float64, with the order of the columns that the kernels see; `form`: what it is packed as, if not what it is."""
    span = activation_span(form or format_of(servable(weight)))
    if weight.permutation is not None:
        x = torch.where(weight.permutation < 0, 0, x[:, weight.permutation.clamp(min=0).long()])
        weight = replace(weight, permutation=None, of_inputs=None)
    return rounded(x, span) @ weight.dequantized().double().T


def activations(rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(rows, columns)
    x[:, ::37] *= 20  # outliers
    x[1, 32:64] = 0
    return x.bfloat16()


def widths(form: str) -> tuple[int, ...]:
    return (3, 4) if form == "table" else (2, 3, 4, 5, 6, 8)


@pytest.mark.parametrize("form", FORMS)
def test_products_are_sums_of_what_the_weight_stands_for(kernels: Kernels, form: str) -> None:
    x = activations()
    for bits in widths(form):
        for group in GROUPS:
            per = 1 if group >= 320 else 10 if group == 16 else 5
            weight = random_rows(form, OUTPUTS, COLUMNS, bits, group, per=per, ordered=group == 64)
            found, wanted = kernels.of(weight, x), expected(weight, x)
            torch.testing.assert_close(
                found.double(), wanted, rtol=0, atol=2e-6 * wanted.abs().max().item(), msg=f"{bits} {group}"
            )


@pytest.mark.parametrize("form", [*FORMS, "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "per"), [(COLUMNS, 5), (COLUMNS - 32, 19)])
def test_rows_that_are_unpacked_are_what_the_weight_stands_for(
    kernels: Kernels, form: str, dtype: torch.dtype, columns: int, per: int
) -> None:
    """Of gate and up, whose rows alternate: all of them, and some from the middle of a panel on; also of the most bits
    and an odd number of blocks, of which two are unpacked together."""
    bits = 4 if columns == COLUMNS else widths(form)[-1]
    weights: list[QuantizedRows | Tensor] = [torch.randn(48, columns).bfloat16() for _ in range(2)]
    if form != "bf16":
        weights = [random_rows(form, 48, columns, bits, 32, seed=seed, per=per) for seed in range(2)]
    gate, up = weights
    linear = kernels.pack(*alternating((gate, None), (up, None)))
    described = RzFormat() if linear.form is None else linear.form.describe(None)
    for first, weight in ((0, gate), (16, up)):
        plain = weight.float() if isinstance(weight, Tensor) else weight.dequantized()
        for begin, end in ((0, 48), (5, 37), (47, 48)):
            rows = torch.full((end - begin, columns + 3), torch.nan, dtype=dtype)
            kernels.library.rz_unpack_rows(
                *(rows.data_ptr(), dtype is torch.float32, rows.stride(0), ctypes.byref(described)),
                *(linear.packed.data_ptr(), columns, first, 16, 32, begin, end),
            )
            close = {"rtol": 0.0, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2**-8, "atol": 1e-6}
            torch.testing.assert_close(rows[:, :columns].float(), plain[begin:end], **close)
            assert rows[:, columns:].isnan().all(), "nothing is written behind a row"


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_every_batch(kernels: Kernels, form: str) -> None:
    x = activations(100)
    for bits in widths(form):
        for group in (16, 32, 128, 640):
            weight = random_rows(form, 33, COLUMNS, bits, group, per=1 if group == 640 else 10 if group == 16 else 5)
            linear = kernels.pack(*one_after_another([(weight, None)]))
            together = kernels.product(linear, x)
            for count in (1, 2, 3, 6, 7, 16, 33):
                assert torch.equal(kernels.product(linear, x[:count]), together[:count]), (bits, group, count)


@pytest.mark.parametrize("form", [*FORMS, "bf16"])
def test_a_row_has_the_same_bits_however_many_take_a_panel_together(kernels: Kernels, form: str) -> None:
    """Hundreds of rows of one task, of several panels for each of two threads."""
    x, outputs = activations(600), 18 * 32 + 1
    plain = torch.randn(outputs, COLUMNS).bfloat16()
    for bits in (0,) if form == "bf16" else widths(form):
        weight = random_rows(form, outputs, COLUMNS, bits, 32, per=4) if bits else plain
        linear = kernels.pack(*one_after_another([(weight, None)]))
        together = kernels.product(linear, x)
        for count in (33, 257):
            assert torch.equal(kernels.product(linear, x[-count:]), together[-count:]), (bits, count)


@pytest.mark.parametrize("form", FORMS)
def test_the_largest_codes_and_activations_fit_into_sums(kernels: Kernels, form: str) -> None:
    """Those of 16 bits, where a level has them: they hold no more than this."""
    x = torch.ones(2 * ROWS, 1280).bfloat16()
    x[1::2] = -1
    for bits in widths(form):
        for group in (16, 32, 128):
            weight = random_rows(form, 33, 1280, bits, group, per=256 // group if group < 128 else 5)
            if weight.scales.dtype in (torch.uint8, torch.int8):
                largest = torch.iinfo(weight.scales.dtype).min or 255
                weight = replace(weight, scales=torch.full_like(weight.scales, largest))
            most = replace(weight, codes=torch.full_like(weight.codes, (1 << bits) - 1))
            if most.zeros is not None:
                most = replace(most, zeros=torch.zeros_like(most.zeros))
            wanted = expected(most, x)
            for count in (1, len(x)):
                torch.testing.assert_close(
                    kernels.of(most, x[:count]).double(), wanted[:count], rtol=0, atol=2e-6 * wanted.abs().max().item()
                )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [256, 512])
def test_groups_that_are_summed_in_parts(kernels: Kernels, form: str, group: int) -> None:
    x = activations(7, 1024)
    for bits in widths(form):
        weight = random_rows(form, OUTPUTS, 1024, bits, group, per=1024 // group)
        for rows in (1, 7):
            found, wanted = kernels.of(weight, x[:rows]), expected(weight, x[:rows])
            torch.testing.assert_close(
                found.double(), wanted, rtol=0, atol=2e-6 * wanted.abs().max().item(), msg=f"{bits} {rows}"
            )


@pytest.mark.parametrize(("kind", "columns"), [("quantized", COLUMNS), ("bf16", COLUMNS), ("bf16", 2080)])
def test_rows_of_several_tasks_are_those_of_few(kernels: Kernels, kind: str, columns: int) -> None:
    x = activations(230, columns)
    weight = random_rows("offset", OUTPUTS, columns, 4, 32)
    plain = weight.dequantized().bfloat16()
    linear = kernels.pack(*one_after_another([(weight if kind == "quantized" else plain, None)]))
    few = [kernels.product(linear, x[first : first + 5]) for first in range(0, len(x), 5)]
    assert torch.equal(kernels.product(linear, x), torch.cat(few))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_packed_is_the_weight(kernels: Kernels, form: str, dtype: torch.dtype) -> None:
    for bits in widths(form):
        for group in GROUPS:
            weight = random_rows(form, OUTPUTS, COLUMNS, bits, group, per=1 if group >= 320 else 5, dtype=dtype)
            whole = servable(weight)
            made = format_of(whole)
            packed = pack_rows(kernels.library, whole.rows, made, OUTPUTS, kernels.pool, 2)
            torch.testing.assert_close(
                unpacked(kernels.library, packed, made, OUTPUTS), weight.dequantized(), rtol=0, atol=1e-6
            )


@pytest.mark.parametrize("form", ["offset", "zeros"])
def test_codes_in_files_are_read_a_few_rows_at_a_time(
    kernels: Kernels, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three weights one after the other, and of two that alternate, packed as when they are held."""
    monkeypatch.setattr(quantized, "_CODES_AT_ONCE", 32 * COLUMNS)
    most: list[int] = []

    def deferred(weight: QuantizedRows) -> DeferredRows:
        def read(first: int, end: int) -> QuantizedRows:
            most.append(end - first)
            return weight.rows(first, end)

        return DeferredRows(weight.rows(0, 1), 0, weight.outputs, read)

    three = [random_rows(form, rows, COLUMNS, 4, 32, per=5) for rows in (70, 48, 33)]
    two = [random_rows(form, 96, COLUMNS, 4, 32, per=5) for _ in range(2)]
    for make, weights in (
        (lambda held: one_after_another((weight, None) for weight in held), three),
        (lambda held: alternating(*((weight, None) for weight in held)), two),
    ):
        expected = kernels.pack(*make(weights))
        made = kernels.pack(*make([deferred(weight) for weight in weights]))
        assert torch.equal(made.packed, expected.packed)
        assert made.form == expected.form
    assert 0 < max(most) <= 32


@pytest.mark.parametrize("columns", [16, 48, 80, 576])
@pytest.mark.parametrize("group", [16, 0])
def test_columns_that_fill_no_block(kernels: Kernels, columns: int, group: int) -> None:
    weight = random_rows("offset", OUTPUTS, columns, 8, group or columns)
    x = activations(3, columns)
    torch.testing.assert_close(
        kernels.of(weight, x).double(), expected(weight, x), rtol=1e-5, atol=1e-4, check_dtype=False
    )


def test_a_share_of_columns_in_order_of_activation(kernels: Kernels) -> None:
    weight, x = random_rows("zeros", OUTPUTS, COLUMNS, ordered=True), activations()
    for first, end in ((0, 208), (208, COLUMNS)):
        part, inputs = weight.columns(first, end), x[:, first:end].contiguous()
        wanted = expected(part, inputs)
        torch.testing.assert_close(
            kernels.of(part, inputs).double(), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item()
        )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none(kernels: Kernels, wrong: float) -> None:
    x = activations(3)
    x[1, 40] = wrong
    out = kernels.of(random_rows("offset", OUTPUTS, COLUMNS), x)
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


def test_parts_of_several_formats_follow_each_other(kernels: Kernels) -> None:
    x = activations(7)
    weights: list[Any] = [
        random_rows("super_mins", 64, COLUMNS, 4),
        random_rows("super_mins", 32, COLUMNS, 4, seed=1),
        random_rows("supers", 32, COLUMNS, 6, 16, per=10),
        torch.randn(32, COLUMNS).bfloat16(),
    ]
    biases = [torch.randn(weight.shape[0]) for weight in weights]
    linear = kernels.pack(*one_after_another(zip(weights, biases, strict=True)))
    assert [part.outputs for part in linear.parts] == [96, 32, 32]
    wanted = [expected(weight, x) for weight in weights[:3]] + [x.double() @ weights[3].double().T]
    torch.testing.assert_close(
        kernels.product(linear, x).double(),
        torch.cat(wanted, dim=1) + torch.cat(biases),
        rtol=1e-4,
        atol=1e-3,
        check_dtype=False,
    )


@pytest.mark.parametrize(
    ("gate", "up"),
    [
        (("super_mins", 4, 32), ("super_mins", 4, 32)),
        (("super_mins", 4, 32), ("supers", 6, 16)),
        (("table", 4, 32), ("zeros", 4, 128)),
        (("offset", 8, COLUMNS), ("mins", 5, 32)),
    ],
)
def test_gate_and_up_become_one_format(kernels: Kernels, gate: Any, up: Any) -> None:
    x = activations(7)
    weights = [
        random_rows(form, 64, COLUMNS, bits, group, per=5 if group <= 32 else 1, seed=seed)
        for seed, (form, bits, group) in enumerate((gate, up))
    ]
    linear = kernels.pack(*alternating((weights[0], None), (weights[1], None)))
    assert linear.form is not None
    found = kernels.product(linear, x).double().view(7, 4, 2, 16)
    for side, weight in enumerate(weights):
        wanted = expected(weight, x, linear.form)
        torch.testing.assert_close(
            found[:, :, side].reshape(7, 64), wanted, rtol=0, atol=1e-5 * wanted.abs().max().item()
        )


def test_gate_and_up_that_cannot_be_one_are_unpacked(kernels: Kernels) -> None:
    x = activations(7)
    gate, up = random_rows("offset", 16, COLUMNS), torch.randn(16, COLUMNS).bfloat16()
    linear = kernels.pack(*alternating((gate, None), (up, None)))
    assert linear.form in (None, short_exponents(COLUMNS))
    found = kernels.product(linear, x)
    torch.testing.assert_close(found[:, 16:], x.float() @ up.float().T, rtol=1e-2, atol=0.1)
    torch.testing.assert_close(found[:, :16], x.float() @ gate.dequantized().T, rtol=1e-2, atol=0.5)


def of_floats(kind: str, outputs: int, columns: int, group: int) -> QuantizedRows:
    """All codes of e4m3 that are numbers, or 16 values of a table."""
    floats = E4M3 if kind == "e4m3" else tuple(torch.linspace(-1, 1, 16).bfloat16().tolist())
    made = torch.Generator().manual_seed(0)
    codes = torch.randint(0, len(floats), (outputs, columns), dtype=torch.uint8, generator=made)
    codes[codes & 127 == 127] = 0
    scales = torch.rand(outputs, columns // group, generator=made) + 0.1
    return QuantizedRows(codes, 8 if kind == "e4m3" else 4, group, scales, floats=floats)


@pytest.mark.parametrize("kind", ["e4m3", "table"])
@pytest.mark.parametrize(
    ("columns", "group"), [(640, 640), (640, 64), (640, 320), (1024, 512), (576, 16), (44, 44), (80, 16)]
)
def test_codes_of_floats_are_multiplied_as_they_are(kernels: Kernels, kind: str, columns: int, group: int) -> None:
    """Activations are not rounded; a row has the same bits in every batch."""
    weight, x = of_floats(kind, OUTPUTS, columns, group), activations(100, columns)
    linear = kernels.pack(*one_after_another([(weight, None)]))
    found, wanted = kernels.product(linear, x), x.double() @ weight.dequantized().double().T
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=3e-6 * wanted.abs().max().item())
    for count in (1, 2, 4, 5, 13):
        assert torch.equal(kernels.product(linear, x[:count]), found[:count]), count


def test_e4m3_is_unpacked_to_what_it_stands_for(kernels: Kernels) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(32, 1)
    values = codes.view(torch.float8_e4m3fn).float()
    weight = QuantizedRows(codes, 8, 256, torch.ones(32, 1), floats=E4M3)
    for made in (
        weight.dequantized(),
        unpacked(
            kernels.library,
            pack_rows(kernels.library, weight.rows, format_of(weight), 32, kernels.pool, 1),
            format_of(weight),
            32,
        ),
        kernels.of(weight, torch.eye(256).bfloat16()).T,
    ):
        assert torch.equal(made[:, values[0].isfinite()], values[:, values[0].isfinite()])


def test_every_level_has_the_same_bits_but_for_the_order_of_sums() -> None:
    """int8 is int8 everywhere: only roundings of float32 may differ."""
    x, weight = activations(), random_rows("super_mins", OUTPUTS, COLUMNS)
    found = []
    with ThreadPoolExecutor(1) as pool:
        for level in levels():
            made = Kernels(level, pool)
            found.append(made.of(weight, x))
            made.close()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-3)
