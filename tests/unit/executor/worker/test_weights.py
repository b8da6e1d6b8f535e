"""In which data type a rank's share is computed, and at which level of CPU instructions."""

import ctypes
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.settings import ExecutorSettings
from services.executor.cpu.packed_file import PackedFile
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_cache.offload import SpillStore
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.dtypes import choose_dtype
from services.executor.model.loading import arena, loader
from services.executor.native import library
from services.executor.platforms.cpu import Cpu
from services.executor.worker.backends import cpu_kernels, native_runner
from services.executor.worker.backends.catalog import load_share
from services.executor.worker.backends.packed_share import cache_of
from services.executor.worker.runner import ModelRunner
from services.executor.worker.weights import Share, ShareRequest
from shared.config import load_settings
from shared.errors import ConfigurationError, ModelLoadError
from tests.unit.executor.model.architectures import ARCHITECTURES
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.loading.gguf_checks import converted
from tests.unit.executor.model.loading.quantized_weights import FORMS
from tests.unit.executor.model.loading.test_gguf_weights import make
from tests.unit.executor.model.loading.test_quantized_checkpoints import make_checkpoint
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, mixed_script
from tests.unit.executor.model.tiny import VARIANTS, make_model, reference_logits

SPEC = RankSpec(rank=0, world_size=1, group="g", instance="i", epoch=1, board="", settings={})


@pytest.fixture
def no_fast_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which PyTorch has no fast bf16."""
    monkeypatch.setattr(Cpu, "has_fast_bf16", lambda self: False)


@pytest.fixture(autouse=True)
def chosen_level() -> Iterator[None]:
    yield
    library.choose_level("")


def model_of(directory: Path, **changes: object) -> Path:
    """A tiny Llama whose weights are stored in bf16."""
    make_model(directory, "llama", **changes)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return directory


def request_for(settings: ExecutorSettings, directory: Path) -> ShareRequest:
    return ShareRequest(settings, SPEC, directory, CPU, SingleRank(), lambda done, total: None)


def share_of(directory: Path, **settings: object) -> Share:
    asked = load_settings(ExecutorSettings, **{"weight_cache_bytes": 0, "threads": 2, **settings})
    return load_share(request_for(asked, directory))


def runner_of(share: Share) -> ModelRunner:
    shape = StoreShape.uniform(
        len(share.facts.states), BLOCK_SIZE, share.layout.kv_heads.size, share.layout.head_dim, share.dtype
    )
    return share.runner(KvStore(shape, NUM_BLOCKS, CPU), SpillStore(0, 0, shape.bytes_per_spilled_block), None)


@natively
def test_without_fast_bf16_a_model_that_the_kernels_compute_is_bf16(no_fast_bf16: None, tmp_path: Path) -> None:
    share = share_of(model_of(tmp_path, head_dim=32), cpu_level=library.levels()[-1])
    assert share.dtype is torch.bfloat16
    assert share.reads_compressed
    with structlog.testing.capture_logs() as logged:
        assert runner_of(share).kernels == f"native {library.levels()[-1]}"
    assert [line["cpu_level"] for line in logged if "native" in line["event"]] == [library.levels()[-1]]


@natively
def test_kernels_are_suspected_where_those_of_another_level_compute_numbers(tmp_path: Path) -> None:
    if len(library.levels()) < 2:
        pytest.skip("this processor has one level")
    runner = runner_of(share_of(model_of(tmp_path, head_dim=32)))
    decoder, kernels = runner.native, library.load_library()

    def forward(handle: int, step: Any) -> int:
        result: int = kernels.rz_decoder_forward(handle, step)
        ctypes.memset(step._obj.logits, 0xFF, decoder.vocab_rows * 4)  # NaN
        return result

    decoder._library = SimpleNamespace(**{**vars(kernels), "rz_decoder_forward": forward})
    other = next(level for level in library.levels() if level != kernels.level)
    with pytest.raises(ModelLoadError) as refused:
        runner.warm_up()
    assert str(refused.value) == (
        f"The CPU kernels of the level {kernels.level!r} compute NaN or infinite values of the model's weights, and "
        f"those of {other!r} finite ones: the kernels are wrong on this CPU, not the weights; set "
        f"RYZANSTEIN_CPU_LEVEL={other}, and report it."
    )


def test_without_fast_bf16_a_model_that_pytorch_computes_is_fp32(no_fast_bf16: None, tmp_path: Path) -> None:
    """Heads of 16 do not fit the kernels, which shows when the model is there."""
    directory = model_of(tmp_path, head_dim=16)
    share = share_of(directory)
    assert share.dtype is torch.float32
    assert not share.reads_compressed
    runner = runner_of(share)
    script, steps = mixed_script()
    expected = reference_logits(directory, script.sequences)
    for plan, sampled in steps:
        logits = runner.forward(plan)
        assert isinstance(logits, Tensor)
        for row, (sequence, position) in zip(logits, sampled, strict=True):
            # The weights alone were rounded to bf16.
            assert (row - expected[sequence][position]).abs().max() < 0.1 * expected[sequence].std()


@natively
@pytest.mark.parametrize(
    ("model_type", "whole", "kernels"),
    [("llama", True, True), ("qwen3_moe", True, True), ("arcee", False, True), ("qwen3_moe", False, False)],
)
def test_quantized_checkpoints_are_packed_where_kernels_multiply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, whole: bool, kernels: bool
) -> None:
    """`whole`: they compute the model; else PyTorch does, with their products."""
    if not kernels:
        monkeypatch.setattr(native_runner, "load_library", lambda: None)
        monkeypatch.setattr(cpu_kernels, "load_library", lambda: None)
    experts = {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    checkpoint = make_checkpoint(tmp_path, model_type, FORMS["gptq"], **({} if model_type == "llama" else experts))
    config = checkpoint.quantized / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float16"}))
    with structlog.testing.capture_logs() as logged:
        share = share_of(checkpoint.quantized)
        runner = runner_of(share)
    assert runner.is_native is whole
    assert any(line["event"] == "weights_unpacked" for line in logged) is not kernels
    script, steps = mixed_script()
    expected = reference_logits(checkpoint.plain, script.sequences)
    for plan, sampled in steps:
        logits = runner.forward(plan)
        assert isinstance(logits, Tensor)
        for row, (sequence, position) in zip(logits, sampled, strict=True):
            # Activations are rounded to int8 or bf16, and what is not quantized to bf16.
            assert (row - expected[sequence][position]).abs().mean() < 0.1 * expected[sequence].std()


@natively
@pytest.mark.parametrize(
    ("said", "asked", "bits"), [({}, "auto", 4), ({"weight_dtype": "bf16"}, "auto", 12), ({}, "bf16", 12)]
)
def test_a_model_may_say_itself_that_its_codes_are_to_be_unpacked(
    tmp_path: Path, said: dict[str, str], asked: str, bits: int
) -> None:
    """And `weight_dtype` says it of any."""
    directory = converted(make(tmp_path, "llama", "Q4_1"))
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    packed = runner_of(share_of(directory, weight_dtype=asked)).packed
    form = packed.layers[0].down.form
    assert (form.bits if form else 12) == bits, "12 are bf16, which AMX takes as it is"


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_that_is_asked_for_is_computed_in_fp32_where_pytorch_does_not_multiply_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fast: bool
) -> None:
    monkeypatch.setattr(Cpu, "has_fast_bf16", lambda self: fast)
    share = share_of(model_of(tmp_path, head_dim=16), dtype="bf16")
    assert share.dtype is (torch.bfloat16 if fast else torch.float32)
    assert isinstance(runner_of(share).forward(mixed_script()[1][0][0]), Tensor)


@pytest.mark.parametrize(
    ("stored", "model_type", "device", "expected"),
    [
        ("float32", "llama", "cpu", torch.float32),
        (torch.bfloat16, "gpt2", "cpu", torch.float32),
        (torch.bfloat16, "gpt2", "cuda", torch.bfloat16),
        (torch.float32, "llama", "cuda", torch.float32),
    ],
)
def test_auto(no_fast_bf16: None, stored: object, model_type: str, device: str, expected: torch.dtype) -> None:
    config = SimpleNamespace(dtype=stored, model_type=model_type)
    assert choose_dtype(load_settings(ExecutorSettings), torch.device(device), config) is expected


@natively
def test_a_level_that_this_cpu_lacks_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"choose one of: {', '.join(library.levels())}"):
        share_of(tmp_path / "no model", cpu_level="sse9")


@pytest.mark.parametrize(
    ("model_type", "error"),
    [
        ("llama", r"holds 0 tokens, fewer than one sequence of 128 takes; set RYZANSTEIN_KV_MEMORY .* to \d+ bytes"),
        (
            "deepseek_v3",
            r"holds 0 tokens, fewer than one sequence of 128 takes; set RYZANSTEIN_KV_MEMORY .* to \d+ bytes",
        ),
        ("qwen3_5_text", r"hold that of 0 sequences where 2 are needed.* set RYZANSTEIN_KV_MEMORY .* to \d+ bytes"),
    ],
)
def test_state_that_does_not_fit_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, error: str
) -> None:
    make_model(tmp_path, model_type, **({} if model_type in VARIANTS else ARCHITECTURES[model_type]))
    monkeypatch.setattr(loader, "read_all", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigurationError, match=error):
        share_of(tmp_path, kv_memory=100)


@natively
def test_state_that_does_not_fit_is_refused_before_kept_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = model_of(tmp_path / "model", head_dim=32)
    kept = {"weight_cache_bytes": 1 << 30, "weight_cache_directory": tmp_path / "kept"}
    share = share_of(directory, **kept)
    assert not share.is_cached
    packed = runner_of(share).packed
    assert packed is not None
    asked = load_settings(ExecutorSettings, threads=2, **kept)
    cache = cache_of(request_for(asked, directory))
    cache.keep(share.facts, packed)
    assert share_of(directory, **kept).is_cached
    monkeypatch.setattr(PackedFile, "read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigurationError, match="holds 0 tokens"):
        share_of(directory, kv_memory=100, **kept)


@natively
def test_weights_beyond_their_memory_are_streamed_from_the_first_start_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "_HUGE_PAGE", 4096)  # as large weights are: packed in files without a name
    directory = model_of(tmp_path / "model", head_dim=32, num_hidden_layers=6)
    kept = {"weight_cache_bytes": 1 << 30, "weight_cache_directory": tmp_path / "kept"}
    with pytest.raises(ConfigurationError, match=r"WEIGHTS_MEMORY is 1 bytes, .* needs \d+ at least") as refused:
        share_of(directory, weights_memory=1, **kept)
    least = int(refused.value.message.split(" at least")[0].split()[-1])
    _, steps = mixed_script()
    for left in tmp_path.glob("kept/*.packed"):
        left.unlink()
    found = []
    for allowed in (least, least, 0, 1 << 30):
        share = share_of(directory, weights_memory=allowed, **kept)
        assert share.is_cached
        left = {path.suffix for path in (tmp_path / "kept").iterdir()}
        assert left == {".packed", ".model"}, "nothing else is left"
        assert (share.streamed is not None) is (allowed == least)
        if share.streamed is not None:
            assert share.streamed.memory <= least
            assert share.streamed.per_step > 0
            assert share.streamed.tokens_per_second > 0
        runner = runner_of(share)
        found.append([runner.forward(plan) for plan, _ in steps])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert isinstance(one, Tensor)
            assert isinstance(other, Tensor)
            assert torch.equal(one, other)


@natively
@pytest.mark.parametrize(
    ("changes", "settings", "error"),
    [
        ({"head_dim": 32}, {"weight_cache_bytes": 0}, "needs Linux, a CPU with native kernels"),
        ({"head_dim": 32}, {"weight_cache_bytes": 1}, "could not be kept there"),
        ({"head_dim": 16}, {}, "not this one \\(heads of 16 values do not fit"),
    ],
)
def test_weights_memory_is_refused_where_nothing_can_be_streamed(
    tmp_path: Path, changes: dict[str, object], settings: dict[str, object], error: str
) -> None:
    directory = model_of(tmp_path / "model", **changes)
    kept = {"weight_cache_bytes": 1 << 30, "weight_cache_directory": tmp_path / "kept", **settings}
    with pytest.raises(ConfigurationError, match=error):
        share_of(directory, weights_memory=1 << 20, **kept)


@natively
def test_where_weights_cannot_be_packed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(arena, "_HUGE_PAGE", 4096)
    directory = model_of(tmp_path / "model", head_dim=32)
    with pytest.raises(ConfigurationError, match=r"cannot be packed in .*kept \(No space left on device\)"):
        share_of(
            directory, weights_memory=1 << 20, weight_cache_bytes=1 << 30, weight_cache_directory=tmp_path / "kept"
        )
