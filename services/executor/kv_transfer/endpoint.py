"""One rank's side of hand-overs: does what the leader's commands say, beside the steps.

engine thread   obey(command), take(slot)        between two steps
threads here    one that listens, a few that greet who has come, one that sends; they touch sockets, the rank's
                report, and of the store only blocks that the leader keeps from being written to
"""

import contextlib
import functools
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import structlog

from services.executor.kv_transfer.board import (
    Command,
    Field,
    RankReport,
    Receive,
    Send,
    StopReceiving,
    StopSending,
    decode_command,
)
from services.executor.kv_transfer.wire import BatchReceiver, BatchSender, HandoverBroken

log = structlog.get_logger(__name__)

ACCEPT_TURN = 0.2
"""Seconds after which a thread that waits for a connection looks whether it should end."""
MAX_UNPROVEN = 32
"""Connections at a time that have not shown yet that they have the batch's key; one more is closed at once."""
ENDED, FAILED = 1, 2


class Blocks(Protocol):
    """What is needed of the rank's store."""

    def save(self, block: int) -> bytes: ...


class RankEndpoint:
    """Gives and takes the blocks of one rank. `obey` and `take` are called by the engine's thread."""

    def __init__(
        self, blocks: Blocks, block_bytes: int, report: RankReport, rank: int, host: str, base_port: int
    ) -> None:
        """`block_bytes`: of every block that is received; `base_port`: rank r listens on that plus r; 0: the
        system chooses."""
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._report = report
        self._rank = rank
        self._address = (host, base_port + rank if base_port else 0)
        self._listener: _Listener | None = None
        self._receiving: _Job | None = None
        self._sending: _Job | None = None
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
                if self._sending is not None:
                    self._sending.stop()

    def take(self, slot: int) -> bytearray:
        """What has landed in `slot` of the batch that is being received; once."""
        assert self._receiver is not None, "a plan takes over blocks, and none were received"
        return self._receiver.take(slot)

    # --- receiving -------------------------------------------------------------------------------

    def _receive(self, command: Receive) -> None:
        if self._receiving is not None:
            self._receiving.stop()
        job = self._receiving = _Job()
        self._receiver = BatchReceiver(
            command.key,
            command.count,
            self._block_bytes,
            lambda count: self._report.write(Field.LANDED, command.batch, count),
            job.stopped,
        )
        try:
            port = self._listen()
        except OSError as error:
            log.warning("handover_port_not_open", address=self._address, error=str(error))
            self._report.write(Field.LISTENING, command.batch, 0)
            return
        self._report.write(Field.LISTENING, command.batch, port)

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.stop()
        self._receiver = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _listen(self) -> int:
        """The port; whoever comes there is for the batch of that moment. Raises OSError."""
        if self._listener is None:
            self._listener = _Listener(self._address, lambda: self._receiver)
        return self._listener.port

    # --- sending ---------------------------------------------------------------------------------

    def _send(self, command: Send) -> None:
        if self._sending is not None:
            self._sending.stop()
        job = self._sending = _Job()
        sender = BatchSender(
            command.addresses[self._rank],
            command.key,
            len(command.blocks),
            lambda index: self._blocks.save(command.blocks[index]),
            lambda count: self._report.write(Field.SENT, command.batch, count),
            job.stopped,
        )
        job.start(lambda: self._run(sender, command))

    def _run(self, sender: BatchSender, command: Send) -> None:
        try:
            sender.run(command.within)
        except HandoverBroken as error:
            log.warning("handover_broken", error=str(error))
            self._report.write(Field.ENDED, command.batch, FAILED)
            return
        except BaseException:
            self._report.write(Field.ENDED, command.batch, FAILED)
            raise
        self._report.write(Field.ENDED, command.batch, ENDED)


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="handover", daemon=True).start()


class _Job:
    """A thread that looks now and then whether it should end."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.stopped: Callable[[], bool] = self._stop.is_set

    def start(self, work: Callable[[], None]) -> None:
        _in_thread(work)

    def stop(self) -> None:
        self._stop.set()


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
            _in_thread(functools.partial(self._talk, connection, receiver))

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
