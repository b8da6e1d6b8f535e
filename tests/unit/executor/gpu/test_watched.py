"""What the shell asks of CUDA, with CUDA doubled, and of Triton, while it compiles."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.executor.core.progress import NUMBERS, DeviceProgress
from services.executor.ipc.board import RingBoard
from services.executor.platforms import cuda as watched
from services.executor.platforms.cuda import LONGEST, CudaMarks, excuse_compiling

CPU = torch.device("cpu")
UUID = "6a5c0ba4-7a5c-4c44-9a75-0d3b2e3b7a10"


@pytest.fixture(autouse=True)
def _doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory, **more: zeros(*sizes, **more))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))


def test_a_mark_writes_its_number() -> None:
    marks = CudaMarks(CPU)
    assert (marks.last, marks.capturing) == (0, False)
    for number in (1, NUMBERS - 1, 0):
        marks.put(number)
        assert marks.last == number


def test_a_rank_on_a_gpu_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    excused: list[Any] = []
    looked: list[DeviceProgress] = []
    monkeypatch.setattr(watched, "excuse_compiling", excused.append)
    monkeypatch.setattr(DeviceProgress, "start", lambda progress: looked.append(progress))
    board = RingBoard(tmp_path / "board", 1, create=True)
    rank = board.rank(0)
    watched.watch_device(rank, CPU)
    assert excused == [rank.recorder.excuse]
    rank.begin(1)
    rank.launched(1)
    assert [beat.in_flight for beat in board.beats()] == [True], "somebody must look first"
    looked[0].look()
    assert [beat.in_flight for beat in board.beats()] == [False]


def test_a_gpu_is_known_however_its_name_is_written() -> None:
    assert watched.uuid_of(UUID) == watched.uuid_of(f"GPU-{UUID}") == watched.uuid_of(f"MIG-{UUID}")


def test_a_rank_is_excused_while_a_kernel_is_compiled_and_not_after() -> None:
    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    excused: list[float] = []
    excuse_compiling(excused.append, runtime)
    assert not runtime.jit_cache_hook(key="k", fn=None), "else Triton would not compile it"
    assert excused == [LONGEST]
    runtime.jit_post_compile_hook(key="k", fn=None)
    assert excused == [LONGEST, 0.0]


def test_hooks_that_were_there_are_called_too() -> None:
    runtime = SimpleNamespace(
        jit_cache_hook=lambda **about: about["key"], jit_post_compile_hook=lambda **about: about["key"]
    )
    excuse_compiling(lambda seconds: None, runtime)
    assert runtime.jit_cache_hook(key="before") == "before"
    assert runtime.jit_post_compile_hook(key="after") == "after"
