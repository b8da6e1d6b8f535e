"""One rank's side of hand-overs: does what the leader's commands say, beside the steps.

engine thread   obey(command), take(slot)        between two steps
threads here    one that listens, a few that greet who has come, one that sends; they touch sockets, the rank's
                report, and of the store only blocks that the leader keeps from being written to

Blocks go to the same rank of the other ring over TCP, one batch after the other:

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

import contextlib
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable

import structlog

from services.executor.ipc.proofs import challenge, read_exactly, respond
from services.executor.kv_transfer.board import (
    Command,
    RankReport,
    Receive,
    Send,
    StopReceiving,
    StopSending,
    decode_command,
)

log = structlog.get_logger(__name__)

MAGIC = b"RZKV0001"
WINDOW = 32  # blocks on their way without an acknowledgement
IDLE_TIMEOUT = 5.0  # seconds without a byte after which a connection is given up
GREETING_TIMEOUT = 2.0
MOST_DAMAGED = 16  # damaged blocks of one batch, after which it is given up: the line is of no use
RETRY_PAUSE = 0.05
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
        self.done = 0  # blocks that have arrived, from the first without a gap
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
            connection.sendall(MAGIC)
            if challenge(connection, self._key, "sender", "receiver", time.monotonic() + IDLE_TIMEOUT) is None:
                raise HandoverBroken("the peer at that address does not have the batch's key")
            connection.settimeout(IDLE_TIMEOUT)
            self._advance(*_COUNT.unpack(read_exactly(connection, _COUNT.size)))
            self._send_all(connection)

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
                kind, number = _ANSWER.unpack(read_exactly(connection, _ANSWER.size))
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
        self, key: bytes, count: int, block_bytes: int, landed: Callable[[int], object], stopped: Callable[[], bool]
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
        """A sender that was greeted, one after the other: returns when the batch is complete. Raises
        `HandoverBroken` for what is no block of this batch, OSError where the connection ends or is too slow."""
        connection.settimeout(IDLE_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._serving:
            connection.sendall(_COUNT.pack(self._next))
            while self._next < self._count and not self._stopped():
                self._frame(connection)

    def greet(self, connection: socket.socket) -> None:
        """From any thread. Raises `HandoverBroken` or OSError for what is not a sender of this batch, or is too
        slow."""
        by = time.monotonic() + GREETING_TIMEOUT
        if read_exactly(connection, len(MAGIC), by) != MAGIC:
            raise HandoverBroken("not a sender of blocks")
        if respond(connection, self._key, "receiver", "sender", by) is None:
            raise HandoverBroken("the sender does not have the batch's key")

    def _frame(self, connection: socket.socket) -> None:
        index, expected, length = _FRAME.unpack(read_exactly(connection, _FRAME.size))
        if length != self._block_bytes or index >= self._count:
            raise HandoverBroken(f"block {index} of {length} bytes is not part of this batch")
        content = read_exactly(connection, length)
        if index != self._next:  # what was on its way when its predecessor came damaged
            return
        if checksum(index, content) == expected:
            self._blocks[index] = content
            self._next += 1
            self._landed(self._next)
            connection.sendall(_ANSWER.pack(_ACK, self._next))
            return
        self._damaged += 1
        if self._damaged > MOST_DAMAGED:
            raise HandoverBroken(f"{self._damaged} blocks came damaged")
        connection.sendall(_ANSWER.pack(_AGAIN, self._next))


ACCEPT_TURN = 0.2  # seconds after which a thread that waits for a connection looks whether it should end
# Connections at a time that have not shown yet that they have the batch's key; one more is closed at once.
MAX_UNPROVEN = 32
ENDED, FAILED = 1, 2


class RankEndpoint:
    """Gives and takes the blocks of one rank. `obey` and `take` are called by the engine's thread."""

    def __init__(
        self, read: Callable[[int], bytes], block_bytes: int, report: RankReport, rank: int, host: str, base_port: int
    ) -> None:
        """`read` gives the bytes of a block; `block_bytes`: of every block that is received; `base_port`: rank r
        listens on that plus r; 0: the system chooses."""
        self._read = read
        self._block_bytes = block_bytes
        self._report = report
        self._rank = rank
        self._address = (host, base_port + rank if base_port else 0)
        self._listener: _Listener | None = None
        self._receiving = threading.Event()  # set: the batch is over, for what the threads do for it
        self._sending = threading.Event()
        self._receiver: BatchReceiver | None = None

    def obey(self, payload: bytes) -> None:
        """Starts what the command says, and returns at once."""
        command: Command = decode_command(payload)
        match command:
            case Receive():
                self._receive(command)
            case Send():
                self._send(command)
            case StopReceiving():
                self._stop_receiving()
            case StopSending():
                self._sending.set()

    def take(self, slot: int) -> bytearray:
        """What has landed in `slot` of the batch that is being received; once."""
        assert self._receiver is not None, "a plan takes over blocks, and none were received"
        return self._receiver.take(slot)

    # --- receiving -------------------------------------------------------------------------------

    def _receive(self, command: Receive) -> None:
        self._receiving.set()
        self._receiving = threading.Event()
        self._receiver = BatchReceiver(
            command.key,
            command.count,
            self._block_bytes,
            lambda count: self._report.write("landed", command.batch, count),
            self._receiving.is_set,
        )
        try:
            if self._listener is None:
                self._listener = _Listener(self._address, lambda: self._receiver)
        except OSError as error:
            log.warning("handover_listen_failed", address=self._address, error=str(error))
            self._report.write("listening", command.batch, 0)
            return
        self._report.write("listening", command.batch, self._listener.port)

    def _stop_receiving(self) -> None:
        self._receiving.set()
        self._receiver = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- sending ---------------------------------------------------------------------------------

    def _send(self, command: Send) -> None:
        self._sending.set()
        self._sending = threading.Event()
        sender = BatchSender(
            command.addresses[self._rank],
            command.key,
            len(command.blocks),
            lambda index: self._read(command.blocks[index]),
            lambda count: self._report.write("sent", command.batch, count),
            self._sending.is_set,
        )
        _in_thread(self._run, sender, command)

    def _run(self, sender: BatchSender, command: Send) -> None:
        try:
            sender.run(command.within)
        except HandoverBroken as error:
            log.warning("handover_broken", error=str(error))
            self._report.write("ended", command.batch, FAILED)
            return
        except BaseException:
            self._report.write("ended", command.batch, FAILED)
            raise
        self._report.write("ended", command.batch, ENDED)


def _in_thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="handover", daemon=True).start()


class _Listener:
    """Takes connections until it is closed. Who they are is found out side by side, so that a stranger who says
    nothing holds up nobody; blocks come from one of them at a time."""

    def __init__(self, address: tuple[str, int], receiver: Callable[[], BatchReceiver | None]) -> None:
        """`receiver`: of the batch that is being received now. Raises OSError."""
        self._socket = socket.create_server(address, backlog=MAX_UNPROVEN)
        self._socket.settimeout(ACCEPT_TURN)  # a close does not wake the thread that waits in accept
        self._receiver = receiver
        self._unproven = threading.BoundedSemaphore(MAX_UNPROVEN)
        self.port = int(self._socket.getsockname()[1])
        _in_thread(self._accept)

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            receiver = self._receiver()
            if receiver is None or not self._unproven.acquire(blocking=False):
                connection.close()
                continue
            _in_thread(self._talk, connection, receiver)

    def _talk(self, connection: socket.socket, receiver: BatchReceiver) -> None:
        with connection, contextlib.suppress(OSError):
            try:
                try:
                    receiver.greet(connection)
                finally:
                    self._unproven.release()
                receiver.serve(connection)
            except HandoverBroken as error:
                log.warning("handover_connection_refused", error=str(error))
