"""What of a hub's repository is fetched, and what is refused before a byte of it is. Pure.

What a repository lists is whatever its owner has put there: names, sizes and digests are checked and bounded here, and
held against what comes (`transfer.py`).
"""

import fnmatch
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from shared.errors import ModelLoadError
from shared.models import HUB, hub_name, pulled_name

MAX_LISTED = 10_000  # files that a repository may list
MAX_FETCHED = 2_000  # files that are fetched of it
MAX_CONFIG_BYTES = 16 << 20  # of a config.json or adapter_config.json
# Of any other file that holds no weights: tokenizers, chat templates, lists of tensors.
MAX_OTHER_BYTES = 512 << 20
MAX_ADAPTER_BYTES = 16 << 30  # of an adapter's weights
_MAX_NAME = 255
_MAX_PATH = 1024
_MAX_DEPTH = 8

MANIFEST = ".download.json"  # in a model's directory: what of the hub lies there
PARTS = ".parts"  # in a directory that is being fetched into: what has come so far
CONFIG = "config.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = (".safetensors", ".bin", ".gguf")


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of a repository, as the hub lists it."""

    path: str  # within the repository, with `/`
    size: int  # bytes
    sha256: str = ""  # hexadecimal, of files in large file storage
    # Hexadecimal, of the others: Git's object id. A mirror that tells neither has its sizes checked alone.
    git_sha1: str = ""

    def hasher(self) -> "hashlib._Hash | None":
        """To be fed the content; None where nothing says what should come out."""
        if self.sha256:
            return hashlib.sha256()
        if self.git_sha1:
            return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        return None

    @property
    def digest(self) -> str:
        return self.sha256 or self.git_sha1


class Manifest(msgspec.Struct, frozen=True):
    """Which state of a repository lies in a directory."""

    repository: str
    revision: str  # as it was asked for; empty: the main branch
    commit: str  # what that meant when it was fetched
    files: list[RemoteFile] = []


def directory_name(name: str, revision: str = "") -> str:
    """Of a hub name's directory in the cache: `ORG--NAME`, `ORG--NAME:Q4_K_M`, either with `@REVISION`."""
    return pulled_name(name) + ("@" + revision.replace("/", "--") if revision else "")


def library_names(name: str, revision: str = "") -> list[str]:
    """Where a directory of models (`Store.library`) may hold the repository of this hub name."""
    repository, _ = hub_name(name)
    ending = "@" + revision.replace("/", "--") if revision else ""
    return [repository + ending, repository.replace("/", "--") + ending]


def served_name(name: str) -> str:
    return name.removeprefix(HUB)


def check_revision(revision: str) -> None:
    """Raises `ModelLoadError` where it could name no branch, tag or commit."""
    parts = revision.split("/")
    plain = all(part and not part.startswith(".") and part.isprintable() for part in parts)
    if revision and (not plain or len(revision) > _MAX_NAME or any(sign in revision for sign in " \\:~^?*[@")):
        raise ModelLoadError(
            f"The revision {revision[:80]!r} is not a branch, tag or commit; use one that the hub shows."
        )


def choose_files(files: Sequence[RemoteFile], repository: str) -> list[RemoteFile]:
    """What a model of the repository is served from: weights of one kind and at the top alone, and small files of at
    most one folder's depth. Raises `ModelLoadError`."""
    tops = {file.path for file in files if "/" not in file.path}
    weights = _weights(tops)
    chosen = [file for file in files if file.path in weights or _is_text(file.path)]
    return checked(chosen, repository)


def choose_adapter(files: Sequence[RemoteFile], repository: str) -> list[RemoteFile]:
    """The two files of a LoRA adapter as peft writes it. Raises `ModelLoadError`."""
    held = {file.path: file for file in files}
    lacking = [name for name in ADAPTER_FILES if name not in held]
    if lacking:
        raise ModelLoadError(
            f"The repository {repository} holds no {' and no '.join(lacking)}; it is not a LoRA adapter as peft saves "
            "it."
        )
    return checked([held[name] for name in ADAPTER_FILES], repository)


def _is_text(path: str) -> bool:
    named = PurePosixPath(path)
    hidden = any(part.startswith(".") and part not in (".", "..") for part in named.parts)
    shallow = len(named.parts) <= 2 or ".." in named.parts  # which is refused, and not passed over
    return shallow and not hidden and any(fnmatch.fnmatchcase(named.name, form) for form in _TEXTS)


def _weights(tops: Collection[str]) -> set[str]:
    """Of the files at the top: those that the executor reads; a second copy of them is not fetched."""
    for single, ending in (("model.safetensors", ".safetensors"), ("pytorch_model.bin", ".bin")):
        if single in tops and f"{single}.index.json" not in tops:
            return {single}
        found = {path for path in tops if path.endswith(ending) and not path.startswith("consolidated")}
        if ending == ".bin":
            found = {path for path in found if path.startswith("pytorch_model")}
        if found:
            return found
    return set()


def checked(files: Sequence[RemoteFile], repository: str) -> list[RemoteFile]:
    """`files`, each with a name that stays within a directory and a size within its bound. Raises `ModelLoadError`."""
    if len(files) > MAX_FETCHED:
        raise ModelLoadError(
            f"The model of the repository {repository} is made of {len(files)} files; at most {MAX_FETCHED} are taken."
        )
    folders = {str(parent) for file in files for parent in PurePosixPath(file.path).parents}
    for file in files:
        if not _is_plain(file.path) or file.path in folders:
            raise ModelLoadError(
                f"The repository {repository} lists a file {file.path[:120]!r}, which is no name within a directory; "
                "nothing of it was fetched."
            )
        if not 0 <= file.size <= (most := _bound(file.path)):
            raise ModelLoadError(
                f"The repository {repository} lists {file.path} with {file.size} bytes, of which at most {most} are "
                "taken; nothing of it was fetched."
            )
    if len({file.path.casefold() for file in files}) < len(files):
        raise ModelLoadError(f"The repository {repository} lists two files of one name; nothing of it was fetched.")
    return list(files)


def _is_plain(path: str) -> bool:
    parts = path.split("/")
    named = all(0 < len(part.encode()) <= _MAX_NAME and not part.startswith(".") for part in parts)
    return named and len(parts) <= _MAX_DEPTH and len(path) <= _MAX_PATH and "\\" not in path and path.isprintable()


def _bound(path: str) -> int:
    name = PurePosixPath(path).name
    if name in (CONFIG, ADAPTER_FILES[0]):
        return MAX_CONFIG_BYTES
    if name == ADAPTER_FILES[1]:
        return MAX_ADAPTER_BYTES
    return 1 << 62 if name.endswith(_WEIGHTS) else MAX_OTHER_BYTES


def sizes_of(files: Iterable[RemoteFile]) -> Mapping[str, int]:
    return {file.path: file.size for file in files}
