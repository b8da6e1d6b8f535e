"""`ryzanstein serve SERVICE`: becomes the service. Imports nothing that the services do not need themselves."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

from shared.errors import ConfigurationError

MODULES = {
    "gateway": "services.gateway",
    "scheduler": "services.scheduler",
    "executor": "services.executor",
    "health-monitor": "services.health_monitor",
}
_TELLTALES = {"gateway": "starlette", "executor": "torch"}
"""A package by which a service's extra is known to be installed; the others need no more than the core."""


def serve(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by the service `arguments[0]`, with the other arguments as its options.

    Without a service it prints the usage and exits with 0. Raises `ConfigurationError`.
    """
    service, *options = arguments or [""]
    if service in ("", "--help", "-h"):
        names = "|".join(sorted(MODULES))
        print(f"usage: ryzanstein serve {names} [options]\n")  # noqa: T201  # the terminal is the interface here
        print("`ryzanstein serve SERVICE --help` lists a service's options.")  # noqa: T201
        raise SystemExit(0)
    if service not in MODULES:
        raise ConfigurationError(
            f"There is no service {service!r} to serve; it is one of {', '.join(sorted(MODULES))}."
        )
    require_packages(service, service)
    os.execv(sys.executable, [sys.executable, "-m", MODULES[service], *options])  # noqa: S606


def require_packages(service: str, extra: str) -> None:
    """Raises `ConfigurationError` where what `service` needs is not installed, with the `extra` that brings it."""
    telltale = _TELLTALES.get(service)
    if telltale is not None and find_spec(telltale) is None:
        raise ConfigurationError(
            f"The {service} needs packages that are not installed here (as {telltale}); install them with: "
            f"pip install 'ryzanstein[{extra}]'"
        )
