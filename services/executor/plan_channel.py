"""How step plans travel from the leader to the other ranks: one length-prefixed message per step.

Plain TCP on the ring's own address: an idle rank waits in a read for as long as it takes, and the
end of the other side is seen at once. Tensors do not pass here; they go through the collectives.
Plans hold users' tokens, so a rank shows the ring's secret before it is taken for one.
"""

import hmac
import secrets
import select
import socket
import struct

from services.executor.engine.plan import StepPlan, decode_plan, encode_plan
from shared.errors import RingLost

_LENGTH = struct.Struct("<I")
_GREETING_TIMEOUT = 5.0


class PlanListener:
    """The leader's side before the ring is complete."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.secret = secrets.token_hex(16)
        self._socket = socket.create_server((host, 0))

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def accept(self, followers: int, timeout: float) -> "PlanSender":
        """Waits until every other rank has come. Raises `RingLost`."""
        self._socket.settimeout(timeout)
        connections: list[socket.socket] = []
        try:
            while len(connections) < followers:
                connection, _ = self._socket.accept()
                if self._is_rank(connection):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.settimeout(None)
                    connections.append(connection)
                else:
                    connection.close()
        except TimeoutError:
            raise RingLost(
                f"Only {len(connections)} of {followers} other ranks came to the ring within {timeout:g} s."
            ) from None
        finally:
            self._socket.close()
        return PlanSender(connections)

    def _is_rank(self, connection: socket.socket) -> bool:
        connection.settimeout(_GREETING_TIMEOUT)
        try:
            shown = connection.recv(len(self.secret), socket.MSG_WAITALL)
        except OSError:
            return False
        return hmac.compare_digest(shown, self.secret.encode())


class PlanSender:
    """The leader's side: sends each plan to every other rank."""

    def __init__(self, connections: list[socket.socket]) -> None:
        self._connections = connections

    def send(self, plan: StepPlan) -> None:
        """Raises `RingLost` when a rank is gone."""
        if not self._connections:
            return
        payload = encode_plan(plan)
        message = _LENGTH.pack(len(payload)) + payload
        try:
            for connection in self._connections:
                connection.sendall(message)
        except OSError as error:
            raise RingLost(f"A rank of the ring is gone ({error.strerror}).") from error

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []


class PlanReceiver:
    """A follower's side."""

    def __init__(self, host: str, port: int, secret: str, timeout: float) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout)
        self._socket.sendall(secret.encode())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)

    def receive(self) -> StepPlan | None:
        """The next plan; None when the leader has closed the ring."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        payload = self._read(_LENGTH.unpack(header)[0])
        return None if payload is None else decode_plan(payload)

    def has_news(self, timeout: float) -> bool:
        """Whether a plan, or the end, comes within `timeout` seconds."""
        return bool(select.select([self._socket], [], [], timeout)[0])

    def _read(self, count: int) -> bytearray | None:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            try:
                received = self._socket.recv_into(view)
            except OSError:
                return None
            if received == 0:
                return None
            view = view[received:]
        return buffer

    def close(self) -> None:
        self._socket.close()
