"""The model of nats-server as clients see it, byte by byte."""

import asyncio
import json
import random
from typing import Any

import pytest

from tests.simulation.broker import protocol
from tests.simulation.broker.__main__ import parse, users_of
from tests.simulation.broker.configs import Permissions
from tests.simulation.broker.disk import Disk
from tests.simulation.broker.jetstream import JetStream
from tests.simulation.broker.protocol import Connection
from tests.simulation.broker.server import Server


class Client:
    """One end of a connection, the transport of the other."""

    def __init__(self, server: Server, **options: Any) -> None:
        self.written, self.waiting = b"", 0
        self.closed = asyncio.Event()
        self.connection = Connection(server, 1)
        self.connection.connection_made(self)
        self.take()
        told = {"no_responders": True, "headers": True, "name": "client", **options}
        self.greeting = self.say(f"CONNECT {json.dumps(told)}")

    def say(self, *lines: str) -> bytes:
        """Returns what it is told."""
        self.connection.data_received("".join(f"{line}\r\n" for line in lines).encode())
        return self.take()

    def take(self) -> bytes:
        written, self.written = self.written, b""
        return written

    def ask(self, subject: str, content: object = None) -> dict[str, Any]:
        """What JetStream's API answers."""
        body = "" if content is None else json.dumps(content)
        answer = self.say("SUB _INBOX.api 99", f"PUB $JS.API.{subject} _INBOX.api {len(body)}", body)
        self.say("UNSUB 99")
        told: dict[str, Any] = json.loads(answer.split(b"\r\n")[1])
        return told

    # --- as a transport ----------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed.set()
        self.connection.connection_lost(None)

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    @property
    def closing(self) -> bool:
        return self.closed.is_set()

    def get_write_buffer_size(self) -> int:
        return self.waiting


@pytest.fixture
async def server() -> Server:
    return Server("n", random.Random(1))


async def test_lines_may_come_in_any_pieces(server: Server) -> None:
    client = Client(server)
    data = b"SUB a.* 7\r\nPUB a.b 5\r\nhello\r\nHPUB a.c 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPING\r\n"
    for at in range(len(data)):
        client.connection.data_received(data[at : at + 1])
    told = b"MSG a.b 7 5\r\nhello\r\nHMSG a.c 7 12 14\r\nNATS/1.0\r\n\r\nhi\r\nPONG\r\n"
    assert client.take() == told
    client.connection.data_received(data)
    assert client.take() == told


async def test_who_breaks_the_protocol_is_cut_off(server: Server) -> None:
    for line, told in (
        ("FOO", b"Unknown Protocol Operation"),
        (f"PUB a {server.max_payload + 1}", b"Maximum Payload Violation"),
        ("PUB a b", b"Parser Error"),
        ("SUB", b"Parser Error"),
        ("PUB " + "a" * 5000, b"Maximum Control Line Exceeded"),
    ):
        client = Client(server)
        assert told in client.say(line)
        assert client.closing
    client = Client(server)
    client.connection.data_received(b"x" * 5000)
    assert client.closing
    assert not server.connections


async def test_who_does_not_read_is_cut_off_as_a_slow_consumer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WRITE_DEADLINE", 0.0)
    watcher, slow, slower = Client(server), Client(server), Client(server)
    watcher.say("SUB health.connections.closed 1")
    slow.say("SUB a 1")
    slow.waiting = server.max_pending
    told = watcher.say("PUB a 1", "x")
    assert slow.closing
    assert json.loads(told.split(b"\r\n")[1])["reason"] == "Slow Consumer (Pending Bytes)"
    slower.connection.pause_writing()
    slower.connection.resume_writing()
    await asyncio.sleep(0)
    assert not slower.closing
    slower.connection.pause_writing()
    await asyncio.wait_for(slower.closed.wait(), 10)
    assert b"Slow Consumer (Write Deadline)" in watcher.take()


async def test_who_answers_no_ping_is_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PING_INTERVAL", 0.0)
    client = Client(server)
    await asyncio.wait_for(client.closed.wait(), 10)
    assert client.take() == b"PING\r\n" * protocol.MOST_PINGS + b"-ERR 'Stale Connection'\r\n"


async def test_a_full_disk_switches_jetstream_off_until_it_is_started_again() -> None:
    disk, draw = Disk(), random.Random(1)
    server = Server("n", draw, jetstream=lambda clients: JetStream(clients, draw, disk=disk))
    client = Client(server)
    client.ask("STREAM.CREATE.S", {"name": "S", "subjects": ["s"]})
    client.say("SUB r 1")
    assert client.say("PUB s r 0", "") == b'MSG r 1 22\r\n{"stream":"S","seq":1}\r\n'
    disk.full = True
    assert b'"err_code": 10023' in client.say("PUB s r 0", "")
    disk.full = False
    assert b"NATS/1.0 503" in client.say("PUB s r 0", ""), "nobody takes it"
    assert client.ask("STREAM.INFO.S")["error"]["err_code"] == 10076
    again = Server("n", draw, jetstream=lambda clients: JetStream(clients, draw, disk=disk))
    assert Client(again).ask("STREAM.INFO.S")["state"]["last_seq"] == 1


def test_a_configuration_is_read() -> None:
    config = parse(
        'listen: 127.0.0.1:-1\n# a line\njetstream { store_dir: "/x y", max_file_store: 5 }\n'
        'accounts { SYS { exports: [{ stream: "a.b", accounts: [RYZANSTEIN] }] } RYZANSTEIN { users: [\n'
        '  { user: "u", password: "p:\\"", permissions { publish { allow: [\n "a.>"\n "b" ] } } }\n] } }\n'
    )
    assert config["listen"] == "127.0.0.1:-1"
    assert config["jetstream"] == {"store_dir": "/x y", "max_file_store": "5"}
    assert users_of(config) == {"u": ('p:"', Permissions(("a.>", "b"), None))}
