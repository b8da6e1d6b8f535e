"""Parts of the local stack that need no process."""

import os
from pathlib import Path

import pytest

from services.cli.run_file import RunFile, lock, read_run_file, remove_run_file, write_run_file
from services.cli.stack import existing_nats
from shared.config import CommonSettings
from shared.errors import ConfigurationError


def note(pid: int) -> RunFile:
    return RunFile(pid, "http://127.0.0.1:8000", "nats://127.0.0.1:4222", "user", "secret")


def test_the_note_of_a_running_stack_is_found_and_private(tmp_path: Path) -> None:
    assert read_run_file(tmp_path) is None
    write_run_file(tmp_path, note(os.getpid()))
    assert read_run_file(tmp_path) == note(os.getpid())
    assert [path.stat().st_mode & 0o077 for path in tmp_path.iterdir()] == [0]
    remove_run_file(tmp_path)
    assert read_run_file(tmp_path) is None


def test_the_note_of_a_dead_stack_counts_not(tmp_path: Path) -> None:
    write_run_file(tmp_path, note(2**22 + 1))
    assert read_run_file(tmp_path) is None


def test_one_stack_per_data_directory(tmp_path: Path) -> None:
    with lock(tmp_path / "new"), pytest.raises(ConfigurationError, match="Another stack already runs"):
        lock(tmp_path / "new")
    lock(tmp_path / "new").close()


def test_a_data_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be used .*--data-dir"):
        lock(tmp_path / "file")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://host:4222", ("nats://host:4222", "", "")),
        ("nats://me:pa:ss@host:4222", ("nats://host:4222", "me", "pa:ss")),
        ("tls://host", ("tls://host", "", "")),
    ],
)
def test_credentials_may_stand_in_the_nats_address(url: str, expected: tuple[str, str, str]) -> None:
    settings = existing_nats(CommonSettings(), url)
    assert (settings.nats_url, settings.nats_user, settings.nats_password.get_secret_value()) == expected


def test_what_is_no_address_is_said() -> None:
    with pytest.raises(ConfigurationError, match="is no NATS address"):
        existing_nats(CommonSettings(), "host:4222")
