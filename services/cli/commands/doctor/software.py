"""What the system gives to processes: disk, ports, files, clock, proxies, and the programs that are used."""

import ctypes
import os
import resource
import shutil
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from services.cli.commands.doctor.check import Check
from services.cli.commands.doctor.hardware import output_of
from services.cli.machine import existing
from services.cli.supervision.nats_server import find_binary
from services.cli.ui import megabytes
from shared.errors import ConfigurationError

_DISK_BYTES = 3_000_000_000  # free, for a model of some size beside what is there
_FILES = 4096
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOOPBACK = ("127.0.0.1", "localhost")
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_EXTRAS = {"starlette": "gateway", "torch": "executor", "transformers": "executor"}


def packages() -> Check:
    missing = [name for name in _EXTRAS if find_spec(name) is None]
    if not missing:
        return Check("packages", "ok", "gateway and executor are installed")
    advice = "Install what serves models here: pip install 'ryzanstein[all]'."
    return Check("packages", "warning", f"not installed: {', '.join(missing)}", advice)


def nats() -> Check:
    try:
        binary = find_binary()
    except ConfigurationError as error:
        return Check("NATS", "error", "no nats-server", str(error))
    version = output_of(str(binary), "--version").strip()
    if not version:
        return Check("NATS", "error", f"{binary} does not start", f"Run {binary} --version, and mend what it says.")
    return Check("NATS", "ok", f"{version} ({binary})")


def compiler() -> Check:
    """Wheels bring the native kernels; a checkout compiles them."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found:
        return Check("compiler", "ok", found)
    advice = "Install gcc where you work from a checkout; wheels need none."
    return Check("compiler", "note", "none", advice)


def disk(name: str, directory: Path) -> Check:
    """Of the file system that `directory` is or would be on."""
    place = existing(directory)
    free = shutil.disk_usage(place).free
    found = f"{megabytes(free)} free in {directory}"
    if not os.access(place, os.W_OK):
        return Check(
            name, "error", f"{directory} cannot be written", f"Make {place} writable, or choose another place."
        )
    if free >= _DISK_BYTES:
        return Check(name, "ok", found)
    return Check(name, "warning", found, "Free some (`ryzanstein models disk`, `models clean`): models take GBs.")


def port(number: int, used_by: str) -> Check:
    """Whether `number` is free; `used_by` says what of ours would have it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", number))
        except OSError:
            advice = f"Another program has it; end that one, or choose another port for the {used_by} (up --help)."
            return Check(f"port {number}", "warning", "taken", advice)
    return Check(f"port {number}", "ok", f"free, for the {used_by}")


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, hard) if hard != resource.RLIM_INFINITY else 1 << 30
    if most >= _FILES:
        return Check("open files", "ok", f"{soft:,} (up to {hard:,})" if most < 1 << 30 else f"{soft:,}")
    return Check("open files", "warning", f"{most:,}", "Raise the limit (ulimit -n 65536): each connection takes one.")


def clock() -> Check:
    """Whether the system's clock is kept right: records of several machines are compared by it."""
    room = (ctypes.c_byte * 512)()
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "adjtimex") or library.adjtimex(room) < 0:
        return Check("clock", "ok", "not known")
    status = int.from_bytes(bytes(room)[_STATUS_AT : _STATUS_AT + 4], "little")
    if status & _UNSYNCHRONISED:
        advice = "Let a time service run (chrony, systemd-timesyncd) where several machines make up a cluster."
        return Check("clock", "note", "not synchronised", advice)
    return Check("clock", "ok", "synchronised")


# Of `struct timex`: behind modes (padded), offset, freq, maxerror, esterror
_STATUS_AT = ctypes.sizeof(ctypes.c_long) * 5


def proxies(environment: Mapping[str, str] = os.environ) -> Check:
    """Clients on this machine must not ask a proxy for the loopback address."""
    lowered = {name.lower(): value for name, value in environment.items() if value}
    found = [name for name in _PROXIES if name in lowered]
    if not found:
        return Check("proxy", "ok", "none")
    spared = {name.strip() for name in lowered.get("no_proxy", "").split(",")}
    if "*" in spared or all(name in spared for name in _LOOPBACK):
        return Check("proxy", "ok", f"{', '.join(found)}, not for this machine")
    advice = f"Set NO_PROXY={','.join(_LOOPBACK)}, or clients on this machine ask the proxy for the server."
    return Check("proxy", "warning", ", ".join(found), advice)
