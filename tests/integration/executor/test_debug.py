"""Looking into real rings: well, hung in a collective, with a leader that is stopped or deaf, loading, gone."""

import asyncio
import contextlib
import functools
import gzip
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from services.cli.commands.debug import fetch_dump, fetch_profile
from shared.config import CommonSettings
from shared.errors import ConfigurationError
from shared.messages import GenerationRequest, GroupBeat, GroupLoad, GroupRecord, SamplingParams
from shared.messages.debugging import DebugCommand, Dump, JobReply, ProfileCommand, ProfileSummary, ResultCommand
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.executor.reader import Reader, dispatch, request
from tests.integration.executor.test_executor import executor as some_executor
from tests.processes import ServiceProcess, nats_variables
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.supervisor.test_parts import TOKENIZER

PATIENT = ("--hung-after", "60")
executor = functools.partial(some_executor, forked=False)  # what is looked into is as a user starts it


async def dump_when(settings: CommonSettings, condition: Callable[[Dump], bool]) -> Dump:
    """The first dump that fulfils it. Ranks that are not stopped have time to answer on a busy machine too."""
    async with asyncio.timeout(60):
        while True:
            found = await fetch_dump(settings, "g", 5.0, 30)
            if condition(found):
                return found
            await asyncio.sleep(0.1)


def leader_has_waited(dump: Dump) -> bool:
    """Whether the leader was in its collective when its stacks were taken, and not only when the dump was over."""
    collective = dump.ranks[0].collective if dump.ranks else None
    return collective is not None and collective.in_flight and collective.seconds > dump.took


def is_stopped(dump: Dump, rank: int) -> bool:
    """Whether it was before it was asked: on a busy machine a process runs on, and answers, behind the signal."""
    return dump.ranks[rank].process == "stopped" and not dump.ranks[rank].answered


async def command_line(settings: CommonSettings, directory: Path, *arguments: str) -> str:
    """What `ryzanstein debug` prints."""
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "debug", *arguments),
        env={**os.environ, "RYZANSTEIN_DATA_DIR": str(directory), **nats_variables(settings)},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(command.communicate(), 60)
    assert command.returncode == 0
    return output.decode()


def ring(process: ServiceProcess) -> GroupBeat:
    group = process.beats[-1].group
    assert group is not None
    return group


async def ask(bus: Bus, command: DebugCommand) -> JobReply:
    return await bus.request(subjects.debug("g"), command, JobReply, timeout=30)


async def logged(process: ServiceProcess, event: str) -> list[str]:
    """The lines about `event`, once there are any."""
    async with asyncio.timeout(30):
        while True:
            lines = [line for line in process.log.read_text().splitlines() if f'"{event}"' in line]
            if lines:
                return lines
            await asyncio.sleep(0.05)


async def result(bus: Bus, job: str) -> JobReply:
    async with asyncio.timeout(60):
        while True:
            reply = await ask(bus, ResultCommand(job))
            if reply.done:
                return reply
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, for PyTorch: its float32 is not for the native kernels."""
    directory = make_model(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=4096)
    (directory / "tokenizer.json").write_text(TOKENIZER)
    return directory


@contextlib.asynccontextmanager
async def real_ring(
    bus: Bus, settings: CommonSettings, directory: Path, model: Path, *arguments: str
) -> AsyncIterator[ServiceProcess]:
    """Two ranks that compute."""
    options = ("--engine", "torch", "--model", str(model), "--dtype", "fp32", "--kv-memory", str(64 << 20))
    async with executor(
        bus, settings, directory, *options, "--tp", "2", "--threads", "1", "--speculation", "off", *arguments
    ) as process:
        await process.wait_ready(120)
        yield process


async def give_work(bus: Bus, reader: Reader) -> None:
    """A long generation. Returns once it has begun."""
    work = GenerationRequest("long", "r", "m", "me", [9, 8, 7], 4000, SamplingParams(temperature=0.0))
    assert (await dispatch(bus, work)).accepted == ["long"]
    await reader.some()


@pytest.mark.slow
async def test_a_ring_that_is_well_shows_all_there_is_to_see(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, reader: Reader
) -> None:
    async with executor(bus, nats_settings, tmp_path, "--tp", "2", "--stub-step-ms", "5") as process:
        await process.wait_ready()
        idle = await fetch_dump(nats_settings, "g", 5.0, 30)
        assert idle.verdict == "The ring is idle; step 0 was its last one."
        await dispatch(bus, request("a", max_tokens=5000))
        await reader.some()
        found = await dump_when(nats_settings, lambda dump: any(rank.in_flight for rank in dump.ranks))
        assert re.fullmatch(r"The ring is at work in step \d+; no rank is behind\.", found.verdict)
        assert [rank.pid for rank in found.ranks] == [rank.pid for rank in ring(process).ranks]
        for rank in found.ranks:
            assert rank.answered
            assert rank.stacks[-1].thread == "MainThread"
            assert "supervisor" not in {stack.thread for stack in rank.stacks}, "it told: the rank was not signalled"
            assert [step.step for step in rank.steps] == sorted(step.step for step in rank.steps)
            assert rank.steps[-1].step > 0
            assert len(rank.threads) >= 2
        assert any("leader_ready" in line for line in found.ranks[0].log)
        assert [(one.generation_id, one.state) for one in found.leader.queues] == [("a", "running")]
        assert found.leader.by_loop
        assert found.leader.allocator.invariants == "hold"
        assert found.plans[-1].sequences[0].generation_id == "a"
        assert found.settings["stub_step_ms"] == 5.0
        assert found.versions["msgspec"]
        shown = await command_line(nats_settings, tmp_path, "dump", "g", "--output", str(tmp_path / "file"))
        assert shown.splitlines()[0].startswith("The ring is at work in step")
        kept = msgspec.json.decode((tmp_path / "file").read_bytes(), type=Dump)
        assert kept.epoch == found.epoch, "it does no harm"
        groups = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
        await groups.put("g", GroupRecord("g", "m", "ready", found.epoch, [], GroupLoad()))
        plans = msgspec.json.decode(await command_line(nats_settings, tmp_path, "plans", "--json"))
        assert plans[-1]["step"] >= kept.plans[-1].step
        with pytest.raises(ConfigurationError, match="runs the stub engine, which computes nothing"):
            await fetch_profile(nats_settings, "g", ProfileCommand(), tmp_path / "profile", lambda text: None)


@pytest.mark.slow
async def test_a_rank_that_does_not_come_to_a_collective_is_named_before_the_ring_is_taken_down(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, model: Path, reader: Reader
) -> None:
    """By command, and in the file that is written without one; the other rank is not blamed."""
    async with real_ring(bus, nats_settings, tmp_path, model, "--hung-after", "12") as process:
        await give_work(bus, reader)
        before = ring(process)
        waiting, stopped = (rank.pid for rank in before.ranks)
        os.kill(stopped, signal.SIGSTOP)
        found = await dump_when(nats_settings, lambda dump: leader_has_waited(dump) and is_stopped(dump, 1))
        said = (
            rf"Rank 1 \(process {stopped}\) is stopped by a signal \(SIGSTOP\): rank 0 \(process {waiting}, the "
            r"leader\) waits for it in (all_reduce|gather) number \d+ \([\d,]+ bytes\) for \d+\.\d s\."
        )
        assert re.fullmatch(said, found.verdict)
        first, second = (rank.collective for rank in found.ranks)
        assert first.in_flight
        assert (first.number, found.ranks[0].in_flight) > (second.number, False)
        assert any("shared_memory.py" in frame for stack in found.ranks[0].stacks for frame in stack.frames)
        assert found.ranks[1].stacks_missing == "a stopped process writes no stacks"
        await process.wait_for(lambda beat: beat.group is not None and beat.group.epoch > before.epoch, 60)
        [path] = (tmp_path / "dumps").iterdir()
        kept = msgspec.json.decode(path.read_bytes(), type=Dump)
        assert re.fullmatch(said, kept.verdict)
        assert "is hung in step" in kept.reason
        assert str(path) in process.log.read_text()


@pytest.mark.slow
async def test_a_stopped_leader_does_not_keep_its_ring_from_being_looked_into(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, reader: Reader
) -> None:
    async with executor(bus, nats_settings, tmp_path, "--tp", "2", "--stub-step-ms", "5", *PATIENT) as process:
        await process.wait_ready()
        await dispatch(bus, request("a", max_tokens=5000))
        await reader.some()
        leader = ring(process).ranks[0].pid
        os.kill(leader, signal.SIGSTOP)
        found = await dump_when(nats_settings, lambda dump: is_stopped(dump, 0))
        assert found.verdict.startswith(f"Rank 0 (process {leader}, the leader) is stopped by a signal")
        assert found.leader is None, "it could not tell"
        assert found.ranks[1].answered
        assert found.plans[-1].sequences[0].generation_id == "a", "its plans outlive it"
        assert any('"event": "accepted"' in line for line in found.ranks[0].log)
        os.kill(leader, signal.SIGCONT)
        await dump_when(nats_settings, lambda dump: "no rank is behind" in dump.verdict)


@pytest.mark.slow
async def test_a_ring_that_is_starting_and_one_that_is_not_there_are_told(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    async with executor(bus, nats_settings, tmp_path, "--tp", "2") as process:
        # Before that nobody may listen yet: heartbeats begin before the group does.
        await process.wait_for(lambda beat: beat.group is not None and beat.group.epoch > 0)
        starting = await fetch_dump(nats_settings, "g", 0.3, 30)
        assert starting.state in ("starting", "ready", "none")
        before = (await process.wait_ready()).group
        for rank in before.ranks:
            os.kill(rank.pid, signal.SIGKILL)
        lost = await dump_when(nats_settings, lambda dump: dump.state == "none" or dump.epoch > before.epoch)
        assert "ended with" in lost.message or lost.epoch > before.epoch
    with pytest.raises(ConfigurationError, match="There is no group g; there is none at the moment"):
        await fetch_dump(nats_settings, "g", 0.3, 30)


@pytest.mark.slow
async def test_slow_steps_are_logged_with_what_they_were_made_of(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, reader: Reader
) -> None:
    import httpx

    slow = ("--stub-step-ms", "30", "--slow-step", "20ms", "--log-format", "json")
    async with executor(bus, nats_settings, tmp_path, "--tp", "2", *slow) as process:
        beat = await process.wait_ready()
        await dispatch(bus, request("a", max_tokens=12))
        await reader.finish("a")
        lines = await logged(process, "slow_step")
        assert 1 <= len(lines) < 12, "not every one"
        first = json.loads(lines[0])
        assert first["ms"] >= 20
        assert (first["prefill_tokens"], first["decode_rows"], first["batch"], first["sampled"]) == (3, 0, 1, 1)
        assert [of_rank["rank"] for of_rank in first["ranks"]] == [0, 1]
        assert first["ranks"][0]["ms"] >= 20
        async with httpx.AsyncClient(trust_env=False) as client:
            metrics = (await client.get(f"http://{beat.address}/metrics")).text
        assert re.search(r'^ryzanstein_executor_slow_steps_total\{group="g",model="stub"\} 1[0-9]', metrics, re.M)


@pytest.mark.slow
async def test_steps_are_profiled_on_every_rank_while_the_ring_serves(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, model: Path, reader: Reader
) -> None:
    async with real_ring(bus, nats_settings, tmp_path, model, "--hung-after", "30") as process:
        before = ring(process).epoch

        async def profile(directory: Path, **fields: object) -> list[ProfileSummary]:
            command = msgspec.convert({"type": "profile", "timeout": 60.0, **fields}, ProfileCommand)
            return await fetch_profile(nats_settings, "g", command, directory, lambda text: None)

        with pytest.raises(ConfigurationError, match=r"no step was computed within 0\.5 s\. A ring computes only"):
            await profile(tmp_path / "none", timeout=0.5)
        await give_work(bus, reader)
        found = await profile(tmp_path / "first", steps=6)
        assert [(one.rank, one.steps, one.error) for one in found] == [(0, 6, ""), (1, 6, "")]
        for one in found:
            names = {row.name for row in one.operators}
            assert {"compute", "communicate: all_reduce"} <= names
            events = json.loads(gzip.decompress((tmp_path / "first" / one.trace).read_bytes()))["traceEvents"]
            assert sum(event.get("name") == "compute" for event in events) == 6
        one_rank = await profile(tmp_path / "second", steps=2, ranks=[1], memory=True)
        assert [one.rank for one in one_rank] == [1]
        assert any(row.memory_bytes for row in one_rank[0].operators)
        with pytest.raises(ConfigurationError, match="has no rank 2; its ranks are 0 to 1"):
            await profile(tmp_path / "third", ranks=[2])
        endless = ProfileCommand(steps=0, seconds=60.0, timeout=1.0)
        long = await ask(bus, endless)
        assert "is under way; ask again when it is over" in (await ask(bus, endless)).error
        reply = await result(bus, long.job)
        assert [file.name for file in reply.files][-1] == "summary.json", "what there is when the time is over"
        assert ring(process).epoch == before, "nobody took it for hung"
