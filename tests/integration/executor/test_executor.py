"""One executor on a real NATS, with the stub engine: dispatch, tokens, cancel, drain, lost rings."""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from services.cli.supervision.nats_server import LocalNats
from services.executor.core.engine import RING
from services.executor.worker.stub import stub_token
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable
from shared.messages import (
    Cancel,
    DispatchBatch,
    DispatchReply,
    Drain,
    EngineTraits,
    GenerationRequest,
    GroupLoad,
    GroupRecord,
    GroupTraits,
    Heartbeat,
    ModelCard,
    TokenFrame,
    Undrain,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.journal import StartPosition, replay
from shared.nats.kv import Bucket
from shared.nats.streams import ensure_streams
from tests.integration.executor.reader import Reader, control, dispatch, request
from tests.processes import ServiceProcess, service_process
from tests.unit.executor.model.lanes import in_lanes

VOCABULARY = 256
Start = Callable[..., contextlib.AbstractAsyncContextManager[ServiceProcess]]


@contextlib.asynccontextmanager
async def executor(
    bus: Bus, settings: CommonSettings, directory: Path, *arguments: str, forked: bool = True
) -> AsyncIterator[ServiceProcess]:
    base = ("--engine", "stub", "--group", "g", "--hung-after", "1")
    async with service_process(
        bus, settings, "services.executor", directory, *base, *arguments, instance="executor-test", forked=forked
    ) as process:
        yield process


@pytest.fixture
def start(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> Start:
    """Starts one of the test's own, with these arguments of its command."""
    return functools.partial(executor, bus, nats_settings, tmp_path)


def expected(seed: int, start: int, stop: int) -> list[int]:
    return [stub_token(seed, position, VOCABULARY) for position in range(start, stop)]


async def test_a_ring_is_newer_than_the_groups_last_one_whatever_its_clock_says(start: Start, bus: Bus) -> None:
    """The group has lived on a host whose clock is a day ahead."""
    groups = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
    ahead = int((time.time() + 86_400) * 1000)
    await groups.put("g", GroupRecord("g", "stub", "gone", ahead, [], GroupLoad()))
    async with start() as process:
        beat = await process.wait_ready()
        assert beat.group.epoch == ahead + 1
        assert beat.group.traits == GroupTraits(["pages", "window"], engine=RING)


async def test_a_ring_that_was_replaced_takes_nothing_more_and_leaves(start: Start, bus: Bus) -> None:
    """Two rings would compute the same requests under one name, and withdraw each other's."""
    async with start() as process:
        beat = await process.wait_ready()
        older = DispatchBatch([request("a", max_tokens=4000)], beat.group.epoch - 1)
        reply = await bus.request(subjects.dispatch("g"), older, DispatchReply, timeout=30)
        assert reply.accepted == ["a"], "a scheduler may lag behind"
        later = DispatchBatch([request("b")], beat.group.epoch + 1)
        with pytest.raises(BrokerUnavailable):
            await bus.request(subjects.dispatch("g"), later, DispatchReply, timeout=0.5)
        assert await asyncio.wait_for(process.process.wait(), 30) == 1
        assert "Another executor now serves the group g" in process.log.read_text()


async def test_accepted_requests_get_their_tokens_once(start: Start, bus: Bus, reader: Reader) -> None:
    async with start() as process:
        await process.wait_ready()
        card = await (await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)).get("stub")
        assert card.value.vocab_size == VOCABULARY
        reply = await dispatch(bus, *(request(f"r{n}", seed=n) for n in range(20)))
        assert len(reply.accepted) == 20
        again = await dispatch(bus, request("r3", seed=3))
        assert again.accepted == ["r3"], "a repeat is accepted, and not computed twice"
        for n in range(20):
            tokens, last = await reader.finish(f"r{n}")
            assert tokens == expected(n, 0, 8)
            assert last.finish == "length"
        continued = request("c", seed=9, max_tokens=10, generated=expected(9, 0, 4))
        await dispatch(bus, continued)
        tokens, last = await reader.finish("c")
        assert (tokens, last.attempt) == (expected(9, 4, 10), 1)
        assert '"request_id": "request-of-r3"' in process.log.read_text()
        assert await process.end() == 0


async def test_what_cannot_fit_is_refused_with_the_reason(start: Start, bus: Bus) -> None:
    async with start("--stub-context-length", "64") as process:
        await process.wait_ready()
        long = GenerationRequest("long", "", "stub", "me", [1] * 64, 8)
        reply = await dispatch(bus, long)
        assert [refusal.code for refusal in reply.refused] == ["context_length_exceeded"]
        assert not reply.refused[0].retryable


async def test_cancel_ends_a_generation(start: Start, bus: Bus, reader: Reader) -> None:
    async with start("--stub-step-ms", "5") as process:
        await process.wait_ready()
        await dispatch(bus, request("a", max_tokens=5000), request("b", seed=2))
        await reader.some()
        assert (await control(bus, Cancel(["a", "unknown"]))).ok
        _, last = await reader.finish("a")
        assert last.finish == "cancelled"
        assert (await reader.finish("b"))[0] == expected(2, 0, 8), "the other one goes on"


async def test_drain_finishes_what_runs_and_leaves(start: Start, bus: Bus, reader: Reader) -> None:
    async with start("--stub-step-ms", "5", "--drain-grace", "10") as process:
        await process.wait_ready()
        await dispatch(bus, request("a", max_tokens=40))
        await control(bus, Drain())
        reply = await dispatch(bus, request("late"))
        assert [(one.code, one.retryable) for one in reply.refused] == [("no_group_available", True)]
        assert (await reader.finish("a"))[0] == expected(1, 0, 40)
        assert await asyncio.wait_for(process.process.wait(), 20) == 0
        assert "ring_lost" not in process.log.read_text(), "leaving in good order is no loss"


async def test_a_token_budget_below_the_batch_is_refused(start: Start) -> None:
    async with start("--max-batch-tokens", "8") as process:
        assert await asyncio.wait_for(process.process.wait(), 30) == 1
        assert "error: max_batch_tokens is 8, fewer than max_sequences (64)" in process.log.read_text()


async def test_shutdown_hands_back_what_it_cannot_finish(start: Start, bus: Bus, reader: Reader) -> None:
    async with start("--stub-step-ms", "5", "--drain-grace", "0") as process:
        await process.wait_ready()
        await dispatch(bus, request("a", max_tokens=5000))
        await reader.some()
        assert await process.end() == 0
        tokens, last = await reader.finish("a")
        assert (last.finish, last.retryable) == ("error", True)
        assert tokens == expected(1, 0, len(tokens)), "what was sent stays valid"


@pytest.mark.slow
async def test_batch_work_makes_way_and_goes_on_where_it_was(start: Start, bus: Bus, reader: Reader) -> None:
    """The ring has one place."""
    options = ("--stub-step-ms", "5", "--max-sequences", "1")
    async with start(*options) as process:
        await process.wait_ready()
        bulk = msgspec.structs.replace(request("b", max_tokens=300), lane="batch")
        await dispatch(bus, bulk)
        await reader.some()
        await dispatch(bus, request("i", seed=2, max_tokens=20))
        assert (await reader.finish("i"))[0] == expected(2, 0, 20)
        assert not [entry for entry in reader.entries if entry.generation_id == "b" and entry.finish]
        assert (await reader.finish("b"))[0] == expected(1, 0, 300)


@pytest.mark.slow
async def test_starved_batch_work_ends_at_its_deadline(start: Start, bus: Bus, reader: Reader) -> None:
    options = ("--stub-step-ms", "5", "--max-sequences", "1")
    async with start(*options) as process:
        await process.wait_ready()
        late = msgspec.structs.replace(request("b"), lane="batch", deadline=time.time() + 0.5)
        await dispatch(bus, request("i", seed=2, max_tokens=1000), late)
        _, last = await reader.finish("b")
        assert (last.error_code, last.retryable) == ("deadline_exceeded", False)
        assert not [entry for entry in reader.entries if entry.generation_id == "i" and entry.finish]


async def test_a_drain_can_be_taken_back_until_the_executor_stops(start: Start, bus: Bus, reader: Reader) -> None:
    async with start("--stub-step-ms", "5", "--drain-grace", "30") as process:
        await process.wait_ready()
        await dispatch(bus, request("a", max_tokens=8000))
        assert (await control(bus, Drain(600.0))).ok
        assert (await dispatch(bus, request("b"))).refused
        assert (await control(bus, Undrain())).ok
        assert (await dispatch(bus, request("c", seed=3))).accepted == ["c"]
        assert (await reader.finish("c"))[0] == expected(3, 0, 8)
        process.process.send_signal(signal.SIGTERM)
        await process.wait_for(lambda beat: beat.state == "draining")
        while not (await dispatch(bus, request("d"))).refused:
            pass  # the leader hears of it a moment later
        reply = await control(bus, Undrain())
        assert not reply.ok
        assert reply.error == "The executor of the group g is stopping; start it again."
        process.process.kill()  # it would wait for the long one


@pytest.mark.parametrize(
    ("rank", "number"),
    in_lanes(
        [(rank, number) for rank in (0, 1) for number in (signal.SIGSTOP, signal.SIGKILL)],
        [(1, signal.SIGKILL)],
        [(0, signal.SIGSTOP)],
    ),
)
async def test_a_lost_rank_takes_the_ring_down_and_up_again(
    start: Start, bus: Bus, reader: Reader, number: signal.Signals, rank: int
) -> None:
    async with start("--tp", "2", "--stub-step-ms", "2") as process:
        before = (await process.wait_ready()).group
        assert len(before.ranks) == 2
        await dispatch(bus, request("a", max_tokens=5000))
        await reader.some()
        os.kill(before.ranks[rank].pid, number)

        def is_back(beat: Heartbeat) -> bool:
            group = beat.group
            return group is not None and group.state == "ready" and group.epoch > before.epoch

        after = (await process.wait_for(is_back)).group
        assert not {one.pid for one in before.ranks} & {one.pid for one in after.ranks}, "a whole new ring"
        told = [beat.group for beat in process.beats if beat.group and beat.group.epoch == before.epoch]
        assert (told[-1].state, told[-1].ranks) == ("starting", []), "the loss is told under the lost ring's epoch"
        for old in before.ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(old.pid, 0)
        await dispatch(bus, request("b", seed=5))
        assert (await reader.finish("b"))[0] == expected(5, 0, 8)


@pytest.mark.slow
async def test_ranks_do_not_outlive_a_killed_orchestrator(start: Start) -> None:
    async with start("--tp", "2") as process:
        group = (await process.wait_ready()).group
        pids = [rank.pid for rank in group.ranks]
        await process.end(signal.SIGKILL)
        ranks = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, 10)
        assert not alive


async def test_operations_endpoint(start: Start) -> None:
    import httpx

    async with start() as process, httpx.AsyncClient(trust_env=False) as client:
        url = f"http://{(await process.wait_ready()).address}"
        assert (await client.get(f"{url}/health")).status_code == 200
        assert (await client.get(f"{url}/ready")).json()["ready"] is True
        metrics = (await client.get(f"{url}/metrics")).text
        of_group = '{group="g",model="stub"}'
        assert f"ryzanstein_executor_kv_blocks{of_group} " in metrics
        assert f"ryzanstein_executor_ring_restarts_total{of_group} 0.0" in metrics
        assert 'vllm:num_requests_running{group="g",model_name="stub"} 0.0' in metrics
        assert (await client.get(f"{url}/nothing")).status_code == 404
        assert (await client.post(f"{url}/metrics")).status_code == 405


async def test_a_draft_model_changes_no_token(start: Start, bus: Bus, reader: Reader) -> None:
    """Two ranks, and sequences that come to their ends one after the other."""
    import httpx

    options = ("--tp", "2", "--stub-step-ms", "10", "--stub-draft-right", "0.8", "--stub-draft-ms", "0.1")
    async with start(*options) as process, httpx.AsyncClient(trust_env=False) as client:
        beat = await process.wait_ready()
        requests = [request(name, max_tokens=60 + 20 * at, seed=at) for at, name in enumerate("abcd")]
        await dispatch(bus, *requests)
        for at, name in enumerate("abcd"):
            tokens, last = await reader.finish(name)
            assert (tokens, last.finish) == (expected(at, 0, 60 + 20 * at), "length")
        metrics = (await client.get(f"http://{beat.address}/metrics")).text
        counted = {
            line.split("{")[0].removeprefix("ryzanstein_executor_"): float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("ryzanstein_executor_")
        }
        drafted, accepted = (counted[f"draft_model_{kind}_tokens_total"] for kind in ("drafted", "accepted"))
        assert 0 < accepted <= drafted <= counted["drafted_tokens_total"]
        assert counted["draft_model_passes_total"] > 0
        assert 0 < counted["draft_model_seconds_total"] < counted["step_seconds_total"]


async def test_metrics_are_there_while_the_leader_is_hung(start: Start, bus: Bus, reader: Reader) -> None:
    import httpx

    async with start("--hung-after", "60") as process, httpx.AsyncClient(trust_env=False) as client:
        beat = await process.wait_ready()
        await dispatch(bus, request("a", seed=5))
        await reader.finish("a")
        leader = psutil.Process(beat.group.ranks[0].pid)
        leader.suspend()
        try:
            metrics = (await client.get(f"http://{beat.address}/metrics")).text
        finally:
            leader.resume()
        of_group = '{group="g",model="stub"}'
        for stage in ("queue", "prefill", "decode"):
            assert f"ryzanstein_executor_{stage}_seconds_count{of_group} 1.0" in metrics
        assert f"ryzanstein_executor_output_tokens_total{of_group} 8.0" in metrics


async def test_no_model_is_said_in_one_sentence(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> None:
    empty = ("--no-takes-models",)
    async with service_process(
        bus, nats_settings, "services.executor", tmp_path, *empty, instance="executor-x"
    ) as process:
        assert await asyncio.wait_for(process.process.wait(), 20) == 1
        lines = process.log.read_text().splitlines()
        assert lines[-1].startswith("error: No model is named; give --model")
        assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("tokenizer", "traits", "said"),
    [
        ("another", None, "serves another model under the name stub;"),
        (
            "",
            GroupTraits(engine=EngineTraits("vllm", "vLLM 1")),
            "computes stub with vLLM 1, and this one with a ring:",
        ),
    ],
)
async def test_a_name_that_another_model_or_engine_has_is_refused(
    start: Start, bus: Bus, tokenizer: str, traits: GroupTraits | None, said: str
) -> None:
    if tokenizer:
        cards = await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)
        await cards.put("stub", ModelCard("stub", 100, 100, [], tokenizer, 0))
    groups = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
    await groups.put("other", GroupRecord("other", "stub", "ready", 1, [], GroupLoad(), traits=traits))
    async with start() as process:
        assert await asyncio.wait_for(process.process.wait(), 30) == 1
        assert process.log.read_text().splitlines()[-1].startswith(f"error: The group other {said}")


@pytest.mark.slow
async def test_no_token_is_lost_when_the_broker_is_killed(tmp_path: Path) -> None:
    """Frames that were on their way to the broker are published again; the journal has every token."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = LocalNats(tmp_path / "nats", port=port)
    await server.start()
    settings = server.settings(beat_interval=0.1)
    bus = await Bus.connect(settings, "test")
    await ensure_streams(bus)
    reader = Reader()
    await bus.subscribe(subjects.tokens("me"), TokenFrame, reader.on_frame)
    began = time.time() - 1
    async with executor(bus, settings, tmp_path, "--stub-step-ms", "2") as process:
        await process.wait_ready()
        await dispatch(bus, request("a", max_tokens=1000))
        await reader.some()
        os.kill(server.pid, signal.SIGKILL)
        await server.stop()
        await server.start()
        async with asyncio.timeout(30):
            while not (reader.entries and reader.entries[-1].finish):
                await reader.more()
        tokens: dict[int, int] = {}
        async for frame in replay(bus, "me", StartPosition(since=began)):
            for entry in frame.entries:
                tokens.update(enumerate(entry.tokens, entry.position))
        assert [tokens.get(position) for position in range(1000)] == expected(1, 0, 1000)
    await bus.close()
    await server.stop()
