"""Where the command line keeps things on this machine."""

from pathlib import Path

from platformdirs import user_cache_path, user_data_path
from pydantic import Field

from shared.config import CommonSettings


class LocalSettings(CommonSettings):
    """Settings of the command line; options of the commands take precedence."""

    data_dir: Path = Field(default_factory=lambda: user_data_path("ryzanstein"))
    """The local stack's NATS store, logs and run file."""
    model_cache: Path = Field(default_factory=lambda: user_cache_path("ryzanstein") / "models")
    """Models that were pulled or converted."""
