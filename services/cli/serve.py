"""`ryzanstein serve SERVICE` becomes the service; `ryzanstein probe SERVICE` asks the one beside it whether it is
ready, as a container's health check does.

    exit code 0: /ready said yes       1: it said no, or nothing: one sentence on standard error

A probe runs every few seconds in every container, so this module imports nothing that the services do not need
themselves, and reads from the environment alone what the service was told there: its address and its TLS.
"""

import contextlib
import http.client
import os
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import NoReturn

from shared.errors import ConfigurationError

MODULES = {
    "gateway": "services.gateway",
    "scheduler": "services.scheduler",
    "executor": "services.executor",
    "health-monitor": "services.health_monitor",
}
# A package by which a service's extra is known to be installed; the others need no more than the core.
_TELLTALES = {"gateway": "starlette", "executor": "torch"}
AROUND_ENGINE = "safetensors"  # of an executor around another engine, which may do without PyTorch


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
            f"There is no service {service!r} to serve; it is one of {', '.join(sorted(MODULES))}; "
            "a model is served by `ryzanstein up --model NAME`."
        )
    require_packages(service, service, options)
    os.execv(sys.executable, [sys.executable, "-m", MODULES[service], *options])  # noqa: S606


def require_packages(service: str, extra: str, options: Sequence[str] = ()) -> None:
    """Raises `ConfigurationError` where what `service` needs with its `options` is not installed, with the `extra` that
    brings it."""
    telltale = AROUND_ENGINE if service == "executor" and _names_engine(options) else _TELLTALES.get(service)
    if telltale is not None and find_spec(telltale) is None:
        raise ConfigurationError(
            f"The {service} needs packages that are not installed here (as {telltale}); install them with: "
            f"pip install 'ryzanstein[{extra}]'"
        )


def _names_engine(options: Sequence[str]) -> bool:
    """Whether another engine computes for the executor, by its options or its environment."""
    given = {
        "--engine": os.environ.get("RYZANSTEIN_ENGINE", ""),
        "--engine-url": os.environ.get("RYZANSTEIN_ENGINE_URL", ""),
    }
    for option, following in pairwise([*options, ""]):
        name, _, value = option.partition("=")
        if name in given:
            given[name] = value or following
    return bool(given["--engine-url"]) or given["--engine"] not in ("", "torch")


@contextlib.contextmanager
def packages_of(extra: str) -> Iterator[None]:
    """Around imports of the command line. Raises `ConfigurationError` where a package is not installed, with the
    `extra` that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("services", "shared"):
            raise
        raise ConfigurationError(
            f"The command line needs the package {package}, which is not installed here; install it with: "
            f"pip install 'ryzanstein[{extra}]'"
        ) from None


HELP = "Ask the service beside this command whether it is ready, as a container's health check does."
TIMEOUT = 3.0  # seconds to wait for the connection, and for each part of the answer
API_PORT = 8000
_ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # asked, not bound


def probe(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Prints why the service `arguments[0]` is not ready, and returns the exit code.

    Raises `ConfigurationError` where the arguments or the environment do not say what to ask.
    """
    if list(arguments) in (["--help"], ["-h"]):
        print(f"Usage: ryzanstein probe {'|'.join(MODULES)}\n\n{HELP}")  # noqa: T201
        return 0
    if len(arguments) != 1 or arguments[0] not in MODULES:
        raise ConfigurationError(f"`ryzanstein probe` takes the name of a service: {', '.join(MODULES)}.")
    reason = ask(host_of(environment), port_of(arguments[0], environment), trust_of(environment))
    if reason:
        print(f"not ready: {reason}", file=sys.stderr)  # noqa: T201  # whoever inspects the container reads it
    return 1 if reason else 0


def host_of(environment: Mapping[str, str]) -> str:
    """The address that the service listens on, or loopback where it listens on all."""
    host = environment.get("RYZANSTEIN_HOST", "")
    return _ANYWHERE.get(host, host)


def port_of(service: str, environment: Mapping[str, str]) -> int:
    """Where the service alone answers /ready. Raises `ConfigurationError`."""
    shared = environment.get("RYZANSTEIN_SHARE_PORT", "").lower() in ("1", "true", "t", "yes", "y", "on")
    own = service == "gateway" and not shared
    name = "RYZANSTEIN_PORT" if own else "RYZANSTEIN_OPS_PORT"
    text = environment.get(name, str(API_PORT) if own else "")
    if not text.isdecimal() or not 0 < int(text) < 65536:
        given = f"is {text!r}" if text else "is not set"
        raise ConfigurationError(f"{name} {given}; a service that is probed needs a port of its own there.")
    return int(text)


def trust_of(environment: Mapping[str, str]) -> ssl.SSLContext | None:
    """How to speak to the gateway where it has a certificate. Whose it is does not matter: it is our own."""
    if not environment.get("RYZANSTEIN_TLS_CERTIFICATE"):
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if environment.get("RYZANSTEIN_TLS_CLIENT_CA"):  # it asks for a certificate: we have the server's own
        certificate, key = (environment["RYZANSTEIN_TLS_CERTIFICATE"], environment.get("RYZANSTEIN_TLS_KEY", ""))
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise ConfigurationError(
                f"The certificate {certificate} cannot be presented to the gateway, which requires one ({error}); "
                "check RYZANSTEIN_TLS_CERTIFICATE and RYZANSTEIN_TLS_KEY."
            ) from None
    return context


def ask(host: str, port: int, trust: ssl.SSLContext | None) -> str:
    """Why /ready there says no; empty if it says yes."""
    connection = (
        http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=trust)
        if trust
        else http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    )
    try:
        connection.request("GET", "/ready", headers={"connection": "close"})
        answer = connection.getresponse()
        text = answer.read(4096).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{host}:{port} gives no answer ({error})"
    finally:
        connection.close()
    return "" if answer.status == 200 else text or f"status {answer.status}"
