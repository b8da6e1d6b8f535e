"""Ports of the services' /health, /ready and /metrics: the same at each start of a local stack, so that what scrapes
them need not be told anew."""

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shared.errors import PortInUse
from shared.service.listener import reserve


def reserve_ops_ports(
    host: str, names: Iterable[str], remembered: Path
) -> tuple[list[socket.socket], dict[str, int]]:
    """Sockets that keep a port for each of the services `names`, and which: the one in the file `remembered` where that
    is free, else one that the system chooses. The file has them afterwards."""
    known: dict[str, int] = {}
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        known = msgspec.json.decode(remembered.read_bytes(), type=dict[str, int])
    kept = {name: _reserved(host, known.get(name, 0)) for name in names}
    ports = {name: sock.getsockname()[1] for name, sock in kept.items()}
    with contextlib.suppress(OSError):  # a stack that remembers nothing serves all the same
        remembered.write_bytes(msgspec.json.encode({**known, **ports}))
    return list(kept.values()), ports


def _reserved(host: str, port: int) -> socket.socket:
    if 0 < port < 1 << 16:
        with contextlib.suppress(PortInUse):
            return reserve(host, port)
    return reserve(host, 0)
