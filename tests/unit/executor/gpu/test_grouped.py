"""Products with codes that have scales for groups, against what they stand for, on a GPU, if only a simulated one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

from benchmarks.random_model import random_rows
from services.executor.gpu import quantized_matmul
from services.executor.gpu.kernels.grouped import PackedRows
from services.executor.gpu.kernels.grouped_row import splits_of, tiles_of
from services.executor.gpu.linear import make_joined, make_lookup, make_product
from services.executor.gpu.quantized_matmul import GroupedProduct, PlainProduct, packed_rows
from services.executor.model.quantized import QuantizedRows
from services.executor.model.quantizing import CODECS

DEVICE = torch.device("cuda", 0)
ULP = 2**-8 * 1.01  # what bf16 rounds, and not a hundredth of it more
pytestmark = pytest.mark.usefixtures("cuda")
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def normal(*sizes: int, seed: int = 1) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def whole(most: int, *sizes: int, seed: int = 1) -> Tensor:
    """Each in [0, most]."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, most + 1, sizes, generator=random, dtype=torch.uint8)


def halves(outputs: int, groups: int, seed: int = 2) -> Tensor:
    return normal(outputs, groups, seed=seed).half()


def one_level(bits: int, group: int, outputs: int = 6, inputs: int = 128, **rest: object) -> QuantizedRows:
    codes = whole((1 << bits) - 1, outputs, inputs)
    return QuantizedRows(codes, bits, group, halves(outputs, inputs // group), **rest)  # type: ignore[arg-type]


def two_levels(bits: int, group: int, per: int, inputs: int, *, mins: bool, signed: bool = False) -> QuantizedRows:
    groups = inputs // group
    scales = whole(63, 6, groups, seed=3)
    return QuantizedRows(
        whole((1 << bits) - 1, 6, inputs),
        bits,
        group,
        (scales.to(torch.int8) - 32) if signed else scales,
        offset=0 if mins else 1 << (bits - 1),
        mins=whole(63, 6, groups, seed=4) if mins else None,
        supers=halves(6, groups // per),
        super_mins=halves(6, groups // per, seed=5) if mins else None,
        per=per,
    )


def act_order() -> QuantizedRows:
    """The second rank's columns of a weight whose groups are not neighbours: some columns are filled up."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(7)).int()
    made = one_level(4, 32, zeros=whole(16, 6, 4, seed=3))
    return replace(made, permutation=order).columns(48, 128)


FORMATS: dict[str, Callable[[], QuantizedRows]] = {
    "int4": lambda: one_level(4, 64, inputs=192, zeros=whole(15, 6, 3, seed=3)),
    "two tiles of outputs": lambda: one_level(4, 32, outputs=70, offset=8),
    "groups of 256 inputs": lambda: one_level(4, 256, inputs=256, offset=8),
    "groups of 48": lambda: one_level(4, 48, inputs=144, offset=8),
    "int8, a scale per row": lambda: one_level(8, 40, inputs=40, offset=128),
    "int8, zero points": lambda: one_level(8, 32, zeros=whole(255, 6, 4, seed=3)),
    "q8_0": lambda: one_level(8, 32, inputs=160, offset=128),
    "q4_1": lambda: one_level(4, 32, mins=halves(6, 4, seed=3)),
    "q5_0": lambda: one_level(5, 32, offset=16),
    "mxfp4": lambda: one_level(4, 32, table=E2M1),
    "q2_k": lambda: two_levels(2, 16, 16, 256, mins=True),
    "q3_k": lambda: two_levels(3, 16, 16, 256, mins=False, signed=True),
    "q4_k": lambda: two_levels(4, 32, 8, 256, mins=True),
    "q6_k": lambda: two_levels(6, 16, 16, 256, mins=False, signed=True),
    "scales above scales for less than a block": lambda: two_levels(4, 32, 3, 96, mins=True),
    "act-order": act_order,
    "int8 with zero points and an offset": lambda: one_level(8, 64, zeros=whole(255, 6, 2, seed=3), offset=100),
    "an offset beyond the codes": lambda: one_level(4, 32, offset=201),
}


@pytest.mark.parametrize("name", FORMATS)
def test_products_and_rows_are_those_of_the_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = FORMATS[name]()
    bias = None if name == "q8_0" else normal(weight.outputs, seed=8).bfloat16()
    values, packed = weight.dequantized(), packed_rows(weight.to(DEVICE))
    assert packed.shape == weight.shape
    if weight.permutation is None:
        rows = torch.tensor([weight.outputs - 1, 0, 5])
        found = make_lookup(packed, torch.bfloat16)(rows.to(DEVICE)).cpu()
        torch.testing.assert_close(found, values[rows].bfloat16(), rtol=ULP, atol=1e-6)
    x = normal(2, weight.inputs, seed=9).bfloat16()
    exact = x.double() @ values.double().T + (0 if bias is None else bias.double())
    product = make_product(packed, None if bias is None else bias.to(DEVICE))
    assert isinstance(product, GroupedProduct)
    torch.testing.assert_close(product(x.to(DEVICE)).cpu().double(), exact, rtol=ULP, atol=1e-4)
    for row in range(2):  # by a kernel of its own
        alone = product(x[row : row + 1].to(DEVICE)).cpu().double()
        torch.testing.assert_close(alone, exact[row : row + 1], rtol=ULP, atol=1e-4)
    monkeypatch.setattr(quantized_matmul, "MOST_ROWS", 1)  # so that two are many
    largest = float(exact.abs().max())  # of weights that are rounded too
    torch.testing.assert_close(product(x.to(DEVICE)).cpu().double(), exact, rtol=0, atol=2 * ULP * largest)


def test_splits_add_up_and_rows_that_lie_apart() -> None:
    weight = random_rows(CODECS["q4_k"], 6, 1152, torch.device("cpu"))
    product = GroupedProduct(packed_rows(weight.to(DEVICE)), None)
    x = normal(3, 2304, seed=2).bfloat16()[:, 1152:]
    exact = x.double() @ weight.dequantized().double().T
    found = [product(x.to(DEVICE)).cpu() for _ in range(2)]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), exact, rtol=ULP, atol=1e-4)
    torch.testing.assert_close(product(x[1:2].to(DEVICE)).cpu().double(), exact[1:2], rtol=ULP, atol=1e-4)
    assert not bool(product._arrivals.any())
    assert product(x[:0].to(DEVICE)).shape == (0, 6)


def test_splits_of_a_single_row_add_up() -> None:
    weight = random_rows(CODECS["q4_k"], 20, 2304, torch.device("cpu"))
    product = GroupedProduct(packed_rows(weight.to(DEVICE)), None)
    assert splits_of(20, 9, 1, tiles_of(packed_rows(weight))) == 2
    x = normal(1, 2304, seed=2).bfloat16()
    found = [product(x.to(DEVICE)).cpu() for _ in range(2)]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), x.double() @ weight.dequantized().double().T, rtol=ULP, atol=1e-4)
    assert not bool(product._arrivals.any())


@pytest.mark.parametrize("biased", [False, True])
def test_a_plain_weight_multiplies_one_row_as_it_does_many(biased: bool) -> None:
    weight, x = normal(50, 70).bfloat16(), normal(3, 140, seed=2).bfloat16()[:, 70:]
    bias = normal(50, seed=3).bfloat16() if biased else None
    product = make_product(weight.to(DEVICE), None if bias is None else bias.to(DEVICE))
    assert isinstance(product, PlainProduct)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for rows in (x, x[1:2]):
        found = product(rows.to(DEVICE)).cpu().double()
        torch.testing.assert_close(found, exact if len(rows) > 1 else exact[1:2], rtol=ULP, atol=1e-3)


def test_an_invariant_row_has_the_bits_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_matmul, "MOST_ROWS", 2)  # so that rows are multiplied in several turns
    weight = random_rows(CODECS["int4"], 6, 1152, torch.device("cpu"))
    product = GroupedProduct(packed_rows(weight.to(DEVICE)), None, invariant=True)
    x = normal(3, 1152, seed=2).bfloat16().to(DEVICE)
    together = product(x)
    for row in range(3):
        assert torch.equal(product(x[row : row + 1])[0], together[row])


def test_linears_of_one_format_are_one_and_others_follow_each_other() -> None:
    formats = (("int4", 64), ("int4", 64), ("q6_k", 3))
    parts = [random_rows(CODECS[form], outputs, 64, torch.device("cpu")) for form, outputs in formats]
    packed = [packed_rows(part.to(DEVICE)) for part in parts]
    seen: list[tuple[int, int]] = []

    def noted(weight: PackedRows, bias: Tensor | None) -> object:
        seen.append(weight.shape)
        return make_product(weight, bias)

    biases = [normal(len(part.codes), seed=4).bfloat16() for part in parts]
    product = make_joined(list(zip(packed, [bias.to(DEVICE) for bias in biases], strict=True)), noted)  # type: ignore[arg-type]
    assert seen == [(128, 64), (3, 64)]
    x = normal(1, 64, seed=5).bfloat16()
    values = torch.cat([part.dequantized() for part in parts])
    exact = x.double() @ values.double().T + torch.cat(biases).double()
    torch.testing.assert_close(product(x.to(DEVICE)).cpu().double(), exact, rtol=ULP, atol=1e-4)
    assert not packed[2].can_precede(packed[2])  # its last tile is not full


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "int4"])
def test_packed_weights_take_the_bits_that_their_format_has(name: str) -> None:
    weight = random_rows(CODECS[name], 64, 256, torch.device("cpu"))
    assert packed_rows(weight.to(DEVICE)).nbytes == weight.nbytes
