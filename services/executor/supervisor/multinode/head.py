"""Host 0's side: the other hosts that have come, and their ranks as if they were processes of its own."""

import asyncio
import secrets
import signal
from collections.abc import Callable

import msgspec
import structlog

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RingBoard
from services.executor.ipc.proofs import MessageMac, is_proof, proof
from services.executor.supervisor.multinode import wire
from services.executor.supervisor.multinode.wire import Channel, LineLost
from shared.errors import ConfigurationError
from shared.process import VERSION

log = structlog.get_logger(__name__)


class RemoteRank:
    def __init__(self, send: Callable[[msgspec.Struct], None], where: str, rank: int, epoch: int, board: RingBoard):
        """`send`: to its host."""
        self.events = asyncio.StreamReader()  # a line for each event; ends with the process
        self.where = where
        self.returncode: int | None = None
        self.rank = rank
        self.epoch = epoch
        self._send = send
        self._board = board
        self._ended = asyncio.Event()
        send(wire.Begin(rank, epoch))

    def tell(self, line: bytes) -> None:
        self._send(wire.Input(self.rank, self.epoch, line))

    def kill(self) -> None:
        """Its host ends all of its ranks."""
        if self.returncode is None:
            self._send(wire.Kill(self.epoch))

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None, "it has ended"
        return self.returncode

    def close(self) -> None:
        """Its host reads its events for as long as it lives."""

    # --- what its host says ----------------------------------------------------------------------

    def on_event(self, line: bytes) -> None:
        if self.returncode is None:
            self.events.feed_data(line)

    def on_row(self, row: list[int]) -> None:
        if self.returncode is None:
            self._board.put_row(self.rank, row)

    def on_end(self, code: int) -> None:
        """Once; later ones change nothing."""
        if self.returncode is None:
            self.returncode = code
            self.events.feed_eof()
            self._ended.set()


class _Node:
    def __init__(self, line: Channel[wire.ToHead], number: int) -> None:
        self.line = line
        self.number = number
        self.ranks: dict[int, RemoteRank] = {}  # of the ring that is up, by rank

    def on_message(self, message: wire.ToHead) -> None:
        if isinstance(message, wire.Rows):
            for rank, row in message.rows.items():
                if (known := self._rank(rank, message.epoch)) is not None:
                    known.on_row(row)
        elif (
            isinstance(message, wire.RankEvent | wire.Ended)
            and (known := self._rank(message.rank, message.epoch)) is not None
        ):
            if isinstance(message, wire.RankEvent):
                known.on_event(message.line)
            else:
                known.on_end(message.code)

    def _rank(self, rank: int, epoch: int) -> RemoteRank | None:
        known = self.ranks.get(rank)
        return known if known is not None and known.epoch == epoch else None

    def lost(self) -> None:
        """Its ranks have ended for us; it ends them itself."""
        for rank in self.ranks.values():
            rank.on_end(-signal.SIGKILL)


class HeadNode:
    """Listens for the other hosts of the ring, for as long as the supervisor lives."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._secret = settings.ring_secret.get_secret_value().encode()
        self._nodes: dict[int, _Node] = {}
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises `ConfigurationError` where the address cannot be listened on."""
        host, port = self._settings.master_addr, self._settings.master_port
        try:
            self._server = await asyncio.start_server(self._on_connection, host, port)
        except OSError as error:
            raise ConfigurationError(
                f"Host 0 of the ring cannot listen on {host}:{port} ({error.strerror or error}); set --master-addr to "
                "an address of this host, and --master-port to a free port."
            ) from None

    def missing(self) -> list[int]:
        return [node for node in range(1, self._settings.nnodes) if node not in self._nodes]

    async def complete(self) -> None:
        while self.missing():
            self._changed.clear()
            await self._changed.wait()

    def begin(self, rank: int, epoch: int, board: RingBoard) -> RemoteRank:
        """Starts the process of `rank`; where its host has left meanwhile, it has ended at once."""
        number = rank // self._settings.ranks_here
        where, node = f"on host {number}", self._nodes.get(number)
        if node is None:
            process = RemoteRank(lambda message: None, where, rank, epoch, board)
            process.on_end(-signal.SIGKILL)
        else:
            process = node.ranks[rank] = RemoteRank(node.line.send, where, rank, epoch, board)
        return process

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for talk in list(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    # --- one line --------------------------------------------------------------------------------

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        line = wire.to_head(reader, writer)
        try:
            node = await self._greeted(line)
            if node is not None:
                await self._talk(node)
        except LineLost as error:
            log.warning("node_timed_out", reason=str(error))
        finally:
            await line.close()
            self._talks.discard(task)

    async def _greeted(self, line: Channel[wire.ToHead]) -> _Node | None:
        """The host that has come; None for one that is refused. Raises `LineLost`."""
        nonce = secrets.token_bytes(32)
        line.send(wire.Challenge(nonce))
        hello = await line.receive(wire.GREETING)
        if not isinstance(hello, wire.Hello):
            raise LineLost("it did not identify itself")
        reason = self._objection(hello, nonce)
        if reason:
            log.warning("node_rejected", host=hello.node, reason=reason)
            line.send(wire.Refused(reason))
            return None
        line.send(wire.Welcome(proof(self._secret, "head", hello.nonce)))
        nonces = nonce + hello.nonce
        sent, received = (MessageMac(self._secret, side, nonces) for side in ("head", f"node {hello.node}"))
        return _Node(line.protected(sent, received), hello.node)

    def _objection(self, hello: wire.Hello, nonce: bytes) -> str:
        """Why it is refused; empty: it is not. The secret comes first: others are told nothing."""
        if not is_proof(hello.proof, self._secret, f"node {hello.node}", nonce):
            return "it does not know the ring's secret; give all hosts the same RYZANSTEIN_RING_SECRET"
        if hello.version != VERSION:
            return f"it runs version {hello.version} and host 0 runs {VERSION}; install the same on all hosts"
        if not 1 <= hello.node < self._settings.nnodes:
            return f"its node rank {hello.node} is not one of 1 to {self._settings.nnodes - 1}"
        if hello.node in self._nodes:
            return f"host {hello.node} is there already; give each host a node rank of its own"
        return ""

    async def _talk(self, node: _Node) -> None:
        """For as long as the line holds."""
        self._nodes[node.number] = node
        self._changed.set()
        log.info("node_joined", host=node.number, missing=len(self.missing()))
        beating = asyncio.create_task(_beat(node.line))
        try:
            while True:
                node.on_message(await node.line.receive())
        except LineLost as error:
            log.warning("node_left", host=node.number, reason=str(error))
        finally:
            beating.cancel()
            del self._nodes[node.number]
            node.lost()


async def _beat(line: Channel[wire.ToHead]) -> None:
    while True:
        line.send(wire.Alive())
        await asyncio.sleep(wire.BEAT)
