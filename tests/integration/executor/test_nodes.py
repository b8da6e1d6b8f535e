"""A ring over two hosts, both of them processes here: it computes, is lost with either, and comes back whole."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from benchmarks.peers.servers import free_port
from services.executor.ipc.proofs import proof as proof_of
from services.executor.supervisor.multinode import wire
from shared.config import CommonSettings
from shared.messages import Heartbeat
from shared.nats.bus import Bus
from shared.process import VERSION
from tests.integration.executor.reader import Reader, dispatch, request
from tests.integration.executor.test_executor import expected
from tests.processes import ServiceProcess, service_process
from tests.unit.executor.model.tiny import make_model
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files


class Hosts:
    """Settings that make processes hosts of one ring."""

    def __init__(self, bus: Bus, settings: CommonSettings, directory: Path, *ring: str) -> None:
        self._bus = bus
        self._settings = settings
        self._directory = directory
        self.port = free_port()
        self._ring = ring

    def host(
        self, node: int, *more: str, secret: str = "one"
    ) -> contextlib.AbstractAsyncContextManager[ServiceProcess]:
        arguments = ("--group", "g", "--hung-after", "2", "--tp", "2", "--nnodes", "2", "--node-rank", str(node))
        where = ("--master-addr", "127.0.0.1", "--master-port", str(self.port))
        return service_process(
            self._bus,
            self._settings,
            "services.executor",
            self._directory,
            *arguments,
            *where,
            *self._ring,
            *more,
            instance=f"host-{node}",
            variables={"RYZANSTEIN_RING_SECRET": secret},
        )


@pytest.fixture
def stubs(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> Hosts:
    return Hosts(bus, nats_settings, tmp_path, "--engine", "stub", "--stub-step-ms", "5")


async def until_logged(process: ServiceProcess, words: str) -> None:
    """Looks again with each of its heartbeats."""
    await process.wait_for(lambda _: words in process.log.read_text())


def is_ready(beat: Heartbeat) -> bool:
    return beat.group is not None and beat.group.state == "ready"


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[wire.Channel[wire.ToNode]]:
    async with asyncio.timeout(30):
        while True:
            try:
                line = wire.to_node(*await asyncio.open_connection("127.0.0.1", port))
                break
            except OSError:
                await asyncio.sleep(0.05)
    try:
        yield line
    finally:
        await line.close()


async def test_both_hosts_are_one_ring_that_drains_in_good_order(stubs: Hosts, bus: Bus, reader: Reader) -> None:
    async with stubs.host(0) as head:
        waiting = await head.wait_for(lambda beat: beat.group is not None and "waits for" in beat.group.message)
        assert (waiting.group.state, waiting.group.message) == ("starting", "the ring waits for its host 1")
        async with stubs.host(1) as other:
            beat = await head.wait_for(lambda beat: is_ready(beat) and len(beat.group.ranks) == 2)  # type: ignore[union-attr]
            assert beat.group is not None
            await dispatch(bus, request("a", max_tokens=40))
            assert (await reader.finish("a"))[0] == expected(1, 0, 40)
            await head.wait_for(lambda beat: is_ready(beat) and beat.group.ranks[1].step > 0)  # type: ignore[union-attr]
            assert await head.end() == 0
            assert "ring_lost" not in head.log.read_text()
            assert await other.end() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
async def test_a_host_that_goes_takes_the_ring_with_it_until_it_is_back(
    stubs: Hosts, bus: Bus, reader: Reader, number: signal.Signals
) -> None:
    async with stubs.host(0) as head:
        async with stubs.host(1) as other:
            first = await head.wait_ready()
            await dispatch(bus, request("a", max_tokens=4000))
            await reader.some()
            other.process.send_signal(number)
            lost = await head.wait_for(lambda beat: beat.group is not None and bool(beat.group.message))
            assert lost.group.message == "rank 1 (on host 1) ended with signal SIGKILL"
        async with stubs.host(1):
            again = await head.wait_for(is_ready)
            assert again.group.epoch > first.group.epoch
            await dispatch(bus, request("b", seed=2))
            assert (await reader.finish("b"))[0] == expected(2, 0, 8)


@pytest.mark.slow
async def test_host_0_that_is_killed_leaves_no_rank_behind(stubs: Hosts, bus: Bus, reader: Reader) -> None:
    async with stubs.host(1) as other:
        async with stubs.host(0) as head:
            await head.wait_ready()
            head.process.kill()
            await head.process.wait()
        async with stubs.host(0) as head:
            await head.wait_ready()
            await dispatch(bus, request("b", seed=2))
            assert (await reader.finish("b"))[0] == expected(2, 0, 8)
            assert other.process.returncode is None


@pytest.mark.slow
async def test_a_stopped_rank_of_another_host_is_hung(stubs: Hosts, bus: Bus, reader: Reader) -> None:
    """Its row of the board stands still, as it would on one host."""
    async with stubs.host(0) as head, stubs.host(1):
        beat = await head.wait_for(lambda beat: is_ready(beat) and len(beat.group.ranks) == 2)  # type: ignore[union-attr]
        await dispatch(bus, request("a", max_tokens=4000))
        await reader.some()
        os.kill(beat.group.ranks[1].pid, signal.SIGSTOP)
        lost = await head.wait_for(lambda beat: beat.group is not None and bool(beat.group.message))
        assert "rank 1" in lost.group.message
        assert "is hung" in lost.group.message
        await head.wait_for(lambda later: is_ready(later) and later.group.epoch > beat.group.epoch)  # type: ignore[union-attr]


@pytest.mark.slow
async def test_a_model_over_two_hosts_says_what_it_says_on_one(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, reader: Reader
) -> None:
    directory = make_model(tmp_path / "tiny", "llama", vocab_size=300)
    for name, data in tiny_files().items():
        (directory / name).write_bytes(data)
    model = ("--model", str(directory), "--served-model-name", "tiny", "--dtype", "fp32", "--threads", "1")
    hosts = Hosts(bus, nats_settings, tmp_path, *model, "--kv-memory", "20000000")
    asked = msgspec.structs.replace(request("a", max_tokens=20), model="tiny", prompt=list(range(5, 45)))
    async with hosts.host(0) as head, hosts.host(1):
        await head.wait_ready()
        await dispatch(bus, asked)
        spread, _ = await reader.finish("a")
        assert len(spread) == 20
        assert await head.end() == 0
    reader.entries.clear()
    alone = ("--group", "g", "--tp", "2", "--collectives", "gloo", "--kv-memory", "20000000")
    async with service_process(
        bus, nats_settings, "services.executor", tmp_path, *alone, *model, instance="alone"
    ) as process:
        await process.wait_ready()
        await dispatch(bus, msgspec.structs.replace(asked, generation_id="b"))
        assert (await reader.finish("b"))[0] == spread


async def test_a_host_without_the_secret_or_with_a_taken_place_is_refused(stubs: Hosts) -> None:
    async with stubs.host(0) as head:
        async with stubs.host(1, secret="another") as stranger:
            await until_logged(stranger, "it does not know the ring's secret")
        assert "node_rejected" in head.log.read_text()
        async with stubs.host(1):
            await head.wait_ready()
            async with connected(stubs.port) as line:
                challenge = await line.receive()
                assert isinstance(challenge, wire.Challenge)
                proof = proof_of(b"one", "node 1", challenge.nonce)
                line.send(wire.Hello(1, b"", proof, VERSION))
                refused = await line.receive()
                assert isinstance(refused, wire.Refused)
                assert "is there already" in refused.reason


async def test_whoever_speaks_otherwise_is_left(stubs: Hosts) -> None:
    async with stubs.host(0) as head, connected(stubs.port):
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"):
            stranger, writer = await asyncio.open_connection("127.0.0.1", stubs.port)
            writer.write(said)
            writer.write_eof()
            await asyncio.wait_for(stranger.read(), 20)
            writer.close()
        async with stubs.host(1):
            await head.wait_ready()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--nnodes", "2", "--tp", "3"), "tp 3 does not divide by nnodes 2"),
        (("--nnodes", "2", "--tp", "2"), "master_addr is not set"),
        (("--nnodes", "2", "--tp", "2", "--master-addr", "x"), "ring_secret is not set"),
        (("--nnodes", "2", "--tp", "2", "--node-rank", "2"), "node_rank 2 is not below nnodes 2"),
        (("--node-rank", "1"), "node_rank is above 0"),
    ],
)
async def test_wrong_settings_are_told(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    given = ("--engine", "stub", *arguments)
    async with service_process(bus, nats_settings, "services.executor", tmp_path, *given, instance="x") as process:
        assert await asyncio.wait_for(process.process.wait(), 30) == 1
        assert reason in process.log.read_text()
