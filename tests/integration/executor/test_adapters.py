"""A ring computes each request with its own LoRA adapter, and fetches what is not on its host's disk."""

import asyncio
from pathlib import Path

import pytest

from services.executor.worker.stub import adapted, stub_token
from shared.config import CommonSettings
from shared.messages import DispatchBatch, DispatchReply, GenerationRequest, SamplingParams
from shared.nats import subjects
from shared.nats.adapters import AdapterFiles
from shared.nats.bus import Bus
from tests.adapters import register, store_adapter
from tests.integration.executor.reader import Reader
from tests.processes import ServiceProcess, service_process


def request(name: str, digest: str, **fields: object) -> GenerationRequest:
    usual = {"prompt": [5, 6, 7], "max_tokens": 24, "sampling": SamplingParams(seed=9), "adapter": digest}
    return GenerationRequest(name, "r", "stub", "me", **(usual | fields))  # type: ignore[arg-type]


def text_of(digest: str, length: int = 24) -> list[int]:
    return [stub_token(adapted(9, digest), position) for position in range(length)]


async def hand_in(bus: Bus, *requests: GenerationRequest) -> DispatchReply:
    return await bus.request(subjects.dispatch("g"), DispatchBatch(list(requests)), DispatchReply, timeout=10)


def arguments(cache: Path, *more: str) -> tuple[str, ...]:
    return ("--engine", "stub", "--group", "g", "--model-cache", str(cache), "--stub-step-ms", "1", *more)


async def until_beat(process: ServiceProcess, adapters: set[str]) -> None:
    async with asyncio.timeout(20):
        while True:
            beat = await process.wait_ready(20)
            if beat.group is not None and set(beat.group.adapters) == adapters:
                return
            await asyncio.sleep(0.1)


async def test_each_request_has_its_adapters_text(
    bus: Bus, nats_settings: CommonSettings, reader: Reader, tmp_path: Path
) -> None:
    """More adapters than slots, some registered before the executor starts, others never."""
    digests = [await store_adapter(bus, tmp_path, number) for number in range(5)]
    await register(bus, "zero", "stub", digests[0])
    await register(bus, "other", "another model", digests[1])
    cache = tmp_path / "cache"
    more = arguments(cache, "--max-adapters", "2", "--max-sequences", "4")
    async with service_process(bus, nats_settings, "services.executor", tmp_path, *more, instance="e") as process:
        await process.wait_ready()
        await until_fetched(process, digests[0])
        requests = [request(f"{turn}-{at}", one) for turn in range(3) for at, one in enumerate([*digests, ""])]
        reply = await hand_in(bus, *requests)
        assert len(reply.accepted) == len(requests)
        for one in requests:
            tokens, last = await reader.finish(one.generation_id)
            assert (tokens, last.finish) == (text_of(one.adapter), "length")
        late = await store_adapter(bus, tmp_path, 99)
        await register(bus, "late", "stub", late)
        await until_fetched(process, late)
        await hand_in(bus, request("late", late), request("first", digests[0]))
        assert (await reader.finish("late"))[0] == text_of(late)
        assert (await reader.finish("first"))[0] == text_of(digests[0])
        await until_beat(process, {late, digests[0]})


async def until_fetched(process: ServiceProcess, digest: str) -> None:
    async with asyncio.timeout(30):
        while True:
            lines = process.log.read_text().splitlines()
            if any("adapter_fetched" in line and digest in line for line in lines):
                return
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_what_cannot_be_had_is_refused_and_others_are_not(
    bus: Bus, nats_settings: CommonSettings, reader: Reader, tmp_path: Path
) -> None:
    good, large = await store_adapter(bus, tmp_path, 1), await store_adapter(bus, tmp_path, 2, rank=200)
    false = "ab" * 32
    files = AdapterFiles(bus)
    await files.open()
    await files.put(false, tmp_path / "1", "test")
    more = arguments(tmp_path / "cache", "--max-adapter-rank", "16")
    async with service_process(bus, nats_settings, "services.executor", tmp_path, *more, instance="e") as process:
        await process.wait_ready()
        bad = {"large": large, "false": false, "missing": "cd" * 32}
        reply = await hand_in(
            bus, request("good", good), *(request(name, digest) for name, digest in bad.items()), request("no", "../x")
        )
        assert [refusal.generation_id for refusal in reply.refused] == ["no"]
        assert "64 hexadecimal digits" in reply.refused[0].message
        said = {}
        for name in bad:
            _, last = await reader.finish(name)
            assert (last.error_code, last.retryable) == ("invalid_request", False)
            said[name] = last.error
        assert "has rank 200, and --max-adapter-rank allows 16" in said["large"]
        assert "are not those it was registered with" in said["false"]
        assert "are not there any more; load the adapter again" in said["missing"]
        assert (await reader.finish("good"))[0] == text_of(good)
    async with service_process(
        bus, nats_settings, "services.executor", tmp_path, *more, "--max-adapters", "0", instance="e"
    ) as process:
        await process.wait_ready()
        reply = await hand_in(bus, request("none", good))
        assert "computes no LoRA adapters" in reply.refused[0].message


@pytest.mark.slow
async def test_an_attempt_goes_on_with_its_adapter(
    bus: Bus, nats_settings: CommonSettings, reader: Reader, tmp_path: Path
) -> None:
    """Under a disk limit that two adapters do not fit together: one makes room for the other."""
    first, second = [await store_adapter(bus, tmp_path, number) for number in range(2)]
    more = arguments(tmp_path / "cache", "--adapter-cache-bytes", "600")
    async with service_process(bus, nats_settings, "services.executor", tmp_path, *more, instance="e") as process:
        await process.wait_ready()
        done = text_of(first)[:10]
        await hand_in(bus, request("g", first, generated=done, attempt=2))
        assert (await reader.finish("g"))[0] == text_of(first)[10:]
        async with asyncio.timeout(30):
            for turn in range(1000):
                await hand_in(bus, request(f"h{turn}", second))
                tokens, last = await reader.finish(f"h{turn}")
                if last.finish == "length":
                    break
                assert "--adapter-cache-bytes" in last.error, "the first is let go of within a beat"
        assert tokens == text_of(second)
