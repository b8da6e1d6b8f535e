"""Settings: frozen, typed, read once from (in order of precedence) arguments, environment, secrets, file.

The environment variables are the field names with the prefix `RYZANSTEIN_`; the file is TOML with
the same names in lower case, and its path stands in `RYZANSTEIN_CONFIG`. Secrets are files whose names are those of
the variables, in either case, and whose text is the value; their directory stands in `RYZANSTEIN_SECRETS_DIR`.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    CliSuppress,
    PydanticBaseSettingsSource,
    SecretsSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from shared.errors import ConfigurationError

ENV_PREFIX = "RYZANSTEIN_"


class CommonSettings(BaseSettings):
    """What every service needs to know."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore", use_attribute_docstrings=True)

    nats_url: str = "nats://127.0.0.1:4222"
    """Address of the NATS server, or several separated by commas."""
    nats_user: str = ""
    """User name at NATS."""
    nats_password: CliSuppress[SecretStr] = SecretStr("")
    """Password of that user."""
    nats_ca: str = ""
    """PEM file of the certificate authorities that must have signed NATS' certificate. Where it is set, TLS is
    mandatory."""
    nats_certificate: str = ""
    """PEM file of this service's client certificate, where NATS asks for one (mutual TLS); with `nats_key`."""
    nats_key: str = ""
    """PEM file of that certificate's private key."""
    nats_connect_timeout: float = Field(default=30.0, gt=0)
    """Seconds to wait for NATS at start before giving up."""
    nats_replicas: int = Field(default=0, ge=0, le=5)
    """JetStream replicas of each stream and bucket; 0: three where NATS is a cluster of three servers or more, else
    one."""
    instance: str = ""
    """Name of this instance; generated when empty. In a container it should be the pod's name."""
    host: str = "127.0.0.1"
    """Address to listen on: the gateway's API, and /health, /ready, /metrics of the others."""
    ops_port: int = Field(default=0, ge=0, le=65535)
    """Port of /health, /ready and /metrics (the gateway: its API port instead, and this one as well where it
    shares that one); 0: the system chooses. `ryzanstein up` gives each service a free one, the same at each start."""
    metrics_aliases: bool = True
    """Whether /metrics has figures under vLLM's names too (`vllm:num_requests_running`), for autoscalers and
    dashboards that ask for these."""
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    """Least severe level that is logged."""
    log_format: str = Field(default="auto", pattern="^(auto|json|console)$")
    """Format of log lines; `auto`: console on a terminal, JSON elsewhere."""
    journal_max_age: float = Field(default=3600.0, gt=0)
    """Seconds for which the journal keeps a token frame: as long as a stream can be resumed."""
    journal_max_bytes: int = Field(default=1 << 30, gt=0)
    """Largest size of the journal, in bytes; beyond it the oldest frames are deleted."""
    adapters_max_bytes: int = Field(default=8 << 30, ge=0)
    """Bytes of the files of all LoRA adapters together; 0: as many as NATS has. Read when the object store is
    created."""
    training_max_bytes: int = Field(default=4 << 30, ge=0)
    """Bytes of what all fine-tuning jobs train with (examples, states) together; 0: as many as NATS has. Read when the
    object store is created."""
    session_ttl: float = Field(default=3600.0, gt=0)
    """Seconds for which a session stays pinned to its group after its last request."""
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
        sources = [init_settings, env_settings]
        if secrets := os.environ.get(f"{ENV_PREFIX}SECRETS_DIR"):
            sources.append(SecretsSettingsSource(settings_cls, secrets))
        if path := os.environ.get(f"{ENV_PREFIX}CONFIG"):
            sources.append(TomlConfigSettingsSource(settings_cls, Path(path)))
        return tuple(sources)


SettingsT = TypeVar("SettingsT", bound=CommonSettings)


def load_settings(kind: type[SettingsT], **overrides: Any) -> SettingsT:
    """Reads settings once; an override of None means "not given". Raises `ConfigurationError`."""
    given = {name: value for name, value in overrides.items() if value is not None}
    return _validated(kind, lambda: kind(**given))


def with_sections(kind: type[SettingsT], sections: Iterable[type[CommonSettings]]) -> type[SettingsT]:
    """`kind` with the settings that features bring; `section_of` gives each its own."""
    about = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return cast("type[SettingsT]", type(kind.__name__, (kind, *sections), about))


def section_of(settings: CommonSettings, section: type[SettingsT]) -> SettingsT:
    """The part of a service's settings that a feature has brought; where these were made without it, as the environment
    has it. Raises `ConfigurationError`."""
    return settings if isinstance(settings, section) else load_settings(section)


def parse_settings(kind: type[SettingsT], command: str, arguments: Sequence[str]) -> SettingsT:
    """Settings of a service started as `command`: each field is an option, `--help` lists them.

    Secrets are not options: everybody on the machine can read a command line. Exits with 2 on an unknown
    option, as argparse does. Raises `ConfigurationError` on a wrong value.
    """
    _refuse_secrets(kind, arguments)
    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        kind,
        cli_prog_name=command,
        cli_parse_args=list(arguments),
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )
    return _validated(kind, lambda: kind(_cli_settings_source=source))  # type: ignore[call-arg]


def _refuse_secrets(kind: type[CommonSettings], arguments: Sequence[str]) -> None:
    for name in kind.model_fields:
        option = f"--{name.replace('_', '-')}"
        if _is_secret(kind, name) and any(given.partition("=")[0] == option for given in arguments):
            raise ConfigurationError(
                f"{option} is not an option, because any user of the machine can read a command line; set "
                f"{ENV_PREFIX}{name.upper()}, or {name} in the settings file."
            )


def _validated(kind: type[SettingsT], build: Callable[[], SettingsT]) -> SettingsT:
    """Turns the errors of a settings class into one sentence, which never holds a secret."""
    path = os.environ.get(f"{ENV_PREFIX}CONFIG")
    _check_secrets(kind)
    try:
        if path and not Path(path).is_file():
            raise ConfigurationError(
                f"{ENV_PREFIX}CONFIG names the file {path}, which does not exist; create it or unset the variable."
            )
        return build()
    except ValidationError as error:
        raise _wrong_value(kind, error) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"The settings file {path} is not TOML: {error}.") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"The settings file {path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8."
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"The settings file {path} cannot be read ({error.strerror}); make it readable, "
            f"or unset {ENV_PREFIX}CONFIG."
        ) from None


def _check_secrets(kind: type[CommonSettings]) -> None:
    """Each secret of `kind` that lies in the directory must be a file of text: one that cannot be read is no
    secret that was not given."""
    directory = os.environ.get(f"{ENV_PREFIX}SECRETS_DIR")
    if not directory:
        return
    names = {f"{ENV_PREFIX}{name}".lower() for name in kind.model_fields}
    try:
        for file in Path(directory).iterdir():
            if file.name.lower() in names:
                file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigurationError(f"The secret {file} is not UTF-8; save it as UTF-8.") from None
    except OSError as error:
        raise ConfigurationError(
            f"The secrets in {directory} cannot be read ({error.strerror}: {error.filename}); make the directory "
            f"and its files readable, or unset {ENV_PREFIX}SECRETS_DIR."
        ) from None


def _wrong_value(kind: type[CommonSettings], error: ValidationError) -> ConfigurationError:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if name not in kind.model_fields:
        return ConfigurationError(f"Invalid settings: {first['msg']}.")
    option = "" if _is_secret(kind, name) else f" (or --{name.replace('_', '-')})"
    # An address may hold a user's password.
    given = "" if not option or name == "nats_url" else f"; it was {first['input']!r}"
    return ConfigurationError(
        f"The setting {ENV_PREFIX}{name.upper()}{option} is wrong: {first['msg']}{given}.", param=name
    )


def _is_secret(kind: type[CommonSettings], name: str) -> bool:
    return kind.model_fields[name].annotation is SecretStr


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_PART = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)([smhdw])")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")


def seconds_of(text: str) -> float | None:
    """The seconds of `text`; None where it is no duration, or 0."""
    text = text.strip().lower()
    if not _WHOLE.fullmatch(text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)) or None
