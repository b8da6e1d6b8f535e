"""The note that a stack leaves once its NATS runs, and anew when it is up, so that `status` and `chat` find it.

It holds the password of the stack's NATS server and is readable by its owner alone.
"""

import fcntl
import os
from pathlib import Path
from typing import IO

import msgspec

from shared.errors import ConfigurationError


class Started(msgspec.Struct, frozen=True):
    """A process of a service."""

    service: str
    instance: str
    pid: int


class RunFile(msgspec.Struct, frozen=True):
    """A local stack that is up, or starts."""

    pid: int
    gateway_url: str
    """Empty while it starts."""
    nats_url: str
    nats_user: str
    nats_password: str
    certificate: str = ""
    """File of the gateway's certificate, where it has one: what clients on this machine trust."""
    model: str = ""
    """What it serves, and where that lies."""
    directory: str = ""
    started: list[Started] = []
    """Its services as they were first started."""


def write_run_file(data_dir: Path, content: RunFile) -> None:
    path = _path(data_dir)
    fresh = path.with_name(f"{path.name}.new")  # whoever reads finds the old note or the new one, whole
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(content))
    fresh.replace(path)


def read_run_file(data_dir: Path, *, starting: bool = False) -> RunFile | None:
    """The stack that is up on `data_dir`, or with `starting` also one that starts; None when there is none (a note
    left by a dead one counts not)."""
    try:
        content = msgspec.json.decode(_path(data_dir).read_bytes(), type=RunFile)
        os.kill(content.pid, 0)
    except (OSError, msgspec.DecodeError):
        return None
    return content if content.gateway_url or starting else None


def remove_run_file(data_dir: Path) -> None:
    _path(data_dir).unlink(missing_ok=True)


def lock(data_dir: Path) -> IO[bytes]:
    """Takes the data directory for this process; close the file to give it back.

    Raises `ConfigurationError` when another stack has it, or it cannot be written.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (data_dir / "lock").open("ab")
    except OSError as error:
        raise ConfigurationError(
            f"The data directory {data_dir} cannot be used ({error.strerror}); choose another with --data-dir."
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigurationError(
            f"Another stack already runs on the data directory {data_dir}; stop it, or choose another "
            "directory with --data-dir."
        ) from None
    return file


def is_locked(data_dir: Path) -> bool:
    """Whether a stack has the directory: one that starts has it before it writes its run file."""
    try:
        with (data_dir / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _path(data_dir: Path) -> Path:
    return data_dir / "stack.json"
