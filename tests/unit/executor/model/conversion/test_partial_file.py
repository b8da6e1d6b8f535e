"""A file that is written tensor by tensor, and by more than one process where the first dies."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.executor.model.conversion import partial_file
from services.executor.model.conversion.partial_file import (
    Piece,
    WrittenTensor,
    check_room,
    digest_of,
    partial_directory,
    write_tensors,
)
from shared.errors import ConfigurationError

SIZES = (40, 7, 64, 33)
HEADER = b"header: 32 bytes with its filling"[:32]


def ignore(stage: str, done: int, total: int) -> None:
    return


def tensors(made: list[int]) -> list[WrittenTensor]:
    def one(number: int) -> WrittenTensor:
        def pieces() -> Iterator[Piece]:
            made.append(number)
            yield np.full(SIZES[number] - 3, number, np.uint8)
            yield np.full(3, 100 + number, np.uint8)

        return WrittenTensor(f"t{number}", SIZES[number], pieces)

    return [one(number) for number in range(len(SIZES))]


def whole() -> bytes:
    parts = [bytes([n] * (size - 3) + [100 + n] * 3) for n, size in enumerate(SIZES)]
    return HEADER + b"".join(part + bytes(-len(part) % 32) for part in parts)


@pytest.mark.parametrize("kept", range(0, 32 + 64 + 32 + 64 + 64 + 1, 5))
def test_whole_tensors_of_an_earlier_run_are_kept(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(whole()[:kept])
    made: list[int] = []
    write_tensors(path, HEADER, tensors(made), 32, ignore)
    assert path.read_bytes() == whole()
    ends = (96, 128, 192, 256)
    assert made == [number for number, end in enumerate(ends) if kept < end]


KILLED = """
import os, signal, sys
from pathlib import Path
from services.executor.model.conversion.partial_file import WrittenTensor, write_tensors
from tests.unit.executor.model.conversion.test_partial_file import HEADER, ignore, tensors

def killed():
    os.kill(os.getpid(), signal.SIGKILL)
    yield

some = tensors([])
some[2] = WrittenTensor("t2", some[2].nbytes, killed)
write_tensors(Path(sys.argv[1]), HEADER, some, 32, ignore)
"""


def test_a_killed_writer_is_gone_on_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)])
    assert ended.returncode == -signal.SIGKILL
    made: list[int] = []
    write_tensors(path, HEADER, tensors(made), 32, ignore)
    assert made == [2, 3]
    assert path.read_bytes() == whole()


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    with (
        partial_directory(tmp_path / "model.gguf", "0"),
        pytest.raises(ConfigurationError, match=r"is making .*model\.gguf already"),
        partial_directory(tmp_path / "model.gguf", "1"),
    ):
        raise AssertionError


def test_what_another_finished_meanwhile_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigurationError, match="exists"), partial_directory(tmp_path / "model.gguf", "0"):
        raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_what_another_conversion_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".model.gguf.partial" / "1"
    left.mkdir(parents=True)
    with partial_directory(tmp_path / "model.gguf", "0") as partial:
        assert list(partial.parent.iterdir()) == [partial]


def test_what_failed_is_kept_and_what_was_finished_is_cleared(tmp_path: Path) -> None:
    def fail() -> None:
        with partial_directory(tmp_path / "model", "0") as partial:
            (partial / "model").write_text("some")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    with partial_directory(tmp_path / "model", "0") as partial:
        assert (partial / "model").read_text() == "some"
    assert not list(tmp_path.iterdir())


def test_another_source_is_another_digest(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = digest_of(tmp_path, HEADER, "bf16")
    assert before == digest_of(tmp_path, HEADER, "bf16")
    (tmp_path / "a").write_text("22")
    assert len({before, digest_of(tmp_path, HEADER, "bf16"), digest_of(tmp_path, HEADER, "f16")}) == 3


def test_no_room_is_said_with_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_file.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    check_room(tmp_path, 3000, kept=2000)
    with pytest.raises(ConfigurationError, match=r"needs 1,001 bytes in .*, which has 1,000 free"):
        check_room(tmp_path, 3001, kept=2000)
