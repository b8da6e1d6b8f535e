"""An executor whose engine schedules for itself, on a real NATS: what reaches the log when the engine works, lies, dies
or stands still. The engine is scripted (`scripted_engine.py`) and speaks as vLLM's worker does."""

import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from services.cli.commands.debug import fetch_dump
from shared.config import CommonSettings
from shared.messages import (
    Cancel,
    Drain,
    EngineTraits,
    Grammar,
    GroupLoad,
    GroupRecord,
    GroupTraits,
    Heartbeat,
    HostReply,
    LoadModel,
    ModelCard,
    ModelSpec,
    PullAdapter,
    SamplingParams,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.executor import reader
from tests.integration.executor.reader import Reader, control, dispatch
from tests.integration.executor.scripted_engine import WRONG, token_at
from tests.integration.executor.test_executor import Start
from tests.processes import ServiceProcess, service_process
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

ENGINE = Path(__file__).parent / "scripted_engine.py"
CONFIG = {"model_type": "llama", "vocab_size": 258, "max_position_embeddings": 512, "eos_token_id": 1}
CONFIG |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
request = functools.partial(reader.request, model="tiny")


@contextlib.asynccontextmanager
async def executor(
    bus: Bus, settings: CommonSettings, directory: Path, *arguments: str, **script: object
) -> AsyncIterator[ServiceProcess]:
    model = directory / "tiny"
    model.mkdir()
    for name, content in {**tiny_files(), "config.json": json.dumps(CONFIG).encode()}.items():
        (model / name).write_bytes(content)
    (directory / "script").write_text(json.dumps(script))
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {ENGINE} {directory / "script"} "$@"\n')
    python.chmod(0o755)
    base = ("--engine", "vllm", "--engine-python", str(python), "--model", str(model), "--group", "g")
    async with service_process(
        bus, settings, "services.executor", directory, *base, *arguments, instance="executor-test"
    ) as process:
        yield process


@pytest.fixture
def start(bus: Bus, nats_settings: CommonSettings, tmp_path: Path) -> Start:
    """Starts one of the test's own, with these arguments of its command."""
    return functools.partial(executor, bus, nats_settings, tmp_path)


def expected(seed: int, start: int, stop: int) -> list[int]:
    return [token_at(seed, position) for position in range(start, stop)]


@pytest.mark.parametrize("wide", [1, 3])
async def test_tokens_come_once_and_a_continuation_goes_on(
    start: Start, bus: Bus, tmp_path: Path, reader: Reader, wide: int
) -> None:
    options = ("--context-length", "300", "--engine-args", "--kv-cache-dtype 'fp8'")
    async with start(*options, wide=wide) as process:
        beat = await process.wait_ready()
        assert beat.group.kernels == "Scripted 1.0"
        card = await (await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)).get("tiny")
        assert (card.value.exact, card.value.vocab_size, card.value.tasks) == (True, 258, ["generate"])
        arguments = (tmp_path / "arguments").read_text().split("\n")
        assert arguments[-2:] == ["--kv-cache-dtype", "fp8"]
        assert "300" in arguments
        assert "--max-num-seqs" not in arguments, "nobody has set RYZANSTEIN_MAX_SEQUENCES"
        reply = await dispatch(bus, *(request(f"r{n}", seed=n) for n in range(20)))
        assert len(reply.accepted) == 20
        assert (await dispatch(bus, request("r3", seed=3))).accepted == ["r3"], "a repeat is not computed twice"
        for n in range(20):
            tokens, last = await reader.finish(f"r{n}")
            assert (tokens, last.finish) == (expected(n, 0, 8), "length")
        await dispatch(bus, request("c", seed=9, max_tokens=10, generated=expected(9, 0, 4)))
        assert (await reader.finish("c"))[0] == expected(9, 4, 10)
        assert await process.end() == 0


async def replaced(process: ServiceProcess, bus: Bus) -> None:
    """Has the engine lost while it computes `a`, and waits for a later one; nothing of the first is left."""
    before = await process.wait_ready()
    (engine,) = engines_of(process)
    await dispatch(bus, request("a", max_tokens=100))
    await process.wait_for(lambda beat: is_later(beat, before))
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


async def test_an_engine_that_dies_is_started_again(start: Start, bus: Bus, reader: Reader) -> None:
    async with start(once="die") as process:
        await replaced(process, bus)
        told = [token for entry in reader.entries for token in entry.tokens]
        assert told == expected(1, 0, len(told)), "what was told stays valid"
        await dispatch(bus, request("a", max_tokens=30, generated=told))
        assert (await reader.finish("a"))[0] == expected(1, 0, 30)
        assert "vLLM has ended: signal 9" in process.log.read_text()


async def test_a_failure_that_is_told_is_not_waited_for_and_suspects_what_was_computed(start: Start, bus: Bus) -> None:
    """The engine itself goes on: it is ended."""
    async with start(once="fail") as process:
        await replaced(process, bus)
        log = process.log.read_text()
        assert "Scripted to fail." in log
        assert '"cause": "crashed", "suspects": ["a"]' in log


async def test_a_stopped_engine_is_replaced_and_nothing_of_it_is_left(start: Start, bus: Bus, reader: Reader) -> None:
    async with start("--hung-after", "1", once="stop") as process:
        await replaced(process, bus)
        log = process.log.read_text()
        assert '"cause": "external"' in log, "who stops a process is to blame, and not the requests"
        await dispatch(bus, request("b", max_tokens=30, seed=2))
        assert (await reader.finish("b"))[0] == expected(2, 0, 30)


async def test_an_engine_that_goes_on_and_computes_nothing_is_seen_by_its_tokens(start: Start, bus: Bus) -> None:
    options = ("--hung-after", "1", "--engine-step-timeout", "1")
    async with start(*options, once="mute") as process:
        await replaced(process, bus)
        assert '"cause": "hung"' in process.log.read_text()


async def test_cancel_is_an_abort_and_batch_work_makes_way(
    start: Start, bus: Bus, tmp_path: Path, reader: Reader
) -> None:
    """The engine has one place."""
    async with start(places=1) as process:
        await process.wait_ready()
        await dispatch(bus, msgspec.structs.replace(request("b", max_tokens=120), lane="batch"))
        await reader.some()
        await dispatch(bus, request("i", seed=2, max_tokens=20))
        assert (await reader.finish("i"))[0] == expected(2, 0, 20)
        assert (await reader.finish("b"))[0] == expected(1, 0, 120), "it goes on where it was"
        await dispatch(bus, request("c", max_tokens=400))
        assert (await control(bus, Cancel(["c"]))).ok
        assert (await reader.finish("c"))[1].finish == "cancelled"
        await dispatch(bus, request("d", seed=3))
        await reader.finish("d")
        assert (tmp_path / "aborted").read_text().split() == ["b/0/1", "c/0/1"]


async def test_who_looks_into_the_group_sees_what_the_engine_has_and_what_waits(
    start: Start, bus: Bus, nats_settings: CommonSettings, reader: Reader
) -> None:
    """The engine has one place."""
    async with start(places=1) as process:
        await process.wait_ready()
        await dispatch(bus, request("a", max_tokens=400), request("b", seed=2, max_tokens=2))
        await reader.some()
        found = (await fetch_dump(nats_settings, "g", 5.0, 30)).leader
        assert [(one.generation_id, one.state) for one in found.queues] == [("a", "running"), ("b", "waiting")]
        assert found.queues[0].output_tokens > 0
        assert (found.counts["running"], found.counts["waiting"], found.allocator) == (1, 1, None)


async def test_a_drain_hands_back_what_is_not_over(start: Start, bus: Bus, reader: Reader) -> None:
    async with start("--drain-grace", "0") as process:
        await process.wait_ready()
        await dispatch(bus, request("a", max_tokens=400))
        await reader.some()
        await control(bus, Drain())
        tokens, last = await reader.finish("a")
        assert (last.finish, last.retryable) == ("error", True)
        assert tokens == expected(1, 0, len(tokens))
        assert await asyncio.wait_for(process.process.wait(), 20) == 0


async def test_what_the_engine_cannot_do_is_refused_by_its_name(
    start: Start, bus: Bus, tmp_path: Path, reader: Reader
) -> None:
    unsupported = ["pooling", "adapter", "grammar", "penalties"]
    async with start(unsupported=unsupported) as process:
        beat = await process.wait_ready()
        card = await (await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)).get("tiny")
        cannot = ["logprob_token_ids", "sparse", *unsupported]
        assert card.value.engine == EngineTraits("vllm", "Scripted 1.0", cannot), "gateways refuse by it"
        assert beat.group.traits == GroupTraits(engine=card.value.engine)
        told = request("g")
        asked = (
            msgspec.structs.replace(told, grammar=Grammar("regex", "a+")),
            msgspec.structs.replace(told, sampling=SamplingParams(frequency_penalty=1.0)),
            msgspec.structs.replace(told, embed=True, max_tokens=1),
            msgspec.structs.replace(told, adapter="0" * 64),
        )
        for one, what in zip(asked, ("structured output", "penalties", "embeddings", "LoRA adapters"), strict=True):
            (refused,) = (await dispatch(bus, one)).refused
            assert (refused.code, refused.retryable) == ("invalid_request", False)
            assert refused.message.startswith("Scripted 1.0, which computes this model, does not support")
            assert what in refused.message
        command = PullAdapter("polite", "tiny", str(tmp_path / "adapter"), ModelSpec("tiny", ""))
        reply = await bus.request(subjects.host_control("executor-test"), command, HostReply, timeout=60)
        assert reply.error == "Scripted 1.0, which computes this model, does not support LoRA adapters."


@pytest.mark.parametrize("other", ["ring", "sglang"])
async def test_another_kind_of_engine_under_one_name_is_refused_unless_it_is_allowed(
    start: Start, bus: Bus, nats_settings: CommonSettings, tmp_path: Path, other: str
) -> None:
    """As is a ring beside an engine (`tests/integration/executor/test_executor.py`)."""
    groups = await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)
    traits = GroupTraits(engine=EngineTraits(other, "" if other == "ring" else "SGLang 1"))
    await groups.put("other", GroupRecord("other", "tiny", "busy", 1, [], GroupLoad(), traits=traits))
    async with start() as process:
        assert await asyncio.wait_for(process.process.wait(), 60) == 1
        said = f"error: The group other computes tiny with {'a ring' if other == 'ring' else 'SGLang 1'}, and this one"
        assert said in process.log.read_text()
    (tmp_path / "again").mkdir()
    async with executor(bus, nats_settings, tmp_path / "again", "--allow-approximate-continuation") as process:
        await process.wait_ready()


async def test_a_token_that_cannot_be_ends_its_request_alone(start: Start, bus: Bus, reader: Reader) -> None:
    async with start() as process:
        await process.wait_ready()
        wrong = msgspec.structs.replace(request("w"), prompt=[WRONG, 5])
        await dispatch(bus, wrong, request("a", seed=2))
        tokens, last = await reader.finish("w")
        assert (tokens, last.error_code) == ([], "internal_error")
        assert "Scripted 1.0 answered with the token 9999" in last.error
        assert (await reader.finish("a"))[0] == expected(2, 0, 8)


@pytest.mark.parametrize(
    ("options", "script", "words"),
    [
        ((), {"refuses": "vLLM did not start: no such device"}, "vLLM did not start: no such device; look into the"),
        ((), {"exits": "torch.OutOfMemoryError"}, "vLLM did not start: exit code 3, after: torch.OutOfMemoryError."),
        (("--engine-args", "--speculative-config {}"), {}, "--engine-args has --speculative-config, which cannot be"),
        (("--engine-python", "/nowhere/python"), {}, "/nowhere/python cannot be started (No such file or directory)"),
        (("--tp", "2"), {}, "--tp is for the executor's own rings"),
    ],
)
async def test_an_engine_that_does_not_start_and_settings_that_do_not_go_with_it_are_told_in_a_sentence(
    start: Start, options: tuple[str, ...], script: dict[str, str], words: str
) -> None:
    async with start(*options, **script) as process:
        assert await asyncio.wait_for(process.process.wait(), 60) == 1
        assert f"error: {words}" in process.log.read_text()


def is_later(beat: Heartbeat, before: Heartbeat) -> bool:
    """Whether a later engine is ready."""
    assert before.group is not None
    return beat.group is not None and beat.group.state == "ready" and beat.group.epoch > before.group.epoch


def engines_of(process: ServiceProcess) -> list[psutil.Process]:
    children = psutil.Process(process.process.pid).children(recursive=True)
    return [child for child in children if str(ENGINE) in child.cmdline()]


def write_adapter(directory: Path) -> None:
    """As peft saves one of the model's first query projection."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"]
    factors = [np.ones((2, 16), np.float32), np.ones((16, 2), np.float32)]
    save_file(dict(zip(names, factors, strict=True)), directory / "adapter_model.safetensors")


@pytest.mark.slow  # a process that imports PyTorch reads the adapter
async def test_an_adapter_is_read_fetched_and_told_to_the_engine(
    start: Start, bus: Bus, tmp_path: Path, reader: Reader
) -> None:
    write_adapter(tmp_path / "adapter")
    cache = ("--model-cache", str(tmp_path / "cache"))
    async with start(*cache, adapters=1) as process:
        await process.wait_ready()
        command = PullAdapter("polite", "tiny", str(tmp_path / "adapter"), ModelSpec("tiny", "/as/up/says"))
        reply = await bus.request(subjects.host_control("executor-test"), command, HostReply, timeout=60)
        assert reply.adapter is not None, reply.error
        digest = reply.adapter.digest
        asked = [msgspec.structs.replace(request("with"), adapter=digest), request("without")]
        asked.append(msgspec.structs.replace(request("missing"), adapter="f" * 64))
        assert (await dispatch(bus, *asked)).accepted == ["with", "without", "missing"]
        assert (await reader.finish("with"))[0] == [token_at(1, position, digest) for position in range(8)]
        assert (await reader.finish("without"))[0] == expected(1, 0, 8)
        assert "are not there any more" in (await reader.finish("missing"))[1].error
        command = PullAdapter("polite", "tiny", str(tmp_path / "tiny"), ModelSpec("tiny", ""))
        refused = await bus.request(subjects.host_control("executor-test"), command, HostReply, timeout=60)
        assert "adapter_config.json" in refused.error
        other = await bus.request(
            subjects.host_control("executor-test"), LoadModel("x", ModelSpec("x", "hub:x/y")), HostReply, timeout=60
        )
        assert "takes no models" in other.error
