"""An executor as a host: models come, sleep and go while others answer, and its own process stays."""

import asyncio
import contextlib
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from services.executor.supervisor.host.jobs import HostJobKind
from services.executor.supervisor.host.memory import RANK_OVERHEAD
from services.executor.supervisor.service import ExecutorService
from shared.config import CommonSettings
from shared.errors import InvalidRequest
from shared.messages import (
    DispatchBatch,
    DispatchReply,
    GenerationRequest,
    GroupBeat,
    Heartbeat,
    HostCommand,
    HostModel,
    HostReply,
    LoadModel,
    ModelSettings,
    ModelSpec,
    PullAdapter,
    PullModel,
    RemoveModel,
    SamplingParams,
    UnloadModel,
)
from shared.messages.registry import StartTraining
from shared.nats import subjects
from shared.nats.adapters import AdapterFiles
from shared.nats.bus import Bus
from tests.adapters import make_adapter
from tests.integration.executor.reader import Reader
from tests.integration.executor.rings import make_served_model
from tests.processes import ServiceProcess, service_process
from tests.unit.executor.model.peft_adapters import base_of, save_adapter, targets_in

INSTANCE = "host"
KV = 1 << 20
MEMORY = 3 * (RANK_OVERHEAD + KV)  # of three groups of the stub


class Host:
    """A real executor process without a model."""

    def __init__(self, bus: Bus, process: ServiceProcess) -> None:
        self.bus = bus
        self.process = process

    async def tell(self, command: HostCommand) -> HostReply:
        return await self.bus.request(subjects.host_control(INSTANCE), command, HostReply, timeout=30)

    async def load(self, model: str, source: str = "stub", **settings: object) -> HostReply:
        return await self.tell(LoadModel(f"{model}-group", spec(model, source, **settings)))

    async def load_again(self, model: str, source: str = "stub", **settings: object) -> None:
        """One that may be on its way out still."""
        while not (reply := await self.load(model, source, **settings)).ok:
            assert "is being unloaded" in reply.error
            await self.until(lambda beat: True)

    async def unload(self, model: str, **how: object) -> HostReply:
        return await self.tell(UnloadModel(f"{model}-group", **how))  # type: ignore[arg-type]

    async def until(self, holds: Callable[[Heartbeat], bool]) -> Heartbeat:
        return await self.process.wait_for(holds)

    async def ready(self, *models: str) -> list[GroupBeat]:
        """Waits until these are its groups, and all of them ready."""
        beat = await self.until(
            lambda beat: (
                sorted(group.group for group in beat.groups) == sorted(f"{model}-group" for model in models)
                and all(group.state == "ready" for group in beat.groups)
            )
        )
        return sorted(beat.groups, key=lambda group: group.group)

    async def said(self, model: str, state: str) -> HostModel:
        beat = await self.until(lambda beat: model_of(beat, model).state == state)
        return model_of(beat, model)

    async def gone(self, model: str) -> None:
        """Waits until its group is gone, and its memory given back."""
        await self.until(
            lambda beat: (
                f"{model}-group" not in [group.group for group in beat.groups]
                and beat.host is not None
                and beat.host.used == sum(group.memory for group in beat.groups)
            )
        )

    async def dispatch(self, model: str, name: str, tokens: int = 8) -> None:
        request = GenerationRequest(
            generation_id=name,
            request_id=name,
            model=model,
            consumer="me",
            prompt=[1, 2, 3],
            max_tokens=tokens,
            sampling=SamplingParams(seed=1),
        )
        subject = subjects.dispatch(f"{model}-group")
        reply = await self.bus.request(subject, DispatchBatch([request]), DispatchReply, timeout=30)
        assert reply.accepted == [name], reply


def spec(model: str, source: str = "stub", **settings: object) -> ModelSpec:
    given = {"kv_memory": KV, **settings}
    return ModelSpec(model, source, settings=ModelSettings(**given))  # type: ignore[arg-type]


def model_of(beat: Heartbeat, model: str) -> HostModel:
    models = beat.host.models if beat.host is not None else []
    return next((one for one in models if one.model == model), HostModel(model, "stored", error="not told"))


@pytest.fixture
async def host(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> AsyncIterator[Host]:
    async with host_with(bus, nats_settings, tmp_path) as found:
        yield found


@contextlib.asynccontextmanager
async def host_with(
    bus: Bus, settings: CommonSettings, directory: Path, *more: str, engine: str = "stub"
) -> AsyncIterator[Host]:
    arguments = ("--engine", engine, "--takes-models", "--host-memory", str(MEMORY), "--stub-step-ms", "5")
    arguments += ("--model-cache", str(directory / "cache"), "--handover-timeout", "0", *more)
    async with service_process(bus, settings, "services.executor", directory, *arguments, instance=INSTANCE) as process:
        beat = await process.wait_ready()
        assert not beat.groups
        assert beat.host.takes_models
        yield Host(bus, process)


@pytest.mark.slow
async def test_two_models_answer_side_by_side_and_one_is_unloaded(host: Host, reader: Reader) -> None:
    assert (await host.load("a")).ok
    assert (await host.load("b")).memory == RANK_OVERHEAD + KV
    a, b = await host.ready("a", "b")
    assert (a.model, b.model) == ("a", "b")
    await asyncio.gather(host.dispatch("a", "one"), host.dispatch("b", "two"))
    assert len((await reader.finish("one"))[0]) == len((await reader.finish("two"))[0]) == 8
    told = await host.said("a", "stored")
    assert told.load_seconds > 0
    address = host.process.beats[-1].address
    metrics = await asyncio.to_thread(_read, f"http://{address}/metrics")
    assert metrics.count("# TYPE ryzanstein_executor_output_tokens_total") == 1
    for name in ("a", "b"):
        assert f'executor_output_tokens_total{{group="{name}-group",model="{name}"}} 8.0' in metrics
    [promised] = re.findall(r"\nryzanstein_executor_host_memory_promised_bytes (\S+)", metrics)
    assert float(promised) == 2 * (RANK_OVERHEAD + KV)
    assert 'ryzanstein_executor_model_loads_total{result="loaded"} 2.0' in metrics

    pids = [rank.pid for rank in a.ranks]
    assert (await host.unload("a")).ok
    await host.gone("a")
    assert not any(map(psutil.pid_exists, pids))
    assert (await host.unload("a")).ok, "what is gone already is no error"
    await host.dispatch("b", "three")
    await reader.finish("three")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


@pytest.mark.slow
async def test_the_model_that_an_executor_was_started_with_goes_and_comes_too(
    bus: Bus, nats_settings: CommonSettings, reader: Reader, tmp_path: Path
) -> None:
    arguments = ("--engine", "stub", "--takes-models", "--served-model-name", "a", "--group", "own")
    arguments += ("--host-memory", str(MEMORY), "--stub-step-ms", "5", "--handover-timeout", "0")
    async with service_process(
        bus, nats_settings, "services.executor", tmp_path, *arguments, instance=INSTANCE
    ) as process:
        own = Host(bus, process)
        await own.until(lambda beat: [group.state for group in beat.groups] == ["ready"])
        assert (await own.tell(UnloadModel("own"))).ok
        await own.until(lambda beat: not beat.groups)
        assert (await own.load("a")).ok
        await own.ready("a")
        await own.dispatch("a", "one")
        assert len((await reader.finish("one"))[0]) == 8


@pytest.mark.parametrize("gone", ExecutorService.job_kinds, ids=lambda kind: kind.settings.__name__)
async def test_without_a_kind_of_jobs_it_starts_and_serves(
    bus: Bus, nats_settings: CommonSettings, reader: Reader, monkeypatch: pytest.MonkeyPatch, gone: HostJobKind
) -> None:
    kinds = tuple(kind for kind in ExecutorService.job_kinds if kind is not gone)
    monkeypatch.setattr(ExecutorService, "job_kinds", kinds)
    values = {"engine": "stub", "served_model_name": "a", "group": "a-group", "instance": INSTANCE}
    made = ExecutorService.settings_type()
    assert not set(made.model_fields) & set(gone.settings.model_fields) - set(CommonSettings.model_fields)
    service = ExecutorService(made(**{**nats_settings.model_dump(), **values}))
    running = asyncio.create_task(service.run())
    try:
        async with asyncio.timeout(30):
            [group] = service._host.groups.values()
            await group.ready.wait()
        host = Host(bus, process=None)  # type: ignore[arg-type]
        await host.dispatch("a", "one")
        assert len((await reader.finish("one"))[0]) == 8
        assert not service.host_beat().trains
        reply = await host.tell(StartTraining("job", "t", 1))
        assert (reply.ok, reply.code) == (False, InvalidRequest.code)
        assert "ryzanstein_executor_trainings" not in {one.name for one in service.registry.collect()}
    finally:
        service.end()
        await running


@pytest.mark.slow
async def test_a_killed_rank_of_one_group_leaves_the_others_untouched(host: Host, reader: Reader) -> None:
    await host.load("a", tp=2)
    await host.load("b")
    a, b = await host.ready("a", "b")
    os.kill(a.ranks[1].pid, signal.SIGKILL)
    beat = await host.until(
        lambda beat: any(
            group.group == "a-group" and group.state == "ready" and group.epoch > a.epoch for group in beat.groups
        )
    )
    [same] = [group for group in beat.groups if group.group == "b-group"]
    assert (same.epoch, [rank.pid for rank in same.ranks]) == (b.epoch, [rank.pid for rank in b.ranks])
    await host.dispatch("b", "one")
    await reader.finish("one")


async def test_what_does_not_fit_is_refused_with_its_bytes_before_anything_starts(host: Host) -> None:
    reply = await host.load("a", kv_memory=MEMORY)
    assert (reply.ok, reply.code, reply.memory) == (False, "model_does_not_fit", MEMORY + RANK_OVERHEAD)
    assert f"takes {MEMORY + RANK_OVERHEAD} bytes" in reply.error
    for name in ("a", "b", "c"):
        assert (await host.load(name)).ok
    assert not (await host.load("d")).ok
    await host.ready("a", "b", "c")
    await host.unload("b", force=True)
    await host.gone("b")
    assert (await host.load("d")).ok
    await host.ready("a", "c", "d")


async def test_two_loads_at_once_are_one_and_another_spec_is_refused(host: Host) -> None:
    replies = await asyncio.gather(*(host.load("a") for _ in range(5)))
    assert [reply.ok for reply in replies] == [True] * 5
    [group] = await host.ready("a")
    assert len(group.ranks) == 1
    other = await host.load("a", max_waiting=3)
    assert (other.ok, "with other settings" in other.error) == (False, True)
    wrong = await host.load("x", tp=65)
    assert not wrong.ok
    assert "tp: " in wrong.error


async def test_a_load_is_cancelled_by_an_unload(host: Host) -> None:
    """Again and again: each load is at another point by then."""
    for _ in range(5):
        await host.load_again("a", tp=2)
        assert (await host.unload("a", force=True)).ok
    await host.load_again("a")
    await host.ready("a")
    assert not [model for beat in host.process.beats if (model := model_of(beat, "a")).state == "failed"]


async def test_a_model_sleeps_and_wakes_and_makes_way(host: Host) -> None:
    await host.load("a")
    await host.ready("a")
    await host.unload("a", sleep=True)
    await host.gone("a")
    await host.said("a", "sleeping")
    await host.load("a")
    await host.ready("a")
    assert (await host.said("a", "stored")).load_seconds > 0


async def test_files_that_are_no_model_fail_with_the_reason_and_the_host_lives(host: Host, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    assert (await host.load("a", str(broken))).ok
    failed = await host.said("a", "failed")
    assert "vocab_size" in failed.error
    assert failed.failed_at > 0
    assert (await host.load("b")).ok
    await host.ready("b")


async def test_commands_that_nobody_understands_are_answered(host: Host) -> None:
    subject = subjects.host_control(INSTANCE)
    answer = await host.bus.client.request(subject, b"\xc1", timeout=10)
    reply = msgspec.msgpack.decode(answer.data, type=HostReply)
    assert (reply.ok, reply.code) == (False, "invalid_request")
    assert (await host.tell(PullModel(spec("p")))).ok
    await host.said("p", "stored")
    assert (await host.tell(RemoveModel(spec("p")))).ok


async def test_an_executor_that_ends_drains_all_its_groups(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, reader: Reader
) -> None:
    async with host_with(bus, nats_settings, tmp_path, "--drain-grace", "20") as host:
        await host.load("a")
        await host.load("b")
        groups = await host.ready("a", "b")
        for name in ("a", "b"):
            await host.dispatch(name, f"of {name}", tokens=64)
        pids = [rank.pid for group in groups for rank in group.ranks]
        assert await host.process.end() == 0
        for name in ("a", "b"):
            tokens, last = await reader.finish(f"of {name}")
            assert (len(tokens), last.finish) == (64, "length"), "what ran was let finish"
        assert not any(map(psutil.pid_exists, pids))


async def test_a_download_is_cancelled_by_an_unload_and_by_the_end(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    """Its process reads a file that never comes to an end."""
    file = tmp_path / "model.gguf"
    os.mkfifo(file)
    async with host_with(bus, nats_settings, tmp_path, engine="torch") as host:
        assert (await host.load("a", str(file))).ok
        await host.said("a", "downloading")
        await host.unload("a")
        await host.load_again("a", str(file))
        await host.said("a", "downloading")
        assert (await host.tell(PullModel(spec("p", str(file))))).ok
        await host.said("p", "downloading")
        assert await host.process.end() == 0


async def test_an_adapter_is_read_checked_and_stored(host: Host, tmp_path: Path) -> None:
    digest = make_adapter(tmp_path / "adapter", 7)
    base = spec("a")
    reply = await host.tell(PullAdapter("mine", "a", str(tmp_path / "adapter"), base))
    assert (reply.adapter.digest, reply.adapter.rank, reply.adapter.model) == (digest, 8, "a")
    assert await AdapterFiles(host.bus).has(digest)
    for source, more, what in (
        (tmp_path / "nowhere", {}, "there is no such directory"),
        (tmp_path, {}, "adapter_config.json"),
        (tmp_path / "adapter", {"max_adapter_rank": 4}, "has the rank 8"),
        (tmp_path / "adapter", {"max_adapters": 0}, "takes no adapters"),
    ):
        refused = await host.tell(PullAdapter("mine", "a", str(source), spec("a", **more)))
        assert not refused.ok
        assert what in refused.error


TORCH = ("--device", "cpu", "--dtype", "fp32", "--threads", "1", "--host-memory", str(1 << 30))


@pytest.mark.slow
async def test_models_that_compute_come_sleep_and_give_their_memory_back(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path, reader: Reader
) -> None:
    one, two = make_served_model(tmp_path / "one"), make_served_model(tmp_path / "two", seed=1)
    async with host_with(bus, nats_settings, tmp_path, *TORCH, engine="torch") as host:
        assert (await host.load("a", str(one), kv_memory=None)).ok
        assert (await host.load("b", str(two), kv_memory=4 << 20)).ok
        a, b = await host.ready("a", "b")
        assert min(a.memory, b.memory) > a.kv_bytes > 0
        await host.dispatch("a", "first")
        text, _ = await reader.finish("first")
        await host.dispatch("b", "other")
        assert len((await reader.finish("other"))[0]) == 8

        await host.unload("a", sleep=True)
        await host.gone("a")
        asleep = await host.said("a", "sleeping")
        assert asleep.total == sum(path.stat().st_size for path in one.glob("*.safetensors"))
        assert not any(psutil.pid_exists(rank.pid) for rank in a.ranks)
        assert (await host.load("a", str(one), kv_memory=None)).ok
        await host.ready("a", "b")
        await host.dispatch("a", "again")
        assert (await reader.finish("again"))[0] == text

        base = spec("a", str(one))
        save_adapter(base_of(one), tmp_path / "adapter", targets_in(one), 4)
        reply = await host.tell(PullAdapter("mine", "a", str(tmp_path / "adapter"), base))
        assert reply.adapter is not None, reply.error
        assert reply.adapter.rank == 4
        assert await AdapterFiles(host.bus).has(reply.adapter.digest)
        (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
        refused = await host.tell(PullAdapter("mine", "a", str(tmp_path / "adapter"), base))
        assert not refused.ok

        no_model = tmp_path / "none"
        no_model.mkdir()
        (no_model / "config.json").write_text('{"model_type": "nothing"}')
        assert (await host.load("c", str(no_model))).ok
        assert "nothing" in (await host.said("c", "failed")).error
        missing = await host.load("d", str(tmp_path / "missing"))
        assert missing.ok
        assert "missing" in (await host.said("d", "failed")).error
        await host.dispatch("b", "last")
        await reader.finish("last")

        await host.unload("b")
        kept = make_served_model(tmp_path / "cache" / "kept")
        assert (await host.load("e", str(kept), kv_memory=4 << 20)).ok
        await host.ready("a", "e")
        other = await host.tell(RemoveModel(spec("other", str(kept))))
        assert "are those of the group e-group" in other.error
        assert (await host.tell(RemoveModel(spec("e", str(kept))))).ok
        await host.dispatch("e", "to the end")
        assert len((await reader.finish("to the end"))[0]) == 8
        assert kept.is_dir(), "while a group has them"
        await host.unload("e")
        await host.gone("e")
        await host.load_again("e", str(kept), kv_memory=4 << 20)
        assert str(kept) in (await host.said("e", "failed")).error  # of the directory, or of what was still in it
        assert not kept.exists()


async def test_an_executor_with_a_model_takes_no_others_unless_it_is_told_to(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    async with service_process(
        bus, nats_settings, "services.executor", tmp_path, "--engine", "stub", instance=INSTANCE
    ) as process:
        await process.wait_ready()
        reply = await Host(bus, process).load("a")
        assert (reply.ok, reply.code) == (False, "invalid_request")
