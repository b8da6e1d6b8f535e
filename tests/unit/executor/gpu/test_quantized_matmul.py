"""Products with quantised weights against float64, on a GPU, if only a simulated one."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

from services.executor.gpu import quantized_matmul
from services.executor.gpu.kernels.matmul import (
    MOST_ROWS,
    arrivals_for,
    encode_rows,
    multiply_few,
    multiply_one,
    tiles_of,
)
from services.executor.gpu.quantized_matmul import coded_product, multiply_widened
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.weight_formats import Quantized, quantize

DEVICE = torch.device("cuda", 0)
NAN = float("nan")
BF16_TOLERANCE = 2**-8 * 1.01  # of a row's largest: what rounding takes
pytestmark = pytest.mark.usefixtures("cuda")
CODECS = pytest.mark.parametrize("codec", [FP8, INT8], ids=lambda codec: codec.name)


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal ones, and in each row one that is fifty times as large."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    made[..., seed % shape[-1]] *= 50
    return made.to(dtype).to(DEVICE)


def decoded(weight: Quantized, codec: Codec) -> Tensor:
    return codec.decode(weight.codes.cpu(), weight.scales.cpu()).double()


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.cpu().double() @ weight.T
    return product if bias is None else product + bias.cpu().double()


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest of each row."""
    error = (found.cpu().double() - expected).abs().amax(-1)
    assert bool((error <= tolerance * expected.abs().amax(-1)).all()), error


def few(x: Tensor, weight: Quantized, bias: Tensor | None = None, processors: int = 8) -> Tensor:
    arrivals = arrivals_for(len(weight.codes), DEVICE)
    found = multiply_few(x, weight.codes, weight.scales, bias, arrivals, processors)
    assert not bool(arrivals.any())
    return found


@CODECS
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 100, 600), (2, 64, 128), (5, 70, 1111), (16, 3, 48), (128, 66, 64)]
)
def test_few_rows(codec: Codec, rows: int, outputs: int, inputs: int) -> None:
    weight = quantize(numbers(outputs, inputs), codec)
    x, bias = numbers(rows, inputs, seed=2), numbers(outputs, seed=3)
    for addend in (None, bias):
        found = few(x, weight, addend)
        assert found.dtype == torch.bfloat16
        assert_near(found, exact(x, decoded(weight, codec), addend), BF16_TOLERANCE)


@CODECS
def test_splits_add_up_to_the_same_however_often(codec: Codec) -> None:
    weight = quantize(numbers(70, 2100), codec)
    x = numbers(3, 2100, seed=2)
    assert tiles_of(3, 70, 2100, 8).splits == 4
    arrivals = arrivals_for(70, DEVICE)
    found = [multiply_few(x, weight.codes, weight.scales, None, arrivals, 8) for _ in range(3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert_near(found[0], few(x, weight, processors=1).cpu().double(), BF16_TOLERANCE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the interpreter")
def test_parts_are_handed_over_behind_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX ISA, "Memory Consistency Model": the barrier of a program orders the stores of all its threads before the
    arrival of one, which releases them to the GPU; the last to arrive acquires them, and a barrier hands them on. What
    others have stored is then read from the cache that they share (.cg), not from one's own."""
    from triton.runtime import interpreter

    done: list[str] = []
    builder = interpreter.InterpreterBuilder

    def noted(name: str, what: Any) -> None:
        original = getattr(builder, name)

        def call(self: object, *given: Any) -> Any:
            done.extend(what(*given))
            return original(self, *given)

        monkeypatch.setattr(builder, name, call)

    noted("create_barrier", lambda: ["barrier"])
    noted("create_masked_store", lambda *given: ["store"])
    noted("create_masked_load", lambda *given: ["shared load"] if "CG" in str(given[3]) else [])
    noted("create_atomic_rmw", lambda *given: ["arrival" if "ACQUIRE_RELEASE" in str(given[4]) else "add"])
    few(numbers(3, 2100, seed=2), quantize(numbers(70, 2100), INT8))
    part = ["store", "barrier", "arrival"]
    assert done == 2 * [*4 * part, "barrier", *4 * ["shared load"], "store", "store"]


@CODECS
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_hide_nothing(codec: Codec, rows: int) -> None:
    plain = numbers(40, 256)
    plain[7] = 0
    plain[9, 3] = NAN
    weight = quantize(plain, codec)
    x = numbers(rows, 256, seed=2)
    x[-1] = 0
    found = few(x, weight).cpu()
    assert bool(found[:, 9].isnan().all())
    assert not bool(found[:, 7].any())
    whole = found[:, [column for column in range(40) if column != 9]]
    assert bool(whole.isfinite().all())
    assert not bool(whole[-1].any())
    x[0, 5] = NAN
    found = few(x, weight).cpu()
    assert bool(found[0].isnan().all())
    assert bool(found[1:, :9].isfinite().all())


@pytest.mark.parametrize("biased", [False, True])
def test_one_row_by_a_plain_weight(biased: bool) -> None:
    weight, x = numbers(50, 700), numbers(1, 700, seed=2)
    bias = numbers(50, seed=3) if biased else None
    assert_near(multiply_one(x, weight, None, bias), exact(x, weight.cpu().double(), bias), BF16_TOLERANCE)


def test_rows_that_lie_apart_and_none_at_all() -> None:
    weight = quantize(numbers(32, 64), INT8)
    wide = numbers(4, 128, seed=2)
    assert torch.equal(few(wide[:, 64:], weight), few(wide[:, 64:].contiguous(), weight))
    across = numbers(64, 4, seed=2).t()
    assert torch.equal(few(across, weight), few(across.contiguous(), weight))
    assert few(wide[:0, :64], weight).shape == (0, 32)


@CODECS
@pytest.mark.parametrize("inputs", [16, 1000])
def test_rows_are_encoded_as_the_codec_says(codec: Codec, inputs: int) -> None:
    x = numbers(5, inputs)
    x[1] = 0
    x[2, 3] = NAN
    x[3] *= 1e-30
    codes, scales = encode_rows(x, codec)
    expected_codes, expected_scales = codec.encode(x)
    assert codes.dtype == codec.dtype
    assert torch.equal(scales.isnan(), expected_scales.isnan())
    sound = [0, 1, 3, 4]
    assert torch.allclose(scales[sound], expected_scales[sound], rtol=1e-6)
    apart = codes[sound].view(torch.int8).int() - expected_codes[sound].view(torch.int8).int()
    # On a GPU a quotient may come out one unit in the last place apart, and fall to the other side of a tie.
    assert int(apart.abs().max()) <= (1 if DEVICE.type == "cuda" else 0)
    assert encode_rows(x[:0], codec)[0].shape == (0, inputs)


@CODECS
@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_by_widened_weights(codec: Codec, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_matmul, "SCRATCH", 30 * 2 * 50)
    weight = quantize(numbers(77, 50), codec)
    x, bias = numbers(9, 50, seed=2), numbers(77, seed=3) if biased else None
    assert_near(multiply_widened(x, weight, bias), exact(x, decoded(weight, codec), bias), 2 * BF16_TOLERANCE)


def scaled_on_cpu(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """What `torch._scaled_mm` computes."""
    rows = FP8.decode(codes.cpu(), scales.cpu()).double()
    return exact(rows, decoded(Quantized(weight, weight_scales), FP8), bias).bfloat16().to(codes.device)


def test_the_way_is_chosen_by_rows_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []

    def noted(way: str) -> None:
        original = getattr(quantized_matmul, way)
        monkeypatch.setattr(quantized_matmul, way, lambda *given: (ways.append(way), original(*given))[1])

    for way in ("multiply_few", "encode_rows", "multiply_widened"):
        noted(way)
    shapes = {"fp8": (FP8, 48, 32), "int8": (INT8, 48, 32), "uneven": (FP8, 40, 32)}
    for name, (codec, outputs, inputs) in shapes.items():
        weight, bias = quantize(numbers(outputs, inputs), codec), numbers(outputs, seed=3)
        product = coded_product(weight, bias, scaled_on_cpu)
        wide = decoded(weight, codec)
        few_rows = 32 if name == "fp8" else MOST_ROWS
        for rows in (1, few_rows, few_rows + 1):
            x = numbers(rows, inputs, seed=rows)
            error = product(x).cpu().double() - exact(x, wide, bias)
            # Of an activation e4m3 keeps three bits of mantissa: an error of up to 1/16.
            most = x.cpu().double().abs() @ wide.abs().T + bias.cpu().double().abs()
            assert bool((error.abs() <= most / 14).all())
        many = "encode_rows" if name == "fp8" else "multiply_widened"
        assert ways == ["multiply_few", "multiply_few", many]
        ways.clear()


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "splits"),
    [(1, 4096, 4096, 5), (16, 28672, 4096, 1), (128, 4096, 14336, 3), (2, 64, 256, 1), (2, 64, 4096, 8)],
)
def test_tiles_fill_the_processors(rows: int, outputs: int, inputs: int, splits: int) -> None:
    cut = tiles_of(rows, outputs, inputs, 132)
    assert cut.splits == splits
    assert cut.block_t * cut.groups >= rows
    assert cut.groups * cut.tiles <= len(arrivals_for(outputs, torch.device("cpu")))
