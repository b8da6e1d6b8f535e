import re
from typing import cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from services.executor.core.settings import ExecutorSettings
from services.executor.gpu.linear import weight_codec
from services.executor.kv_cache.codecs import FP8, INT8
from services.executor.leader.group_leader import fingerprint_of
from services.executor.model.quantizing import CODECS, codec_of
from shared.config import load_settings
from shared.data_types import WeightDType
from shared.errors import ConfigurationError
from shared.messages import ModelCard

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
CARD = ModelCard("m", 100, 256, [0], "", 0)


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


def refused(kind: WeightDType, device: torch.device, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(reason)) as raised:
        weight_codec(kind, device, dtype)
    assert str(raised.value).endswith(".")


def test_how_weights_are_kept() -> None:
    assert weight_codec("auto", CUDA, torch.float32) is codec_of("auto") is None
    assert weight_codec("bf16", CUDA, BF16) is None
    assert weight_codec("fp8", CUDA, BF16) is FP8
    assert weight_codec("int8", CUDA, BF16) is INT8
    for name, codec in CODECS.items():
        assert codec_of(cast("WeightDType", name)) is codec
        assert weight_codec(cast("WeightDType", name), CUDA, BF16) is {"int8": INT8, "fp8": FP8}.get(name, codec)


def test_where_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("int8", CUDA, torch.float32, "give --dtype bf16")
    refused("q4_k", CUDA, torch.float32, "give --dtype bf16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused("int8", CUDA, BF16, "needs Triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    refused("fp8", CUDA, BF16, "this one has 8.0; use --weight-dtype int8")


def test_settings_know_four_kinds_and_rings_of_another_continue_nothing() -> None:
    with pytest.raises(ConfigurationError, match=r"RYZANSTEIN_WEIGHT_DTYPE \(or --weight-dtype\) is wrong"):
        load_settings(ExecutorSettings, weight_dtype="int3")
    prints = {
        fingerprint_of(load_settings(ExecutorSettings, weight_dtype=kind), CARD, "")
        for kind in ("auto", "bf16", "fp8", "int8")
    }
    assert len(prints) == 4


def test_the_librarys_product_takes_what_it_is_given() -> None:
    """`_scaled_mm`: its own checks of types, sizes and layouts on a GPU, which run without one."""
    pytest.importorskip("triton", reason="its module has kernels of Triton's (Linux on x86-64)")
    from services.executor.gpu.quantized_matmul import scaled_by_rows

    with FakeTensorMode():
        device = torch.device("cuda")
        codes = torch.empty((33, 64), dtype=torch.float8_e4m3fn, device=device)
        weight = torch.empty((48, 64), dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(33, device=device), torch.empty(48, device=device)
        bias = torch.empty(48, dtype=torch.bfloat16, device=device)
        for addend in (None, bias):
            found = scaled_by_rows(codes, scales[0], weight, scales[1], addend)
            assert found.dtype == torch.bfloat16
            assert found.shape == (33, 48)
        uneven = torch.empty((40, 64), dtype=torch.float8_e4m3fn, device=device)
        with pytest.raises(RuntimeError, match="divisible by 16"):
            scaled_by_rows(codes, scales[0], uneven, torch.empty(40, device=device), None)
