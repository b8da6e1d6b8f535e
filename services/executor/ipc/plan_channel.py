"""How step plans travel from the leader to the other ranks: one length-prefixed message per step.

Plain TCP on the ring's own address: an idle rank waits in a read for as long as it takes, and the
end of the other side is seen at once. Tensors do not pass here; they go through the collectives.
Plans hold users' tokens, so both ends show that they know the ring's secret before the first one:

    leader                              rank
      │── nonce ──────────────────────────▶│
      │◀─ nonce, HMAC(secret, "rank") ─────│
      │── HMAC(secret, "leader") ─────────▶│
      │── length, plan, MAC ──────────────▶│   again and again (`proofs.MessageMac`)
"""

import secrets
import select
import socket
import struct
import time

from services.executor.core.step_plan import StepPlan, decode_plan, encode_plan
from services.executor.ipc.proofs import MAC_SIZE, MessageMac, challenge, read_exactly, respond
from shared.errors import RingLost

_LENGTH = struct.Struct("<I")
_GREETING_TIMEOUT = 5.0  # seconds for the greeting. Ranks that come meanwhile wait in the listener's queue


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
        channels: list[tuple[socket.socket, MessageMac]] = []
        try:
            while len(channels) < followers:
                connection, _ = self._socket.accept()
                mac = self._greet(connection)
                if mac is None:
                    connection.close()
                    continue
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(None)
                channels.append((connection, mac))
        except TimeoutError:
            raise RingLost(
                f"Only {len(channels)} of {followers} other ranks came to the ring within {timeout:g} s."
            ) from None
        finally:
            self._socket.close()
        return PlanSender(channels)

    def _greet(self, connection: socket.socket) -> MessageMac | None:
        """For what it will be told; None: it does not know the secret."""
        key = self.secret.encode()
        try:
            nonces = challenge(connection, key, "leader", "rank", time.monotonic() + _GREETING_TIMEOUT)
        except OSError:
            return None
        return None if nonces is None else MessageMac(key, "leader", nonces)


class PlanSender:
    def __init__(self, channels: list[tuple[socket.socket, MessageMac]]) -> None:
        self._channels = channels

    def send(self, plan: StepPlan) -> None:
        """Raises `RingLost` when a rank is gone."""
        if not self._channels:
            return
        payload = encode_plan(plan)
        message = _LENGTH.pack(len(payload)) + payload
        try:
            for connection, mac in self._channels:
                connection.sendall(message + mac.next(payload))
        except OSError as error:
            raise RingLost(f"A rank of the ring is gone ({error.strerror}).") from error

    def close(self) -> None:
        for connection, _ in self._channels:
            connection.close()
        self._channels = []


class PlanReceiver:
    """A follower's side."""

    def __init__(self, host: str, port: int, secret: str, timeout: float) -> None:
        """Raises `RingLost` where whoever listens there does not know the secret."""
        self._socket = socket.create_connection((host, port), timeout=timeout)
        key = secret.encode()
        try:
            nonces = respond(self._socket, key, "rank", "leader", time.monotonic() + timeout)
        except OSError:
            nonces = None
        if nonces is None:
            self._socket.close()
            raise RingLost("What listens at the leader's address does not know the ring's secret.")
        self._mac = MessageMac(key, "leader", nonces)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(None)

    def receive(self) -> StepPlan | None:
        """The next plan; None when the leader has closed the ring. Raises `RingLost` for a message that was
        changed on its way."""
        try:
            (length,) = _LENGTH.unpack(read_exactly(self._socket, _LENGTH.size))
            payload, shown = read_exactly(self._socket, length), read_exactly(self._socket, MAC_SIZE)
        except OSError:
            return None
        if not self._mac.accepts(shown, payload):
            raise RingLost("A step plan was changed on its way from the leader.")
        return decode_plan(payload)

    def has_news(self, timeout: float) -> bool:
        """Whether a plan, or the end, comes within `timeout` seconds."""
        return bool(select.select([self._socket], [], [], timeout)[0])

    def close(self) -> None:
        self._socket.close()
