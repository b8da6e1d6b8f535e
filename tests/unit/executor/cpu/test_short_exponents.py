"""bf16 weights in 12 bits (`native/short_exponents.h`): the same numbers and sums as in 16, to the bit."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from services.executor.cpu.packed_linear import PackedLinear, alternating, has_short_exponents, one_after_another
from tests.unit.executor.cpu.test_quantized import Kernels, every_level
from tests.unit.executor.model.lanes import natively

pytestmark = natively
EXPONENTS = 16  # that codes stand for


@pytest.fixture(params=every_level(), scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    with ThreadPoolExecutor(2) as pool:
        made = Kernels(request.param, pool)
        if not has_short_exponents(made.library):
            pytest.skip("this level keeps bf16 in 16 bits")
        yield made
        made.close()


def trained(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """bf16 [outputs, inputs] like a trained layer's: a few are far smaller or larger, one is zero, one infinite."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.03
    odd = torch.rand(outputs, inputs, generator=generator)
    weight[odd < 0.0006] *= 1e-25
    weight[odd > 0.9998] *= 1e25
    weight[0, 0], weight[outputs // 2, inputs - 1] = 0.0, torch.inf
    return weight.bfloat16()


def both(kernels: Kernels, weight: Tensor) -> tuple[PackedLinear, PackedLinear]:
    """`weight` in 12 bits, and in 16."""
    pieces = one_after_another([(weight, None)])
    short = PackedLinear.of(kernels.library, pieces, kernels.pool, 2)
    assert short.form is not None
    assert short.form.bits == 12
    return short, PackedLinear.of(kernels.library, pieces, kernels.pool, 2, plain=True)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 4), (70, 100), (96, 576), (40, 2052)])
def test_products_have_the_same_bits_with_any_number_of_rows(kernels: Kernels, outputs: int, inputs: int) -> None:
    short, plain = both(kernels, trained(outputs, inputs))
    for rows in (1, 2, 3, 8, 9, 12, 19, 21, 97, 200):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
        assert torch.equal(bits(kernels.product(short, x)), bits(kernels.product(plain, x))), rows


def test_rows_are_unpacked_as_they_were(kernels: Kernels) -> None:
    weight = trained(70, 580)
    short, _ = both(kernels, weight)
    described = short.describe()
    row = torch.empty(580)
    for output in (0, 33, 69):
        kernels.library.rz_quantized_row(
            row.data_ptr(), ctypes.byref(described.format), short.packed.data_ptr(), output
        )
        assert torch.equal(row, weight[output].float())
    rows = torch.empty(70, 600, dtype=torch.bfloat16)
    kernels.library.rz_unpack_rows(
        rows.data_ptr(), 0, 600, ctypes.byref(described.format), short.packed.data_ptr(), 580, 0, 70, 70, 0, 70
    )
    assert torch.equal(rows[:, :580].view(torch.int16), weight.view(torch.int16))


def test_they_take_a_quarter_less_memory(kernels: Kernels) -> None:
    short, plain = both(kernels, trained(256, 1024))
    assert 0.75 < short.nbytes / plain.nbytes < 0.76


def test_gate_and_up_alternate(kernels: Kernels) -> None:
    gate, up = trained(48, 64), trained(48, 64, 1)
    pieces = alternating((gate, None), (up, None))
    short = PackedLinear.of(kernels.library, pieces, kernels.pool, 2)
    plain = PackedLinear.of(kernels.library, pieces, kernels.pool, 2, plain=True)
    x = torch.randn(5, 64).bfloat16()
    assert short.form is not None
    assert torch.equal(bits(kernels.product(short, x)), bits(kernels.product(plain, x)))


def test_weights_of_more_exponents_stay_in_16_bits(kernels: Kernels) -> None:
    """One panel of several that has no room for its patches."""
    weight = torch.randn(96, 256)
    weight[40] = 2.0 ** torch.arange(-100, 28).repeat(2)
    linear = PackedLinear.of(kernels.library, one_after_another([(weight.bfloat16(), None)]), kernels.pool, 2)
    assert linear.form is None
    x = torch.eye(256).bfloat16()
    assert torch.equal(kernels.product(linear, x).T, weight.bfloat16().float())


def test_as_many_others_as_there_is_room_for_are_kept(kernels: Kernels) -> None:
    """Of 512 inputs 48: what a panel of as many has room for, and one more."""
    for others, fits in ((48, True), (49, False)):
        weight = torch.ones(32, 512)
        weight[:EXPONENTS, :300] = 2.0 ** torch.arange(EXPONENTS)[:, None]
        weight[20, :others] = 2.0**60
        linear = PackedLinear.of(kernels.library, one_after_another([(weight.bfloat16(), None)]), kernels.pool, 1)
        assert (linear.form is not None) is fits
        x = torch.eye(512)[:100].bfloat16()
        assert torch.equal(kernels.product(linear, x).T, weight[:, :100])


def test_inputs_that_are_no_multiple_of_four_stay_in_16_bits(kernels: Kernels) -> None:
    linear = PackedLinear.of(kernels.library, one_after_another([(trained(32, 66), None)]), kernels.pool, 1)
    assert linear.form is None
