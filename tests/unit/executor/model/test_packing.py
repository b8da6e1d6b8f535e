"""Packed weights multiply like plain ones."""

import pytest
import torch
from torch import nn

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardRange
from services.executor.model.parallel.layers import ColumnParallelLinear, RowParallelLinear
from services.executor.model.weight_formats import can_pack, packed_weight

BF16 = torch.bfloat16
CPU = torch.device("cpu")


packing = pytest.mark.skipif(not can_pack(CPU, BF16), reason="oneDNN multiplies no bf16 on this processor")


def test_bf16_on_a_cpu_is_packed_where_onednn_says_that_it_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for says in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda says=says: says)
        assert can_pack(CPU, BF16) is says


def test_nothing_else_is_packed() -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda"), BF16)


@packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("shape", [(1, 1, 96), (1, 5, 96), (40, 96), (1, 300, 96)])
def test_a_packed_layer_computes_what_the_plain_one_does(kind: str, bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 80, bias=bias, dtype=BF16)
    layer: ColumnParallelLinear | RowParallelLinear
    if kind == "column":
        layer = ColumnParallelLinear(linear, ShardRange(0, 80))
    else:
        layer = RowParallelLinear(linear, ShardRange(0, 96), SingleRank())
    layer.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    x = torch.randn(shape, dtype=BF16)
    with torch.inference_mode():
        expected = layer(x)
        layer.pack(packed_weight(layer.weight), keep_plain=False)
        torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2)
    assert layer.weight.numel() == 0, "the plain weight is let go"
