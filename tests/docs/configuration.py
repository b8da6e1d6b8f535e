"""The tables of docs/configuration.md: every setting of every service, read from their settings classes. Pure."""

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annotated_types
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from services.cli.target import LocalSettings, StackSettings
from services.executor.supervisor.service import ExecutorService
from services.gateway.service import GatewayService
from services.health_monitor.service import HealthMonitorSettings
from services.scheduler.settings import SchedulerSettings
from shared.config import ENV_PREFIX, CommonSettings

# Title, introduction, class, and the class whose settings stand in a section of their own.
_SECTIONS: tuple[tuple[str, str, type[CommonSettings], type[CommonSettings] | None], ...] = (
    ("Every service", "", CommonSettings, None),
    ("Gateway", "`ryzanstein serve gateway`", GatewayService.settings_type(), CommonSettings),
    ("Scheduler", "`ryzanstein serve scheduler`", SchedulerSettings, CommonSettings),
    ("Health monitor", "`ryzanstein serve health-monitor`", HealthMonitorSettings, CommonSettings),
    ("Executor", "`ryzanstein serve executor`", ExecutorService.settings_type(), CommonSettings),
    ("Command line", "What the commands of `ryzanstein` read.", LocalSettings, CommonSettings),
    (
        "Local stack",
        "What `ryzanstein up` reads itself, of settings that it passes on to the services.",
        StackSettings,
        LocalSettings,
    ),
)

# Variables that are read beside the settings classes.
OTHERS = {
    "RYZANSTEIN_CONFIG": "Path of the settings file (TOML).",
    "RYZANSTEIN_SECRETS_DIR": "Directory of secret files.",
    "RYZANSTEIN_CA": "Command line: PEM file of the authorities by which the gateway's certificate is checked.",
    "RYZANSTEIN_NATIVE_KERNELS": "Executor: `0` computes with PyTorch instead of the native CPU kernels.",
    "RYZANSTEIN_NATS_PASSWORD_<USER>": "nats-server under `ryzanstein nats-config`: the password of each of its users, "
    "such as `RYZANSTEIN_NATS_PASSWORD_GATEWAY`.",
    "RYZANSTEIN_PROMETHEUS_URL": "`ryzanstein sla`: address of Prometheus.",
    "RYZANSTEIN_PROMETHEUS_TOKEN_FILE": "`ryzanstein sla`: file with a bearer token for it.",
    "RYZANSTEIN_PROMETHEUS_BASIC_AUTH_FILE": "`ryzanstein sla`: file with user and password for it.",
    "RYZANSTEIN_PROMETHEUS_CA": "`ryzanstein sla`: PEM file of the authorities by which its certificate is checked.",
}


def tables() -> str:
    """A section for each service."""
    parts = []
    for title, introduction, kind, base in _SECTIONS:
        rows = [_row(name, field) for name, field in _own_fields(kind, base)]
        table = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |", *rows]
        parts.append("\n".join([f"## {title}", "", *([introduction, ""] if introduction else []), *table, ""]))
    others = [f"| `{name}` | {meaning} |" for name, meaning in OTHERS.items()]
    parts.append("\n".join(["## Other variables", "", "| variable | meaning |", "| --- | --- |", *others, ""]))
    return "\n".join(parts)


def variables() -> Iterator[tuple[str, str, str, str]]:
    """Each setting: whose it is, its variable, its type with bounds, its default."""
    for title, _, kind, base in _SECTIONS:
        for name, field in _own_fields(kind, base):
            yield title, f"{ENV_PREFIX}{name.upper()}", _bounded(field), _default(field)


def _own_fields(kind: type[CommonSettings], base: type[CommonSettings] | None) -> list[tuple[str, FieldInfo]]:
    inherited = base.model_fields if base else {}
    return [(name, field) for name, field in kind.model_fields.items() if name not in inherited]


def names() -> set[str]:
    """Of all variables in the tables."""
    fields = (name for _, _, kind, _ in _SECTIONS for name in kind.model_fields)
    return {f"{ENV_PREFIX}{name.upper()}" for name in fields} | set(OTHERS)


def undescribed() -> list[str]:
    """Settings without a description."""
    return [
        f"{kind.__name__}.{name}"
        for _, _, kind, _ in _SECTIONS
        for name, field in kind.model_fields.items()
        if not field.description
    ]


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    cells = (f"`{ENV_PREFIX}{name.upper()}`", _bounded(field), _default(field), meaning)
    return f"| {' | '.join(cells)} |"


def _type(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" if value else "empty" for value in typing.get_args(annotation))
    if origin in (types.UnionType, typing.Union):
        return " or ".join("unset" if one is type(None) else _type(one) for one in typing.get_args(annotation))
    known = {bool: "boolean", int: "integer", float: "number", str: "text", Path: "path", SecretStr: "secret"}
    return known[annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Path):
        home = str(Path.home())
        value = str(value).replace(home, "~", 1) if str(value).startswith(home) else value
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value is None:
        return "unset"
    if value == "":
        return "empty"
    return f"`{value:g}`" if isinstance(value, float) and value < 1e6 else f"`{_whole(value)}`{_size(value)}"


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) else value


def _size(value: Any) -> str:
    """Of bytes, as people say it."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if isinstance(value, int) and value >= 1 << shift and value % (1 << shift) == 0:
            return f" ({value >> shift} {unit})"
    return ""


def _bounded(field: FieldInfo) -> str:
    """Type and bounds; where a text is one of a few, these alone."""
    bounds = _bounds(field)
    return bounds if bounds.startswith("one of") else ", ".join(filter(None, (_type(field.annotation), bounds)))


def _bounds(field: FieldInfo) -> str:
    return ", ".join(_bound(one) for one in field.metadata if _bound(one))


def _bound(constraint: Any) -> str:
    signs: Iterator[tuple[type, str, str]] = iter(
        (
            (annotated_types.Ge, "≥", "ge"),
            (annotated_types.Gt, ">", "gt"),
            (annotated_types.Le, "≤", "le"),
            (annotated_types.Lt, "<", "lt"),
        )
    )
    for kind, sign, attribute in signs:
        if isinstance(constraint, kind):
            return f"{sign} {getattr(constraint, attribute)}"
    pattern = getattr(constraint, "pattern", None)
    return "one of " + ", ".join(f"`{one}`" for one in pattern.strip("^$()").split("|")) if pattern else ""
