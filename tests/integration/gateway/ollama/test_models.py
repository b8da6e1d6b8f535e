"""Ollama's models over the registry: listed, shown, pulled, named again, removed; and how long they stay."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ollama
import pytest

from services.gateway.core.errors import ModelLoadFailed
from services.gateway.dialects.ollama import downloads
from services.gateway.dialects.ollama.downloads import Fetch
from shared.config import CommonSettings
from shared.errors import Unavailable
from shared.messages import HostCommand, HostModel, HostReply, ModelSettings, PullModel
from shared.messages.registry import PullAdapter
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import MODEL, FakeRing, stub_card, until
from tests.integration.gateway.models.test_adapters import Reader, reader  # noqa: F401  # a fixture

HUB = "org/Tiny-1.5B-Chat"
HI = [{"role": "user", "content": "Hi"}]
IGNORED = "x-ryzanstein-ignored-fields"


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=gateway.url, timeout=20) as made:
        yield made


async def known(gateway: RunningGateway, name: str) -> None:
    await until(lambda: name in gateway.service.work.catalog.registry.specs)


async def ready(gateway: RunningGateway, ring: FakeRing, hosts: FakeHosts, **fields: Any) -> None:
    """The stub model is in the registry, and a ring serves it."""
    await hosts.register(MODEL, **fields)
    await ring.put_record("ready")
    await known(gateway, MODEL)
    await until(lambda: gateway.service.work.catalog.has_ready_group(MODEL))


async def test_models_are_listed_and_shown(
    gateway: RunningGateway, client: ollama.AsyncClient, http: httpx.AsyncClient, hosts: FakeHosts, ring: FakeRing
) -> None:
    assert (await http.get("/api/version")).json()["version"].count(".") == 2
    settings = ModelSettings(context_length=512)
    await hosts.register("cold", source=f"{HUB}:Q4_K_M", aliases=["warm:1b"], settings=settings, created=1_700_000_000)
    await hosts.say(HostModel("cold", "stored", total=123))
    await known(gateway, "cold")
    await until(lambda: gateway.service.work.catalog.registry.hosts.get("host-1") is not None)
    await ready(gateway, ring, hosts)
    listed = {one.model: one for one in (await client.list()).models}
    assert sorted(map(str, listed)) == ["cold:latest", f"{MODEL}:latest", "warm:1b"]
    cold = listed["cold:latest"]
    assert (cold.size, cold.modified_at and cold.modified_at.timestamp()) == (123, 1_700_000_000)
    assert (cold.details.format, cold.details.quantization_level) == ("gguf", "Q4_K_M")
    assert (cold.details.family, cold.details.parameter_size) == ("", ""), "names are not asked"
    await ring.add_model(stub_card(architecture="llama", weights="BF16"))
    await until(lambda: gateway.service.work.catalog.card(MODEL).architecture == "llama")
    details = (await client.show(MODEL)).details
    assert (details.family, details.families, details.quantization_level) == ("llama", ["llama"], "BF16")
    assert details.format == "safetensors"
    await ring.add_model(stub_card(architecture="llama", weights="GGUF Q4_1"))
    await until(lambda: gateway.service.work.catalog.card(MODEL).weights == "GGUF Q4_1")
    details = (await client.show(MODEL)).details
    assert (details.format, details.quantization_level) == ("gguf", "Q4_1"), "its name does not say it"
    assert cold.digest == listed["warm:1b"].digest != listed[f"{MODEL}:latest"].digest
    shown = await client.show("warm:1b")
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 512
    assert (shown.capabilities, shown.details and shown.details.parent_model) == (["completion"], "cold")
    assert (await client.show(MODEL)).capabilities == ["completion", "tools"]
    (loaded,) = (await client.ps()).models
    assert (loaded.model, loaded.context_length) == (f"{MODEL}:latest", 2048)
    assert loaded.expires_at.year == 9999
    with pytest.raises(ollama.ResponseError, match="model 'nobody' not found") as error:
        await client.show("nobody")
    assert error.value.status_code == 404
    assert "'model'" in (await http.post("/api/show", json={})).json()["error"]


async def test_how_long_a_model_stays(
    gateway: RunningGateway, client: ollama.AsyncClient, hosts: FakeHosts, ring: FakeRing
) -> None:
    await ready(gateway, ring, hosts)
    specs = gateway.service.work.catalog.registry.specs
    assert (await client.chat(MODEL, HI, keep_alive="1h30m")).done
    assert specs[MODEL].idle == 5400
    (loaded,) = (await client.ps()).models
    assert loaded.expires_at.year < 9999
    await client.generate(MODEL, "Hi", keep_alive=0)
    await until(lambda: specs[MODEL].action == "unload")
    assert (await client.chat(MODEL, HI, keep_alive=-1)).done
    assert specs[MODEL].pinned
    assert (await client.chat(MODEL, HI, keep_alive="10m")).done
    assert (specs[MODEL].pinned, specs[MODEL].idle) == (False, 600), "the last request's counts"
    await client.chat(MODEL, keep_alive=-1)
    assert (await client.generate(MODEL, keep_alive=0)).done_reason == "unload"
    assert (specs[MODEL].pinned, specs[MODEL].action, specs[MODEL].idle) == (False, "unload", 600)


async def test_a_pin_by_hand_is_not_taken_back_by_a_request(
    gateway: RunningGateway, client: ollama.AsyncClient, http: httpx.AsyncClient, hosts: FakeHosts, ring: FakeRing
) -> None:
    await ready(gateway, ring, hosts, idle=60.0)
    specs = gateway.service.work.catalog.registry.specs
    assert (await client.chat(MODEL, HI, keep_alive=-1)).done
    declared = await http.patch(f"/v1/registry/models/{MODEL}", json={"pinned": True})
    assert declared.status_code == 200
    body = {"model": MODEL, "messages": HI, "stream": False, "keep_alive": "5m"}
    answer = await http.post("/api/chat", json=body)
    assert answer.headers[IGNORED] == "keep_alive", "what is pinned stays"
    assert specs[MODEL].pinned
    assert specs[MODEL].idle == 60
    with pytest.raises(ollama.ResponseError, match="pinned"):
        await client.chat(MODEL, keep_alive=0)


async def test_a_model_is_loaded_and_unloaded_by_a_request_without_messages(
    gateway: RunningGateway, client: ollama.AsyncClient, hosts: FakeHosts, ring: FakeRing
) -> None:
    await hosts.register(MODEL)
    await known(gateway, MODEL)
    loading = asyncio.create_task(client.chat(MODEL))
    await until(lambda: gateway.service.work.catalog.registry.specs[MODEL].action == "load")
    await ring.put_record("ready")
    assert (await loading).done_reason == "load"
    assert (await client.generate(MODEL, keep_alive=0)).done_reason == "unload"
    assert gateway.service.work.catalog.registry.specs[MODEL].action == "unload"


async def test_a_model_that_cannot_be_loaded_says_why(
    gateway: RunningGateway, client: ollama.AsyncClient, hosts: FakeHosts
) -> None:
    await hosts.register(MODEL)
    await known(gateway, MODEL)
    loading = asyncio.create_task(client.chat(MODEL))
    await until(lambda: gateway.service.work.catalog.registry.specs[MODEL].action == "load")
    await hosts.say(HostModel(MODEL, "failed", error="Its files are no model.", failed_at=time.time() + 60))
    with pytest.raises(ollama.ResponseError, match="Its files are no model"):
        await loading


@pytest.mark.slow
async def test_a_model_that_takes_too_long_is_not_waited_for(nats_settings: CommonSettings, hosts: FakeHosts) -> None:
    await hosts.register(MODEL)
    async with (
        run_gateway(nats_settings, token_timeout=0.5) as gateway,
        ollama.AsyncClient(host=gateway.url, timeout=20) as client,
    ):
        await known(gateway, MODEL)
        with pytest.raises(ollama.ResponseError, match="was not loaded within") as error:
            await client.chat(MODEL)
        assert error.value.status_code == 504


async def test_a_key_without_the_right_changes_nothing(
    gateway: RunningGateway, http: httpx.AsyncClient, hosts: FakeHosts, ring: FakeRing, keys: Keys
) -> None:
    await ready(gateway, ring, hosts, idle=60.0)
    key = await keys.make("tenant")
    await changes_to(gateway, {}, 401)
    await changes_to(gateway, bearer(key), 200)
    body = {"model": MODEL, "messages": HI, "stream": False, "keep_alive": 0}
    answer = await http.post("/api/chat", json=body, headers=bearer(key))
    assert (answer.status_code, answer.headers[IGNORED]) == (200, "keep_alive")
    for path, sent in (("/api/chat", {"model": MODEL, "keep_alive": 0}), ("/api/pull", {"model": HUB})):
        refused = await http.post(path, json=sent, headers=bearer(key))
        assert (refused.status_code, list(refused.json())) == (403, ["error"])
    assert gateway.service.work.catalog.registry.specs[MODEL].action == ""


class Host:
    """One that fetches what it is told to, as far as the test lets it."""

    def __init__(self, hosts: FakeHosts) -> None:
        self.hosts = hosts
        self.commands: list[Any] = []
        self.told = asyncio.Event()

    async def on_command(self, command: HostCommand) -> HostReply:
        self.commands.append(command)
        self.told.set()
        return HostReply(ok=True)


@pytest.fixture
async def host(hosts: FakeHosts, gateway: RunningGateway) -> Host:
    made = Host(hosts)
    await hosts.obey(made.on_command)
    await until(lambda: "host-1" in gateway.service.work.catalog.registry.hosts)
    return made


async def test_a_pull_tells_how_far_it_is(host: Host, client: ollama.AsyncClient) -> None:
    lines: list[ollama.ProgressResponse] = []
    steps = iter(
        [
            HostModel(HUB, "downloading", done=10, total=100),
            HostModel(HUB, "downloading", done=60, total=100),
            HostModel(HUB, "stored", total=100),
        ]
    )
    async for line in await client.pull(f"hf.co/{HUB}", stream=True):
        lines.append(line)
        if (step := next(steps, None)) is not None:
            await host.hosts.say(step)
    assert [line.completed for line in lines if line.digest] == [10, 60, 100]
    assert (lines[0].status, lines[-1].status) == ("pulling manifest", "success")
    assert {line.total for line in lines if line.digest} == {100}
    (command,) = host.commands
    assert isinstance(command, PullModel)
    assert command.spec.source == HUB
    assert (await client.pull(f"{HUB}:latest")).status == "success", "it is there"
    await host.hosts.say(HostModel(HUB, "stored", total=100), HostModel("org/other", "stored", total=1))
    assert (await client.pull("hf.co/org/other:latest")).status == "success"
    assert host.commands[-1].spec.name == "org/other"


async def test_a_pull_that_fails_says_so(host: Host, client: ollama.AsyncClient) -> None:
    await host.hosts.say(HostModel(HUB, "failed", error="Old news.", failed_at=1.0))

    async def pull() -> None:
        async for _ in await client.pull(HUB, stream=True):
            pass

    pulling = asyncio.create_task(pull())
    await host.told.wait()
    await host.hosts.say(HostModel(HUB, "failed", error="The disk is full.", failed_at=2.0))
    with pytest.raises(ollama.ResponseError, match="The disk is full"):
        await pulling
    assert await host.hosts.registry.get(HUB) is None, "what nobody could fetch is not listed"
    with pytest.raises(ollama.ResponseError, match="a source is a hub name"):
        await client.pull("llama3.2:latest")


def test_a_host_that_falls_silent_is_not_waited_for() -> None:
    fetch = Fetch("m", {"h": HostModel("m", "failed", failed_at=1.0)}, now=0.0)
    old = {"h": HostModel("m", "failed", failed_at=1.0)}
    assert fetch.step(old, downloads.QUIET - 1) is None
    assert fetch.step({"h": HostModel("m", "downloading", done=1, total=4)}, downloads.QUIET) is not None
    assert fetch.step({}, 2 * downloads.QUIET - 1) is None
    with pytest.raises(Unavailable, match="for 60 s; pull it again"):
        fetch.step({}, 2 * downloads.QUIET)
    with pytest.raises(ModelLoadFailed):
        fetch.step({"h": HostModel("m", "failed", failed_at=2.0)}, 2 * downloads.QUIET)


async def test_names_come_and_go(gateway: RunningGateway, client: ollama.AsyncClient, host: Host) -> None:
    await host.hosts.register("base", source=HUB)
    await known(gateway, "base")
    specs = gateway.service.work.catalog.registry.specs
    assert (await client.copy("base", "other:latest")).status == "success"
    assert specs["base"].aliases == ["other"]
    assert (await client.create("third", from_="other")).status == "success"
    assert [line.status async for line in await client.create("third", from_="base", stream=True)] == [
        "writing manifest",
        "success",
    ]
    assert specs["base"].aliases == ["other", "third"]
    assert (await client.delete("other")).status == "success"
    assert specs["base"].aliases == ["third"]
    assert (await client.delete("base:latest")).status == "success"
    assert "base" not in specs


async def test_a_name_has_parameters_of_its_own(
    gateway: RunningGateway, client: ollama.AsyncClient, http: httpx.AsyncClient, hosts: FakeHosts, ring: FakeRing
) -> None:
    await ready(gateway, ring, hosts)
    specs = gateway.service.work.catalog.registry.specs
    parameters = {"temperature": 0.25, "repeat_penalty": 1.5, "num_ctx": 9}
    await client.create("calm", from_=MODEL, parameters=parameters)
    await client.create("calmer", from_="calm", parameters={"temperature": 0})
    await client.copy("calm", "copied")
    assert specs[MODEL].defaults["calmer"] == {"temperature": 0, "repetition_penalty": 1.5}
    assert specs[MODEL].defaults["copied"] == specs[MODEL].defaults["calm"]
    assert "repetition_penalty" in str((await client.show("calm")).parameters)
    await client.chat("calm", HI, options={"temperature": 0.5})
    await http.post("/v1/chat/completions", json={"model": "calm", "messages": HI})
    await client.chat(MODEL, HI)
    sampled = [(one.sampling.temperature, one.sampling.repetition_penalty) for one in ring.requests]
    assert sampled == [(0.5, 1.5), (0.25, 1.5), (1.0, 1.0)]
    await client.create("calm", from_=MODEL)
    await client.delete("calmer")
    assert list(specs[MODEL].defaults) == ["copied"]
    with pytest.raises(ollama.ResponseError, match="num_predict"):
        await client.create("short", from_=MODEL, parameters={"num_predict": 3})


async def test_an_adapter_is_created_copied_and_deleted(
    gateway: RunningGateway,
    client: ollama.AsyncClient,
    ring: FakeRing,
    reader: Reader,  # noqa: F811
) -> None:
    await ring.put_record("ready")
    records = gateway.service.work.catalog.adapters.records
    await until(lambda: "host-1" in gateway.service.work.catalog.registry.hosts)
    made = [
        line.status
        async for line in await client.create("sql", from_=MODEL, adapters={"sql": "org/sql-lora"}, stream=True)
    ]
    assert made == ["reading adapter", "writing manifest", "success"]
    assert isinstance(reader.asked[0], PullAdapter)
    assert (records["sql"].source, records["sql"].model) == ("org/sql-lora", MODEL)
    await client.copy("sql", "sql2")
    listed = {one.model: one for one in (await client.list()).models}
    assert listed["sql2:latest"].details.parent_model == MODEL
    assert "ADAPTER org/sql-lora" in str((await client.show("sql")).modelfile)
    await client.delete("sql")
    assert sorted(records) == ["sql2"]
    with pytest.raises(ollama.ResponseError, match="not in the registry"):
        await client.create("x", from_=MODEL, adapters={"a": "org/a"}, parameters={"top_k": 3})
    with pytest.raises(ollama.ResponseError, match="has one adapter"):
        await client.create("x", from_=MODEL, adapters={"a": "org/a", "b": "org/b"})
    with pytest.raises(ollama.ResponseError, match="'adapters' is not supported"):
        await client.create("x", from_=MODEL, adapters={"a": "sha256:00"})


async def test_what_is_not_here_is_refused_by_name(client: ollama.AsyncClient, http: httpx.AsyncClient) -> None:
    for fields in ({"files": {"a": "sha256:0"}}, {"quantize": "q4_K_M"}, {"template": "x"}, {"messages": HI}):
        with pytest.raises(ollama.ResponseError, match=f"'{next(iter(fields))}'"):
            await client.create("x", from_=MODEL, **fields)
    with pytest.raises(ollama.ResponseError, match="'from'"):
        await client.create("x")
    with pytest.raises(ollama.ResponseError, match="/api/push is not supported here"):
        await client.push("x")
    answer = await http.post("/api/blobs/sha256:0", content=b"x")
    assert (answer.status_code, "/api/blobs" in answer.json()["error"]) == (404, True)
