"""What lies between a decoder's products: against float64, and with the residual's bits as transformers has them."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

from services.executor.gpu.kernels import elementwise
from services.executor.gpu.kernels.elementwise import Norms, Rotation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
# Half a unit in the last place, relative; of float32 some more, for sums in another order.
ULP = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def true_norm(x: Tensor, weight: Tensor) -> Tensor:
    """In float64."""
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def rounded_norm(x: Tensor, weight: Tensor, offset: bool) -> Tensor:
    """As transformers' modules compute it: Llama's round before the weights, Gemma's behind."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * weight).to(x.dtype) if offset else (weight * normed.to(x.dtype)).to(x.dtype)


def near(ours: Tensor, truth: Tensor, units: float) -> None:
    torch.testing.assert_close(ours.double().cpu(), truth, rtol=units * ULP[ours.dtype], atol=units * ULP[ours.dtype])


@dtypes
@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("offset", [False, True], ids=["llama", "gemma"])
def test_norm(dtype: torch.dtype, width: int, offset: bool) -> None:
    x, weight = random(5, width).to(dtype), 1 + 0.1 * random(width, seed=2)
    ours = elementwise.norm(x.to(DEVICE), weight.to(DEVICE), Norms(EPS, offset))
    near(ours, true_norm(x, weight), 4)


@dtypes
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("offset", [False, True], ids=["llama", "gemma"])
def test_the_residual_has_the_bits_of_transformers(dtype: torch.dtype, scale: float, after: bool, offset: bool) -> None:
    width = 80
    x, residual = random(6, width).to(dtype), (3 * random(6, width, seed=2)).to(dtype)
    weight, behind = (1 + 0.1 * random(width, seed=seed).to(dtype).float() for seed in (3, 4))
    added = rounded_norm(x, behind, offset) if after else x
    expected = residual + (added * scale if scale != 1.0 else added)
    kept = residual.to(DEVICE, copy=True)
    ours = elementwise.add_norm(
        x.to(DEVICE), kept, weight.to(DEVICE), Norms(EPS, offset), behind.to(DEVICE) if after else None, scale
    )
    if dtype is torch.bfloat16:
        # A sum of squares in another order may round one value of a norm to the other side.
        assert (kept.cpu() != expected).float().mean() <= (0.01 if after else 0.0)
    torch.testing.assert_close(kept.cpu(), expected, rtol=2 * ULP[dtype], atol=2 * ULP[dtype])
    near(ours, true_norm(kept.cpu(), weight), 4)


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[T, heads, d] in float64, by angles [T, half]."""
    half = cosines.shape[1]
    first, second, rest = x.double().split([half, half, x.shape[2] - 2 * half], dim=-1)
    c, s = cosines.double()[:, None], sines.double()[:, None]
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)


@dtypes
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "width", "half", "normed"),
    [(6, 3, 32, 16, False), (4, 2, 32, 16, True), (3, 1, 20, 6, True), (2, 2, 64, 0, False), (40, 8, 32, 8, False)],
    ids=["plain", "norms", "partial", "not turned", "many heads"],
)
def test_queries_keys_and_values_go_where_attention_reads_them(
    dtype: torch.dtype, q_heads: int, kv_heads: int, width: int, half: int, normed: bool
) -> None:
    slots = [5, 90, -1, 17, 0]
    qkv = random(5, (q_heads + 2 * kv_heads) * width).to(dtype)
    angles = 3 * random(5, half, seed=2)
    weights = tuple(1 + 0.1 * random(width, seed=seed) for seed in (3, 4))
    cosines, sines = 1.3 * angles.cos(), 1.3 * angles.sin()
    query, key, value = qkv.view(5, -1, width).split([q_heads, kv_heads, kv_heads], dim=1)
    wanted = [
        turned(true_norm(part, weight) if normed else part, cosines, sines)
        for part, weight in zip((query, key), weights, strict=True)
    ]
    writable = torch.full((6, 2, kv_heads, 16, width), 7.0, dtype=dtype, device=DEVICE)
    ours = elementwise.place(
        qkv.to(DEVICE),
        q_heads,
        Rotation(cosines.to(DEVICE), sines.to(DEVICE)) if half else None,
        torch.tensor(slots, dtype=torch.int32, device=DEVICE),
        writable,
        (weights[0].to(DEVICE), weights[1].to(DEVICE)) if normed else None,
        Norms(EPS, offset=True),
    )
    assert ours.shape == (5, q_heads, width)
    near(ours, wanted[0], 8)
    blocks = writable.cpu()
    for row, slot in enumerate(slots):
        if slot >= 0:
            near(blocks[slot // 16, 0, :, slot % 16], wanted[1][row], 8)
            assert torch.equal(blocks[slot // 16, 1, :, slot % 16], value[row])
            blocks[slot // 16, :, :, slot % 16] = 7.0
    assert bool((blocks == 7.0).all()), "something was written beside the slots"


@dtypes
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
def test_activation(dtype: torch.dtype, gelu: bool) -> None:
    x = (4 * random(3, 2 * 1100)).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    functional = torch.nn.functional
    acted = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    ours = elementwise.gated(x.to(DEVICE), gelu=gelu)
    near(ours, acted * up, 4)
