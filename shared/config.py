"""Settings: frozen, typed, read once from (in order of precedence) arguments, environment, file.

The environment variables are the field names with the prefix `RYZANSTEIN_`; the file is TOML with
the same names in lower case, and its path stands in `RYZANSTEIN_CONFIG`.
"""

import argparse
import os
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from shared.errors import ConfigurationError

ENV_PREFIX = "RYZANSTEIN_"


class CommonSettings(BaseSettings):
    """What every service needs to know."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="ignore", use_attribute_docstrings=True
    )

    nats_url: str = "nats://127.0.0.1:4222"
    """NATS server, or several with commas."""
    nats_user: str = ""
    nats_password: SecretStr = SecretStr("")
    nats_connect_timeout: float = Field(default=30.0, gt=0)
    """Seconds to wait for NATS at start before giving up."""
    instance: str = ""
    """Name of this instance; made up when empty. A container sets it to its pod's name."""
    host: str = "127.0.0.1"
    """Address to listen on: the gateway's API, and /health, /ready, /metrics of the others."""
    ops_port: int = Field(default=0, ge=0, le=65535)
    """Port of /health, /ready and /metrics (the gateway: its API port instead); 0: the system chooses."""
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    log_format: str = Field(default="auto", pattern="^(auto|json|console)$")
    """`auto`: console on a terminal, JSON elsewhere."""
    journal_max_age: float = Field(default=3600.0, gt=0)
    """Seconds that the journal keeps a token frame."""
    journal_max_bytes: int = Field(default=1 << 30, gt=0)
    session_ttl: float = Field(default=3600.0, gt=0)
    """Seconds that a session stays pinned to its group after its last request."""
    beat_interval: float = Field(default=1.0, gt=0)
    """Seconds between two heartbeats."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get(f"{ENV_PREFIX}CONFIG")
        if not path:
            return init_settings, env_settings
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, Path(path))


SettingsT = TypeVar("SettingsT", bound=CommonSettings)


def load_settings(kind: type[SettingsT], **overrides: Any) -> SettingsT:
    """Reads settings once; an override of None means "not given". Raises `ConfigurationError`."""
    given = {name: value for name, value in overrides.items() if value is not None}
    return _validated(lambda: kind(**given))


def parse_settings(kind: type[SettingsT], command: str, arguments: Sequence[str]) -> SettingsT:
    """Settings of a service started as `command`: each field is an option, `--help` lists them.

    Exits with 2 on an unknown option, as argparse does. Raises `ConfigurationError` on a wrong value.
    """
    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        kind,
        cli_prog_name=command,
        cli_parse_args=list(arguments),
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )
    return _validated(lambda: kind(_cli_settings_source=source))  # type: ignore[call-arg]


def _validated(build: Callable[[], SettingsT]) -> SettingsT:
    """Turns the errors of a settings class into one sentence."""
    path = os.environ.get(f"{ENV_PREFIX}CONFIG")
    if path and not Path(path).is_file():
        raise ConfigurationError(
            f"RYZANSTEIN_CONFIG names the file {path}, which does not exist; create it or unset the variable."
        )
    try:
        return build()
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        raise ConfigurationError(
            f"The setting {ENV_PREFIX}{name.upper()} (or --{name.replace('_', '-')}) is wrong: "
            f"{first['msg']}; it was {first['input']!r}.",
            param=name,
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"The settings file {path} is not TOML: {error}.") from None
