"""Where models are kept, where they come from, and what they may take: settings of the command line and of hosts."""

from pathlib import Path
from typing import Self

import msgspec
from platformdirs import user_cache_path
from pydantic import Field

from shared.config import CommonSettings

DOWNLOADS = 4  # files that are fetched at a time, unless a setting says otherwise


class Store(msgspec.Struct, frozen=True):
    """The model cache of a machine, and what is looked into before the hub is asked."""

    # Models that were fetched or converted, each in a directory of its own; made where it is not there.
    cache: Path
    cache_bytes: int = 0  # most bytes of them; 0: as many as the disk holds
    # A directory of models, `ORG/NAME` or `ORG--NAME`, that is read and never written.
    library: Path | None = None
    # Address of the hub or of a mirror; empty: what HF_ENDPOINT says, or https://huggingface.co.
    endpoint: str = ""
    downloads: int = DOWNLOADS
    packed_directory: Path | None = None  # of packed weights, where they lie elsewhere than in `cache`

    @property
    def packed(self) -> Path:
        """The directory of packed weights."""
        return self.packed_directory or self.cache / ".packed"

    @classmethod
    def at(cls, cache: Path) -> Self:
        """All but the place by default."""
        return cls(cache.expanduser())


class ModelStoreSettings(CommonSettings):
    """Settings of whatever fetches models."""

    model_cache: Path = Field(default_factory=lambda: user_cache_path("ryzanstein") / "models")
    """Where models are kept that were fetched or converted."""
    model_cache_bytes: int = Field(default=0, ge=0)
    """Most bytes of `model_cache`. Where a download needs more, least recently used models are deleted first which
    nobody serves and no registry names; what finds no room is refused. 0: as many as the disk holds."""
    model_directory: Path | None = None
    """A directory of models that is looked into before the hub is asked, and never written: `ORG/NAME` or `ORG--NAME`,
    with `@REVISION` for a revision. For machines without a network."""
    hub_endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Address of a mirror of the Hugging Face hub; empty: what HF_ENDPOINT says, or https://huggingface.co."""
    downloads: int = Field(default=DOWNLOADS, ge=1, le=32)
    """Files of a model that are downloaded at a time."""
    weight_cache_directory: Path | None = None
    """Where `weight_cache_bytes` are kept; not set: `.packed` in `model_cache`. Set it where that is read-only."""

    @property
    def store(self) -> Store:
        """The same as the functions of the model store take it."""
        return Store(
            cache=self.model_cache.expanduser(),
            cache_bytes=self.model_cache_bytes,
            library=self.model_directory and self.model_directory.expanduser(),
            endpoint=self.hub_endpoint.rstrip("/"),
            downloads=self.downloads,
            packed_directory=self.weight_cache_directory and self.weight_cache_directory.expanduser(),
        )
