"""How one rank sends blocks to the same rank of another ring: TCP, one batch after the other.

    sender                                       receiver
      │── magic, nonce ──────────────────────────▶│
      │◀─ nonce, HMAC(key, "receiver", nonces) ───│   each shows that it has the batch's one-time key, and
      │── HMAC(key, "sender", nonces) ───────────▶│   neither says it
      │◀─ n: the first block that is missing ─────│   so a connection that broke goes on where it was
      │── index, checksum, length, bytes ────────▶│   no more than WINDOW without an acknowledgement
      │◀─ ACK n ──────────────────────────────────│   all before n have come
      │◀─ AGAIN n ────────────────────────────────│   n came damaged: from there again

All numbers are little-endian. The checksum is CRC-32 over index and bytes, as spilled blocks have one over theirs:
against damage, not against an enemy. Who could change bytes on the way is kept out by the network's own means.
"""

import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable

from services.executor.ipc.proofs import is_proof, proof

MAGIC = b"RZKV0001"
WINDOW = 32
"""Blocks on their way without an acknowledgement."""
IDLE_TIMEOUT = 5.0
"""Seconds without a byte after which a connection is given up."""
GREETING_TIMEOUT = 2.0
MOST_DAMAGED = 16
"""Damaged blocks of one batch, after which it is given up: the line is of no use."""
RETRY_PAUSE = 0.05
_NONCE = 16
_PROOF = 32
_COUNT = struct.Struct("<I")
_FRAME = struct.Struct("<III")
_ANSWER = struct.Struct("<BI")
_ACK, _AGAIN = 1, 2


class HandoverBroken(Exception):
    """The batch cannot go on; what has come so far is right."""


def checksum(index: int, content: bytes | bytearray | memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(_COUNT.pack(index)))


# --- sender --------------------------------------------------------------------------------------


class BatchSender:
    """Sends one batch. Runs in a thread of its own; `run` returns when all is acknowledged."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        count: int,
        read: Callable[[int], bytes],
        acknowledged: Callable[[int], object],
        stopped: Callable[[], bool],
    ) -> None:
        """`read` gives the bytes of the n-th block; `acknowledged` is told how many have arrived, in order."""
        self._address = address
        self._key = key
        self._count = count
        self._read = read
        self._acknowledged = acknowledged
        self._stopped = stopped
        self._give_up = 0.0
        self.done = 0
        """Blocks that have arrived, from the first without a gap."""
        self.connections = 0

    def run(self, within: float) -> None:
        """Connects again as often as it takes. Raises `HandoverBroken` after `within` seconds, or when told to
        stop."""
        self._give_up = time.monotonic() + within
        while self.done < self._count:
            try:
                self._attempt()
            except (OSError, HandoverBroken) as error:
                if self._is_over():
                    raise HandoverBroken(f"{self.done} of {self._count} blocks were sent: {error}") from error
                time.sleep(RETRY_PAUSE)

    def _attempt(self) -> None:
        with socket.create_connection(self._address, timeout=IDLE_TIMEOUT) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._greet(connection)
            self._advance(*_COUNT.unpack(_read(connection, _COUNT.size)))
            self._send_all(connection)

    def _greet(self, connection: socket.socket) -> None:
        mine = secrets.token_bytes(_NONCE)
        connection.sendall(MAGIC + mine)
        answer = _read(connection, _NONCE + _PROOF)
        nonces = mine + answer[:_NONCE]
        if not is_proof(answer[_NONCE:], self._key, "receiver", nonces):
            raise HandoverBroken("the peer at that address does not have the batch's key")
        connection.sendall(proof(self._key, "sender", nonces))

    def _send_all(self, connection: socket.socket) -> None:
        at = self.done
        while self.done < self._count:
            if self._is_over():
                raise HandoverBroken("there is no more time")
            if at < self._count and at - self.done < WINDOW:
                content = self._read(at)
                connection.sendall(_FRAME.pack(at, checksum(at, content), len(content)))
                connection.sendall(content)
                at += 1
            else:
                kind, number = _ANSWER.unpack(_read(connection, _ANSWER.size))
                self._advance(number)
                if kind == _AGAIN:
                    at = number

    def _is_over(self) -> bool:
        return self._stopped() or time.monotonic() >= self._give_up

    def _advance(self, number: int) -> None:
        if not self.done <= number <= self._count:
            raise HandoverBroken(f"the other side acknowledges {number} blocks")
        if number > self.done:
            self.done = number
            self._acknowledged(number)


# --- receiver ------------------------------------------------------------------------------------


class BatchReceiver:
    """Takes one batch. For each connection first `greet`, then `serve`."""

    def __init__(
        self,
        key: bytes,
        count: int,
        block_bytes: int,
        landed: Callable[[int], object],
        stopped: Callable[[], bool],
    ) -> None:
        """`landed` is told how many blocks have come, in order."""
        self._key = key
        self._count = count
        self._block_bytes = block_bytes
        self._landed = landed
        self._stopped = stopped
        self._blocks: dict[int, bytearray] = {}
        self._next = 0
        self._damaged = 0
        self._serving = threading.Lock()

    def take(self, index: int) -> bytearray:
        """The bytes of a block that has landed; once."""
        return self._blocks.pop(index)

    def serve(self, connection: socket.socket) -> None:
        """A sender that was greeted, one after the other: returns when the batch is complete or the connection ends.
        Raises `HandoverBroken` or OSError for what is no block of this batch, or is too slow."""
        connection.settimeout(IDLE_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._serving:
            connection.sendall(_COUNT.pack(self._next))
            while self._next < self._count and not self._stopped():
                if not self._frame(connection):
                    return

    def greet(self, connection: socket.socket) -> None:
        """From any thread. Raises `HandoverBroken` or OSError for what is not a sender of this batch, or is too
        slow."""
        by = time.monotonic() + GREETING_TIMEOUT
        greeting = _read(connection, len(MAGIC) + _NONCE, by=by)
        if greeting[: len(MAGIC)] != MAGIC:
            raise HandoverBroken("not a sender of blocks")
        mine = secrets.token_bytes(_NONCE)
        nonces = bytes(greeting[len(MAGIC) :]) + mine
        connection.sendall(mine + proof(self._key, "receiver", nonces))
        if not is_proof(_read(connection, _PROOF, by=by), self._key, "sender", nonces):
            raise HandoverBroken("the sender does not have the batch's key")

    def _frame(self, connection: socket.socket) -> bool:
        """Takes one block; False at the end of the connection."""
        header = _read(connection, _FRAME.size, may_end=True)
        if not header:
            return False
        index, expected, length = _FRAME.unpack(header)
        if length != self._block_bytes or index >= self._count:
            raise HandoverBroken(f"block {index} of {length} bytes is none of this batch")
        content = _read(connection, length)
        if index != self._next:  # what was on its way when its predecessor came damaged
            return True
        if checksum(index, content) == expected:
            self._blocks[index] = content
            self._next += 1
            self._landed(self._next)
            connection.sendall(_ANSWER.pack(_ACK, self._next))
            return True
        self._damaged += 1
        if self._damaged > MOST_DAMAGED:
            raise HandoverBroken(f"{self._damaged} blocks came damaged")
        connection.sendall(_ANSWER.pack(_AGAIN, self._next))
        return True


def _read(
    connection: socket.socket, count: int, *, may_end: bool = False, by: float | None = None
) -> bytearray:
    """`count` bytes; with `may_end` none where the connection ends before the first. Raises OSError, and
    TimeoutError `by` then: a stranger must not hold up whoever comes after."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        if by is not None:
            connection.settimeout(max(1e-3, by - time.monotonic()))
        received = connection.recv_into(view)
        if not received:
            if may_end and len(view) == count:
                return bytearray()
            raise ConnectionError("the other side has closed the connection")
        view = view[received:]
    return buffer
