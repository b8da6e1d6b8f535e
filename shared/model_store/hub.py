"""Models and adapters of the Hugging Face hub, or of a mirror."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, validate_repo_id

from shared.errors import ConfigurationError, ModelLoadError, RyzansteinError, reason_of
from shared.model_store.programs import Progress, ServableVerdict, verdict_on
from shared.model_store.repository import (
    CONFIG,
    MANIFEST,
    MAX_LISTED,
    Manifest,
    RemoteFile,
    checked,
    choose_adapter,
    choose_files,
    sizes_of,
)
from shared.model_store.settings import Store
from shared.model_store.transfer import HttpError, Transfer, persistently
from shared.models import choose_gguf

# Called with the bytes that are to come; raises `ConfigurationError` where there is no room for them.
MakeRoom = Callable[[int], None]
_TIMEOUT = 30.0
_AGENT = "ryzanstein"
_HUB = "https://huggingface.co"


def is_name(name: str) -> bool:
    """Whether `name` is of the form of the hub's names: ORGANISATION/NAME, or NAME alone."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


class Repository:
    """One state of a repository, and a directory that it is fetched into."""

    def __init__(
        self, name: str, revision: str, directory: Path, store: Store, progress: Progress, make_room: MakeRoom
    ) -> None:
        """Asks the hub what the state is. Raises as `fetch` does."""
        progress("downloading", 0, 0)
        self.name, self._revision, self._store = name, revision, store
        self.directory, self._progress, self._make_room = directory, progress, make_room
        self._endpoint = store.endpoint or str(constants.ENDPOINT)
        headers = build_hf_headers(library_name=_AGENT)
        self._transfer = Transfer(directory, "", headers, files_at_once=store.downloads)
        self.commit, self.files = self._survey()
        self._transfer.commit = self.commit

    def fetch(self, files: Sequence[RemoteFile]) -> None:
        """Fetches `files` after room was made for what of them is missing.

        Raises `ConfigurationError`, `ModelLoadError`, and `OSError` when the directory cannot take them.
        """
        for file in files:
            if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE and self._endpoint == _HUB:
                raise ModelLoadError(
                    f"{file.path} of {self.name} has {file.size} bytes, and the hub serves files over "
                    f"{constants.MAX_HTTP_DOWNLOAD_SIZE} bytes only through Xet; fetch it with `hf download` into a "
                    "directory, and name that."
                )
        self._make_room(self._transfer.missing(files))
        addresses = {
            hf_hub_url(self.name, file.path, revision=self.commit, endpoint=self._endpoint): file for file in files
        }
        try:
            self._transfer.fetch(addresses, lambda done, total: self._progress("downloading", done, total))
        except HttpError as error:
            raise self._explained(error) from None

    def record(self, files: Sequence[RemoteFile]) -> None:
        """Writes into the directory, which holds all of `files`, what it is."""
        manifest = Manifest(self.name, self._revision, self.commit, list(files))
        (self.directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))

    def _survey(self) -> tuple[str, list[RemoteFile]]:
        api = HfApi(endpoint=self._endpoint, library_name=_AGENT)
        try:
            info = persistently(
                lambda: api.model_info(
                    self.name, revision=self._revision or None, files_metadata=True, timeout=_TIMEOUT
                ),
                self._transfer.stop,
            )
        except RyzansteinError:
            raise
        except Exception as error:  # an answer that is no JSON, or none of a hub
            raise self._explained(error) from None
        listed = info.siblings or []
        if not info.sha or any(file.size is None for file in listed):
            raise ModelLoadError(
                f"{_without_secrets(self._endpoint)} does not tell commit and sizes of {self.name}, as the hub does; "
                "check HF_ENDPOINT or RYZANSTEIN_HUB_ENDPOINT."
            )
        if len(listed) > MAX_LISTED:
            raise ModelLoadError(
                f"The repository {self.name} lists {len(listed)} files; at most {MAX_LISTED} are looked at."
            )
        return info.sha, [
            RemoteFile(
                file.rfilename,
                file.lfs.size if file.lfs else file.size or 0,
                sha256=file.lfs.sha256 if file.lfs else "",
                git_sha1="" if file.lfs else file.blob_id or "",
            )
            for file in listed
        ]

    def _explained(self, error: Exception) -> RyzansteinError:
        """What to do about an error of the hub's client."""
        name, where = self.name, _without_secrets(self._endpoint)
        if isinstance(error, OfflineModeIsEnabled):
            return ModelLoadError(
                f"{self._not_here()}, and the hub is not asked since HF_HUB_OFFLINE is set; put its files there, or "
                "unset the variable."
            )
        if isinstance(error, GatedRepoError):
            token = "the one that is set has no access" if get_token() else "none is set"
            return ModelLoadError(
                f"The repository {name} is gated: accept its conditions at {where}/{name}, and set HF_TOKEN to a token "
                f"of that account ({token})."
            )
        if isinstance(error, RevisionNotFoundError):
            return ModelLoadError(
                f"The repository {name} has no revision {self._revision or 'main'!r}; name a branch, a tag or a commit "
                "of it."
            )
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        if isinstance(error, RepositoryNotFoundError) or status in (401, 403, 404):
            token = "the HF_TOKEN that is set has" if get_token() else "set HF_TOKEN to a token that has"
            return ConfigurationError(
                f"{self._not_here()} and could not be fetched: {where} knows no such repository, or does not show it; "
                f"check the name, and of a private one whether {token} access."
            )
        return ConfigurationError(
            f"{self._not_here()} and could not be fetched from {where} ({_without_secrets(reason_of(error))}); check "
            "the name and the connection, or name a directory or a GGUF file."
        )

    def _not_here(self) -> str:
        library = f" or the directory {self._store.library}" if self._store.library else ""
        return f"The model {self.name} is not in the cache {self._store.cache}{library}"


def fetch(repository: Repository) -> None:
    """Fetches it into its directory, which may hold a part of it already: its config.json first, and nothing else of a
    model that is not served.

    Raises `ConfigurationError`, `ModelLoadError`, and `OSError` when the directory cannot take it.
    """
    name = repository.name
    chosen = choose_files(repository.files, name)
    if CONFIG not in sizes_of(chosen):
        raise ModelLoadError(
            f"The repository {name} holds no config.json; it is not a model that can be served. Of GGUF files one is "
            f"chosen by its quantization, as {name}:Q4_K_M."
        )
    repository.fetch([file for file in chosen if file.path == CONFIG])
    if refused := verdict_on(repository.directory).refused:
        raise ModelLoadError(f"{refused} Of {name} only config.json was downloaded.")
    repository.fetch(chosen)
    repository.record(chosen)


def look_at(name: str, directory: Path, store: Store) -> ServableVerdict:
    """What the config.json of the repository `name`, fetched into `directory`, says of its model. Raises as `fetch`
    does."""
    repository = Repository(name, "", directory, store, lambda *step: None, lambda count: None)
    found = [file for file in repository.files if file.path == CONFIG]
    repository.fetch(checked(found, name))
    return verdict_on(directory) if found else ServableVerdict()


def fetch_gguf(repository: Repository, quantization: str) -> Path:
    """The (first) GGUF file of its model in `quantization`, with its other parts in the directory. Raises as `fetch`
    does."""
    listed = {file.path: file for file in repository.files}
    names = choose_gguf(sizes_of(repository.files), repository.name, quantization)
    chosen = checked([listed[path] for path in names], repository.name)
    repository.fetch(chosen)
    repository.record(chosen)
    return repository.directory / names[0]


def fetch_adapter(repository: Repository) -> None:
    """Fetches the two files of a LoRA adapter, as peft writes them. Raises as `fetch` does."""
    chosen = choose_adapter(repository.files, repository.name)
    repository.fetch(chosen)
    repository.record(chosen)


def _without_secrets(text: str) -> str:
    """Neither the token, nor the name and password of an address, nor the signature of one."""
    for secret in (get_token(), os.environ.get("HF_TOKEN")):
        text = text.replace(secret, "***") if secret else text
    return re.sub(r"\?[^\s'\")]*", "", re.sub(r"//[^/@\s]*@", "//", text))
