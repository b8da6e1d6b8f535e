"""Every other host's side: starts ranks when host 0 says so, and passes on what they say."""

import asyncio
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import msgspec
import structlog

from services.executor.core.settings import ExecutorSettings, thread_count
from services.executor.ipc.board import RingBoard
from services.executor.ipc.flight_recorder import FlightRecorder
from services.executor.ipc.proofs import MessageMac, is_proof, proof
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_transfer.board import HandoverBoard
from services.executor.supervisor.multinode import wire
from services.executor.supervisor.multinode.wire import Channel, LineLost
from services.executor.supervisor.ranks.rank_process import ForkClient, LocalRank, fork_client
from shared.messages import ServiceName
from shared.process import VERSION
from shared.service.endpoints import Health
from shared.service.lifecycle import Service
from shared.tasks import Backoff

log = structlog.get_logger(__name__)

LONGEST_PAUSE = 5.0  # seconds before host 0 is tried again, at most
# Settings that are a host's own; the others are those of host 0.
OWN = (
    "model_cache",
    "model_cache_bytes",
    "model_directory",
    "hub_endpoint",
    "downloads",
    "weight_cache_bytes",
    "weight_cache_directory",
    "kv_disk_directory",
    "threads",
    "pin_threads",
    "replicas_on_host",
    "log_level",
    "log_format",
)


class _Rank:
    """A rank that was asked for; started once its specification has come."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: LocalRank | None = None
        self.inputs: asyncio.Queue[bytes] = asyncio.Queue()


class NodeRanks:
    """The ranks of one ring on this host, from the first `Begin` to the end of the last one."""

    def __init__(self, settings: ExecutorSettings, epoch: int, line: Channel[wire.ToNode], forks: ForkClient) -> None:
        self._settings = settings
        self._forks = forks
        self._line = line
        self.epoch = epoch
        self._directory = Path(tempfile.mkdtemp(prefix="ryzanstein-ring-"))
        self._board = RingBoard(self._directory / "board", settings.tp, create=True)
        FlightRecorder.beside(self._directory / "board", settings.tp, create=True)
        HandoverBoard(HandoverBoard.path(self._directory / "board"), settings.tp, create=True)
        self._ranks: dict[int, _Rank] = {}
        self._tasks: list[asyncio.Task[None]] = [asyncio.create_task(self._report())]

    def begin(self, rank: int) -> None:
        self._ranks[rank] = mine = _Rank(rank)
        self._tasks.append(asyncio.create_task(self._run(mine)))

    def tell(self, rank: int, line: bytes) -> None:
        if (mine := self._ranks.get(rank)) is not None:
            mine.inputs.put_nowait(line)

    async def end(self) -> None:
        """Nothing of it is left afterwards."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank in self._ranks.values():
            if rank.process is not None:
                rank.process.kill()
                code = await rank.process.wait()
                rank.process.close()
                self._line.send(wire.Ended(rank.number, self.epoch, code))
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _run(self, rank: _Rank) -> None:
        spec = self._own(msgspec.json.decode(await rank.inputs.get(), type=RankSpec))
        settings = ExecutorSettings.model_validate(spec.settings)
        process = rank.process = await LocalRank.start(thread_count(settings), settings, self._forks)
        process.tell(msgspec.json.encode(spec) + b"\n")
        feeding = asyncio.create_task(_feed(process, rank.inputs))
        try:
            async for event in process.events:
                self._line.send(wire.RankEvent(rank.number, self.epoch, event))
            code = await process.wait()
        finally:
            feeding.cancel()
        self._line.send(wire.Ended(rank.number, self.epoch, code))

    def _own(self, spec: RankSpec) -> RankSpec:
        """`spec` with what is this host's own."""
        own = self._settings.model_dump(mode="json", include=set(OWN))
        return msgspec.structs.replace(
            spec,
            board=str(self._directory / "board"),
            settings=spec.settings | own | {"node_rank": self._settings.node_rank},
        )

    async def _report(self) -> None:
        while True:
            self._line.send(wire.Rows(self.epoch, {rank: self._board.row(rank) for rank in self._ranks}))
            await asyncio.sleep(wire.ROWS)


async def _feed(process: LocalRank, inputs: "asyncio.Queue[bytes]") -> None:
    while True:
        process.tell(await inputs.get())


class RingNode(Service):
    name: ClassVar[ServiceName] = "executor"

    def __init__(self, settings: ExecutorSettings) -> None:
        super().__init__(settings)
        self._executor_settings = settings
        self._forks = fork_client(settings)
        self._secret = settings.ring_secret.get_secret_value().encode()
        self._live: NodeRanks | None = None
        self._met = False
        self._reason = "host 0 has not been reached yet"

    async def run(self) -> None:
        self._forks.start()
        try:
            await super().run()
        finally:
            self._forks.close()

    async def start(self) -> None:
        self.spawn(self._keep_in_touch(), "host 0")

    async def stop(self) -> None:
        """The line ends, so host 0 knows that the ring is lost."""
        await self._end_ranks()

    def health(self) -> Health:
        base = super().health()
        if not base.ready or self._met:
            return base
        return Health(self.name, self.instance, self.state, ready=False, reason=self._reason)

    async def _keep_in_touch(self) -> None:
        pauses = Backoff(LONGEST_PAUSE)
        address = f"{self._executor_settings.master_addr}:{self._executor_settings.master_port}"
        while True:
            try:
                line = await self._line_to_head()
                pauses = Backoff(LONGEST_PAUSE)
                await self._talk(line)
            except LineLost as error:
                reason = f"host 0 at {address} is not there: {error}"
                if reason != self._reason:
                    log.warning("head_node_unreachable", address=address, reason=str(error))
                self._reason = reason
            await asyncio.sleep(pauses.next(time.monotonic()))

    async def _line_to_head(self) -> Channel[wire.ToNode]:
        """A line whose other end knows the secret. Raises `LineLost`."""
        settings = self._executor_settings
        try:
            async with asyncio.timeout(wire.GREETING):
                reader, writer = await asyncio.open_connection(settings.master_addr, settings.master_port)
        except (OSError, TimeoutError) as error:
            raise LineLost(str(error) or "no answer") from None
        line = wire.to_node(reader, writer)
        try:
            return await self._greeted(line)
        except BaseException:
            await line.close()
            raise

    async def _greeted(self, line: Channel[wire.ToNode]) -> Channel[wire.ToNode]:
        challenge = await line.receive(wire.GREETING)
        if not isinstance(challenge, wire.Challenge):
            raise LineLost("it asked for no proof")
        number, nonce = self._executor_settings.node_rank, secrets.token_bytes(32)
        side, nonces = f"node {number}", challenge.nonce + nonce
        line.send(wire.Hello(number, nonce, proof(self._secret, side, challenge.nonce), VERSION))
        answer = await line.receive(wire.GREETING)
        if isinstance(answer, wire.Refused):
            raise LineLost(f"it refuses this host, because {answer.reason}")
        if not isinstance(answer, wire.Welcome) or not is_proof(answer.proof, self._secret, "head", nonce):
            raise LineLost("it does not know the ring's secret")
        return line.protected(MessageMac(self._secret, side, nonces), MessageMac(self._secret, "head", nonces))

    async def _talk(self, line: Channel[wire.ToNode]) -> None:
        """For as long as the line holds. Raises `LineLost`."""
        self._met = True
        log.info("head_node_connected")
        try:
            while True:
                await self._on_message(line, await line.receive())
        finally:
            self._met = False
            await self._end_ranks()
            await line.close()

    async def _on_message(self, line: Channel[wire.ToNode], message: wire.ToNode) -> None:
        ranks = self._live
        if isinstance(message, wire.Begin):
            if ranks is None or ranks.epoch != message.epoch:
                await self._end_ranks()
                self._forks.start()  # where it has ended meanwhile
                ranks = self._live = NodeRanks(self._executor_settings, message.epoch, line, self._forks)
            ranks.begin(message.rank)
        elif isinstance(message, wire.Input):
            if ranks is not None and ranks.epoch == message.epoch:
                ranks.tell(message.rank, message.line)
        elif isinstance(message, wire.Kill) and ranks is not None and ranks.epoch <= message.epoch:
            await self._end_ranks()

    async def _end_ranks(self) -> None:
        ranks, self._live = self._live, None
        if ranks is not None:
            await ranks.end()
