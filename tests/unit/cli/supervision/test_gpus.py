"""GPUs: found, chosen and shared out, on machines that have none."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.supervision import up
from services.cli.supervision.up import among, assign_gpus, find_gpus, parse_listing
from shared.errors import ConfigurationError

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000000)
GPU 1: NVIDIA H200 (UUID: GPU-22222222-aaaa-bbbb-cccc-000000000000)
"""
DIVIDED = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111)
  MIG 3g.71gb     Device  0: (UUID: MIG-aaaa)
  MIG 3g.71gb     Device  1: (UUID: MIG-bbbb)
GPU 1: NVIDIA H200 (UUID: GPU-22222222)
"""


def test_what_nvidia_smi_lists() -> None:
    assert parse_listing(LISTING) == ["0", "1"]
    assert parse_listing(DIVIDED) == ["MIG-aaaa", "MIG-bbbb", "1"]
    assert parse_listing("No devices found.") == []


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("1, 0", ["1", "0"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("0,7,1", ["0"]),
        ("GPU-2222", ["GPU-2222"]),
    ],
)
def test_a_choice_that_was_made_is_kept(visible: str | None, chosen: list[str]) -> None:
    assert among(["0", "1"], visible) == chosen


def test_a_choice_without_gpus_is_none() -> None:
    assert among([], "0,1") == []


@given(tp=st.integers(1, 8), replicas=st.integers(1, 8), spare=st.integers(0, 3))
def test_no_gpu_is_given_twice(tp: int, replicas: int, spare: int) -> None:
    present = [str(number) for number in range(tp * replicas + spare)]
    shares = [share.split(",") for share in assign_gpus(present, tp=tp, replicas=replicas)]
    assert [len(share) for share in shares] == [tp] * replicas
    assert [gpu for share in shares for gpu in share] == present[: tp * replicas]


def test_too_few_are_said() -> None:
    with pytest.raises(ConfigurationError, match=r"^2 groups of 2 ranks need 4 GPUs, and 3 can be used here"):
        assign_gpus(["0", "1", "2"], tp=2, replicas=2)
    assert assign_gpus([], tp=2, replicas=2) == []


def make_program(directory: Path, script: str) -> None:
    (directory / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "nvidia-smi").chmod(0o755)


async def test_the_machine_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(up, "_DRIVER", tmp_path / "driver")
    assert await find_gpus(None) == []
    (tmp_path / "driver" / "0000:01:00.0").mkdir(parents=True)
    assert await find_gpus(None) == ["0"]
    make_program(tmp_path, f"printf '{LISTING}'")
    assert await find_gpus(None) == ["0", "1"]
    assert await find_gpus("1") == ["1"]
    make_program(tmp_path, f"printf '{LISTING}'; exit 9")
    assert await find_gpus(None) == [], "a driver that does not work is of no use to CUDA either"


async def test_a_driver_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_program(tmp_path, "while :; do :; done")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(up, "_TIMEOUT", 0.05)
    assert await find_gpus(None) == []
