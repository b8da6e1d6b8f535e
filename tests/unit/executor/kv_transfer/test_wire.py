"""Blocks over real sockets: broken connections, damaged bytes, strangers."""

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.executor.kv_transfer import endpoint as wire
from services.executor.kv_transfer.board import HandoverBoard, Receive, Send, StopReceiving, StopSending, encode_command
from services.executor.kv_transfer.endpoint import (
    ENDED,
    FAILED,
    BatchReceiver,
    BatchSender,
    HandoverBroken,
    RankEndpoint,
)

KEY = b"k" * 32
BYTES = 5000
COUNT = 100


def content(index: int) -> bytes:
    return random.Random(index).randbytes(BYTES)


class Damage(threading.Thread):
    """A way to a listener that changes what the sender says: `change(connection number, position, bytes)`, where
    None cuts the connection."""

    def __init__(self, target: tuple[str, int], change: Callable[[int, int, bytes], bytes | None]) -> None:
        super().__init__(daemon=True)
        self._target = target
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", self._listener.getsockname()[1])
        self.start()

    def run(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                threading.Thread(target=self._back, args=(far, near), daemon=True).start()
                self._forth(near, far, number)
                number += 1

    def _forth(self, near: socket.socket, far: socket.socket, number: int) -> None:
        position = 0
        with near, far, contextlib.suppress(OSError):
            while data := near.recv(1024):
                changed = self._change(number, position, data)
                if changed is None:
                    return
                position += len(data)
                far.sendall(changed)

    @staticmethod
    def _back(far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(65536):
                near.sendall(data)
            near.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


class Line:
    """Both ends of a batch, and what lies between."""

    def __init__(self) -> None:
        self.landed: list[int] = []
        self.acknowledged: list[int] = []
        self.over = threading.Event()
        self.refused: list[str] = []
        self.receiver = BatchReceiver(KEY, COUNT, BYTES, self.landed.append, self.over.is_set)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    try:
                        self.receiver.greet(connection)
                        self.receiver.serve(connection)
                    except HandoverBroken as error:
                        self.refused.append(str(error))

    def sender(self, address: tuple[str, int] | None = None, key: bytes = KEY) -> BatchSender:
        acknowledge = self.acknowledged.append
        return BatchSender(address or self.address, key, COUNT, content, acknowledge, self.over.is_set)

    def check(self) -> None:
        assert [bytes(self.receiver.take(index)) for index in range(COUNT)] == list(map(content, range(COUNT)))
        assert self.landed == list(range(1, COUNT + 1)), "each block counts once, in order"
        assert self.acknowledged == sorted(set(self.acknowledged))
        assert self.acknowledged[-1] == COUNT

    def close(self) -> None:
        self.over.set()
        self._listener.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


def send_through(line: Line, change: Callable[[int, int, bytes], bytes | None]) -> BatchSender:
    damage = Damage(line.address, change)
    sender = line.sender(damage.address)
    try:
        sender.run(20)
    finally:
        damage.close()
    return sender


def test_all_blocks_arrive(line: Line) -> None:
    sender = line.sender()
    sender.run(20)
    line.check()
    assert sender.connections == 1


def test_a_broken_connection_goes_on_at_the_first_missing_block(line: Line) -> None:
    """Three times; a connection that begins again at the first block would never get so far."""

    def cut(number: int, position: int, data: bytes) -> bytes | None:
        return None if number < 3 and position > BYTES * COUNT // 3 else data

    sender = send_through(line, cut)
    line.check()
    assert sender.connections == 4


def test_a_damaged_block_is_sent_again(line: Line) -> None:
    flipped: set[int] = set()

    def flip(number: int, position: int, data: bytes) -> bytes:
        """Three bytes of the stream, wherever its pieces begin and end."""
        changed = bytearray(data)
        for offset in {41_460, 164_340, 165_364} & set(range(position, position + len(data))):
            changed[offset - position] ^= 8
            flipped.add(offset)
        return bytes(changed)

    send_through(line, flip)
    line.check()
    assert len(flipped) == 3


@pytest.mark.slow
def test_a_line_that_damages_everything_is_given_up(line: Line) -> None:
    damage = Damage(
        line.address, lambda number, position, data: data[:-1] + bytes([data[-1] ^ 1]) if position else data
    )
    with pytest.raises(HandoverBroken, match="0 of 100 blocks were sent"):
        line.sender(damage.address).run(0.5)
    damage.close()
    assert not line.landed


def test_who_has_another_key_gives_nothing(line: Line) -> None:
    with pytest.raises(HandoverBroken, match="the peer at that address does not have the batch's key"):
        line.sender(key=b"x" * 32).run(0)
    assert not line.landed


def test_a_stranger_is_refused_and_holds_nobody_up(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, one that speaks HTTP, and one that cannot prove what it claims."""
    monkeypatch.setattr(wire, "GREETING_TIMEOUT", 0.3)
    silent = socket.create_connection(line.address)
    with socket.create_connection(line.address) as http:
        http.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with socket.create_connection(line.address) as liar:
            liar.sendall(wire.MAGIC + b"n" * 16)
            liar.sendall(b"p" * 32)
            line.sender().run(20)
    silent.close()
    line.check()
    assert line.refused[:2] == ["not a sender of blocks", "the sender does not have the batch's key"]


@pytest.mark.parametrize("frame", [(0, 0, BYTES + 1), (0, 0, 1 << 31), (COUNT, 0, BYTES)])
def test_a_frame_that_is_no_block_of_the_batch_ends_the_connection(
    line: Line, frame: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its bytes are read: no sender decides how much memory is taken."""

    class Strange:
        size = struct.calcsize("<III")

        @staticmethod
        def pack(*_: int) -> bytes:
            return struct.pack("<III", *frame)

        unpack = staticmethod(struct.Struct("<III").unpack)

    monkeypatch.setattr(wire, "_FRAME", Strange)
    with pytest.raises(HandoverBroken):
        line.sender().run(0)
    line.close()
    assert not line.landed


# --- the ranks -----------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it has not come to pass")


class Pair:
    """A rank of each ring, with their boards."""

    def __init__(self, directory: Path) -> None:
        self.boards = [HandoverBoard(directory / name, 1, create=True) for name in ("from", "to")]
        self.giver, self.taker = (
            RankEndpoint(content, BYTES, board.rank(0), 0, "127.0.0.1", 0) for board in self.boards
        )

    def receive(self, batch: int, count: int, key: bytes = KEY) -> tuple[str, int]:
        self.taker.obey(encode_command(Receive(batch, key, count)))
        [port] = self.boards[1].numbers("listening", batch)
        assert port
        return ("127.0.0.1", port)

    def send(self, batch: int, address: tuple[str, int], blocks: list[int], key: bytes = KEY) -> None:
        self.giver.obey(encode_command(Send(batch, key, [address], blocks, 10.0)))

    def ended(self, batch: int) -> int | None:
        return self.boards[0].numbers("ended", batch)[0]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.giver.obey(encode_command(StopSending()))
    made.taker.obey(encode_command(StopReceiving()))


def test_ranks_obey_and_report(pair: Pair) -> None:
    for batch in (1, 2):
        blocks = list(range(batch, batch + 20))
        address = pair.receive(batch, 20, KEY + bytes([batch]))
        assert pair.boards[1].least("landed", batch) == 0, "what was said of the last batch is over"
        pair.send(batch, address, blocks, KEY + bytes([batch]))
        until(lambda batch=batch: pair.ended(batch) == ENDED)
        assert pair.boards[0].least("sent", batch) == pair.boards[1].least("landed", batch) == 20
        assert [bytes(pair.taker.take(slot)) for slot in range(20)] == list(map(content, blocks))


def test_a_batch_that_is_over_takes_nothing_more(pair: Pair) -> None:
    address = pair.receive(1, 5)
    pair.receive(2, 5, b"another key of 32 bytes, as it is")
    pair.send(1, address, [1, 2, 3, 4, 5])
    pair.giver.obey(encode_command(StopSending()))
    until(lambda: pair.ended(1) == FAILED)
    assert pair.boards[1].least("landed", 2) == 0


def test_strangers_who_say_nothing_hold_nobody_up(pair: Pair) -> None:
    """None of them is given up before the batch is there: they are waited for beside it."""
    address = pair.receive(1, 20)
    strangers = [socket.create_connection(address) for _ in range(8)]
    pair.send(1, address, list(range(20)))
    until(lambda: pair.ended(1) == ENDED)
    assert pair.boards[1].least("landed", 1) == 20
    for stranger in strangers:
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
        stranger.close()


def test_no_more_strangers_are_listened_to_than_the_bound(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.executor.kv_transfer.endpoint.MAX_UNPROVEN", 1)
    address = pair.receive(1, 1)
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        second.settimeout(20)
        assert second.recv(1) == b""
        first.setblocking(False)
        with pytest.raises(BlockingIOError):
            first.recv(1)


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    board = HandoverBoard(tmp_path / "board", 2, create=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] - 1
        endpoint = RankEndpoint(content, BYTES, board.rank(1), 1, "127.0.0.1", port)
        endpoint.obey(encode_command(Receive(1, KEY, 1)))
    assert board.numbers("listening", 1) == [None, 0]


def test_the_board_keeps_totals(tmp_path: Path) -> None:
    board = HandoverBoard(tmp_path / "board", 2, create=True)
    board.totals.sent += 3
    board.totals.seconds += 0.75
    other = HandoverBoard(tmp_path / "board", 2).totals
    assert (other.sent, other.received, other.seconds) == (3, 0, 0.75)
    assert HandoverBoard.beside(str(tmp_path / "nowhere" / "board"), 2) is None
