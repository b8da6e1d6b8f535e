"""Models of the Hugging Face hub."""

import contextlib
import glob
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from shared.errors import ConfigurationError, ModelLoadError, reason_of
from shared.model_store.downloads import Progress, Verdict, size_of, verdict_on
from shared.models import choose_gguf

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_WANTED_PYTORCH = [*_WANTED, "pytorch_model*.bin"]
"""Where a model has no safetensors."""
_LOOK_INTERVAL = 0.5


def is_name(name: str) -> bool:
    """Whether `name` is of the form of the hub's names: ORGANISATION/NAME, or NAME alone."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def fetch(name: str, directory: Path, progress: Progress) -> None:
    """Fetches the repository `name` into `directory`, which may hold a part of it already: its config.json first, and
    nothing else of a model that is not served.

    Raises `ConfigurationError`, `ModelLoadError`, and `OSError` when `directory` cannot take it.
    """
    progress("downloading", 0, 0)
    refused = look_at(name, directory, progress).refused
    if not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"The repository {name} holds no config.json; it is not a model that can be served. Of GGUF files one is "
            f"chosen by its quantization, as {name}:Q4_K_M."
        )
    if refused:
        raise ModelLoadError(f"{refused} Of {name} only config.json was downloaded.")
    _download(name, directory, *_survey(name), progress)
    shutil.rmtree(directory / ".cache", ignore_errors=True)


def look_at(name: str, directory: Path, progress: Progress) -> Verdict:
    """What the config.json of the repository `name`, fetched into `directory`, says of its model. Raises as `fetch`
    does."""
    _download(name, directory, ["config.json"], 0, progress)
    return verdict_on(directory) if (directory / "config.json").is_file() else Verdict()


def fetch_gguf(repository: str, quantization: str, directory: Path, progress: Progress) -> Path:
    """The (first) GGUF file of the repository's model in `quantization`, with its other parts in `directory`.

    Raises as `fetch` does.
    """
    progress("downloading", 0, 0)
    try:
        files = HfApi().model_info(repository, files_metadata=True).siblings or []
    except Exception as error:  # of whichever HTTP library the hub's client is made with
        raise _not_fetched(repository, error) from None
    sizes = {file.rfilename: file.size or 0 for file in files}
    chosen = choose_gguf(sizes, repository, quantization)
    patterns = [glob.escape(file) for file in chosen]
    _download(repository, directory, patterns, sum(sizes[file] for file in chosen), progress)
    return directory / chosen[0]


def _download(name: str, directory: Path, patterns: list[str], total: int, progress: Progress) -> None:
    try:
        with _watched(directory, lambda done: progress("downloading", min(done, total or done), total)):
            snapshot_download(name, local_dir=directory, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise  # this machine's fault: no room, no permission
        raise _not_fetched(name, error) from None


def _not_fetched(name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"The model {name} is not in the cache and could not be fetched from the hub ({reason_of(error)}); "
        "check the name and the connection, or name a directory or a GGUF file."
    )


def _survey(name: str) -> tuple[list[str], int]:
    """(patterns of the files to fetch, their bytes for the progress bar). When the hub does not say, the usual
    ones and 0: the download will tell why."""
    try:
        files = HfApi().model_info(name, files_metadata=True).siblings or []
    except Exception:  # of whichever HTTP library the hub's client is made with
        return _WANTED, 0
    plain = any(file.rfilename.endswith(".safetensors") for file in files)
    patterns = _WANTED if plain or not files else _WANTED_PYTORCH
    wanted = filter_repo_objects(files, allow_patterns=patterns, key=lambda file: file.rfilename)
    return patterns, sum(file.size or 0 for file in wanted)


@contextlib.contextmanager
def _watched(directory: Path, report: Callable[[int], None]) -> Iterator[None]:
    """Reports the bytes that lie in `directory`, now and again."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_INTERVAL):
            report(size_of(directory))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
