"""LoRA adapters at a gateway: vLLM's endpoints, names that stand for a model and a digest, and what is kept of them."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.gateway.core import adapters
from services.gateway.core.adapters import AdapterRegistry
from services.gateway.core.errors import RouteError
from shared.config import CommonSettings
from shared.messages import GenerationRequest, HostCommand, HostReply
from shared.messages.registry import AdapterHolders, AdapterRecord, PullAdapter, WantedAdapter
from shared.nats import subjects
from shared.nats.adapters import AdapterFiles, job_holder, name_holder, settle, want
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.adapters import make_adapter, register, store_adapter
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, until


class Reader:
    """A host that reads adapters."""

    def __init__(self) -> None:
        self.asked: list[PullAdapter] = []
        self.reply: HostReply | None = None
        self.hold: asyncio.Event | None = None
        self.deaths = 0  # times that it ends before it has answered, and begins anew
        self.version = 1

    def digest(self, source: str) -> str:
        return hashlib.sha256(f"{source} {self.version}".encode()).hexdigest()

    async def on_command(self, command: HostCommand) -> HostReply | None:
        assert isinstance(command, PullAdapter)
        self.asked.append(command)
        if len(self.asked) <= self.deaths:
            return None
        if self.hold is not None:
            await self.hold.wait()
        record = AdapterRecord(command.name, command.model, command.source, self.digest(command.source), 8, 400)
        return self.reply or HostReply(ok=True, adapter=record)


@pytest.fixture
async def reader(hosts: FakeHosts) -> Reader:
    reader = Reader()
    await hosts.obey(reader.on_command)
    return reader


@pytest.fixture
async def http(reader: Reader, ring: FakeRing, nats_settings: CommonSettings) -> AsyncIterator[httpx.AsyncClient]:
    async with run_gateway(nats_settings, model_directories="/adapters") as gateway, gateway.http() as client:
        yield client


async def load(http: httpx.AsyncClient, name: str, **fields: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": f"/adapters/{name}"} | fields
    return await http.post("/v1/load_lora_adapter", json=body)


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


async def complete(http: httpx.AsyncClient, model: str, **fields: object) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 4, **fields})


async def test_an_adapter_is_loaded_used_replaced_and_unloaded(
    http: httpx.AsyncClient, reader: Reader, ring: FakeRing
) -> None:
    answer = await load(http, "sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert [(one.name, one.model, one.source) for one in reader.asked] == [("sql", MODEL, "/adapters/sql")]
    first = reader.digest("/adapters/sql")
    answer = await complete(http, "sql", prompt_cache_key="k")
    assert answer.json()["model"] == "sql"
    await complete(http, MODEL, prompt_cache_key="k")
    adapted, plain = ring.requests
    assert (adapted.model, adapted.adapter, plain.model, plain.adapter) == (MODEL, first, MODEL, "")
    assert adapted.session != plain.session, "what is kept of a session is of one adapter"

    assert problem(await load(http, "sql")) == (
        400,
        "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set 'load_inplace' "
        "to True.",
    )
    reader.version = 2
    assert (await load(http, "sql", load_inplace=True, model=MODEL)).status_code == 200
    shown = (await http.get("/v1/loras/sql")).json()
    assert (shown["digest"], shown["parent"], shown["root"]) == (reader.digest("/adapters/sql"), MODEL, "/adapters/sql")
    listed = {one["id"]: one for one in (await http.get("/v1/models")).json()["data"]}
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == (MODEL, "/adapters/sql")
    assert (listed[MODEL]["parent"], listed[MODEL]["root"]) == (None, MODEL)
    assert (await http.get("/v1/models/sql")).json() == listed["sql"]
    await complete(http, "sql")
    assert ring.requests[-1].adapter == reader.digest("/adapters/sql") != first

    answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert (await complete(http, "sql")).status_code == 404
    assert (await http.get("/v1/loras")).json()["data"] == []
    answer = await http.put("/v1/loras/sql", json={"source": "org/sql"})
    assert answer.json()["digest"] == reader.digest("org/sql")
    assert (await http.delete("/v1/models/sql")).json() == {"id": "sql", "object": "model", "deleted": True}


async def test_a_host_that_ended_while_it_read_an_adapter_is_asked_again(
    http: httpx.AsyncClient, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.nats.adapters.FIRST_REPEAT", 0.05)
    reader.deaths = 2
    assert (await load(http, "sql")).status_code == 200
    assert len(reader.asked) >= 3
    assert {one.name for one in reader.asked} == {"sql"}


async def test_a_declared_adapter_that_nobody_has_read_is_told_as_such(
    http: httpx.AsyncClient, reader: Reader, bus: Bus
) -> None:
    names = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
    order = WantedAdapter(MODEL, "org/sql")
    await want(names, "sql", order, "file")
    while (answer := await complete(http, "sql")).status_code == 404:
        pass
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "is declared and is read as soon as a host has its base" in problem(answer)[1]
    (listed,) = (await http.get("/v1/loras")).json()["data"]
    assert (listed["id"], listed["digest"], listed["groups"]) == ("sql", "", [])
    await settle(names, "sql", order, "It has no weights.")
    while "could not be read so far: It has no weights." not in (
        shown := (await http.get("/v1/loras/sql")).json()["warning"]
    ):
        assert "is declared" in shown
    assert (await load(http, "sql")).status_code == 200
    assert (await complete(http, "sql")).status_code == 200


async def test_an_adapter_of_another_base_is_loaded_with_a_warning(http: httpx.AsyncClient, reader: Reader) -> None:
    found = AdapterRecord("sql", MODEL, "/adapters/sql", reader.digest("x"), 8, 400, base="org/other-7b")
    reader.reply = HostReply(ok=True, adapter=found)
    assert (
        "Warning: Adapter 'sql': its configuration says that it was trained for org/other-7b"
        in (await load(http, "sql")).text
    )
    assert "org/other-7b" in (await http.get("/v1/loras/sql")).json()["warning"]


async def test_hosts_without_the_base_are_passed_over(http: httpx.AsyncClient, reader: Reader) -> None:
    reader.reply = HostReply(ok=False, code="model_not_stored", error="It is not here.")
    status, said = problem(await load(http, "sql"))
    assert status == 503
    assert f"No host has the files of the model '{MODEL}'" in said


async def test_what_runs_goes_on_with_the_adapter_that_it_began_with(
    http: httpx.AsyncClient, reader: Reader, ring: FakeRing
) -> None:
    """Its ring dies, and its name is replaced and unloaded meanwhile."""
    await load(http, "sql")
    first = reader.digest("/adapters/sql")
    began = asyncio.Event()

    async def half(ring: FakeRing, request: GenerationRequest) -> None:
        await ring.emit(request, 0, list(b"He"))
        began.set()

    ring.behave = half
    await ring.put_record("ready", at=time.time())
    running = asyncio.create_task(complete(http, "sql", max_tokens=50))
    await began.wait()
    reader.version = 2
    await load(http, "sql", load_inplace=True)
    await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    ring.behave = say
    await ring.die()
    ring.resume()
    answer = (await running).json()
    assert (answer["choices"][0]["text"], answer["model"]) == ("Hello, world!", "sql")
    assert [(one.attempt, one.adapter) for one in ring.requests] == [(0, first), (1, first)]


async def test_bad_input_is_told(http: httpx.AsyncClient, reader: Reader, hosts: FakeHosts) -> None:
    await hosts.register("second")
    await hosts.register("base", aliases=["short"])

    async def known() -> bool:
        return (await http.get("/v1/models/short")).status_code == 200

    await until(known)
    bad = {"lora_name": "", "lora_path": "/adapters/x"}, {"lora_name": "x", "lora_path": ""}
    for body in bad:
        answer = await http.post("/v1/load_lora_adapter", json=body)
        assert problem(answer) == (400, "Both 'lora_name' and 'lora_path' must be provided.")
    assert problem(await http.post("/v1/unload_lora_adapter", json={}))[0] == 400
    assert problem(await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})) == (
        404,
        "The lora adapter 'x' cannot be found.",
    )
    assert (await http.get("/v1/loras/x")).status_code == 404
    assert problem(await load(http, "x", lora_path="/etc/passwd"))[0] == 400
    assert "name the adapter's base in 'model'" in problem(await load(http, "x"))[1]
    assert problem(await load(http, "x", model="nobody"))[0] == 404
    for taken in ("base", "short"):
        assert problem(await load(http, taken, model="base"))[0] == 409
    assert (await load(http, "tall", model="base")).status_code == 200
    assert "name its base" in problem(await load(http, "y", model="tall"))[1]
    assert "tall" in problem(await complete(http, "tal"))[1], "the nearest name is told"
    reader.reply = HostReply(ok=False, code="model_load_error", error="x has rank 99, of another model.")
    assert problem(await load(http, "x", model="base")) == (400, "x has rank 99, of another model.")
    reader.reply, reader.hold = None, asyncio.Event()
    first = asyncio.create_task(load(http, "z", model="base"))
    await until(lambda: reader.asked[-1].name == "z")
    assert problem(await load(http, "z", model="base"))[0] == 409
    reader.hold.set()
    assert (await first).status_code == 200
    answer = await http.put("/v1/registry/models/tall", json={"source": "org/tall"})
    assert answer.status_code == 400
    assert "tall" in problem(answer)[1], "a model cannot have an adapter's name"


async def test_no_more_adapters_than_may_be(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_PER_MODEL", 2)
    for name in ("a", "b"):
        assert (await load(http, name)).status_code == 200
    status, said = problem(await load(http, "c"))
    assert (status, "unload one first" in said) == (409, True)
    assert (await load(http, "a", load_inplace=True)).status_code == 200


async def test_a_thousand_adapters_come_back_after_a_restart(
    nats_settings: CommonSettings, bus: Bus, hosts: FakeHosts, ring: FakeRing
) -> None:
    bucket = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
    digests = [hashlib.sha256(bytes([number % 256, number // 256])).hexdigest() for number in range(1000)]
    for number, digest in enumerate(digests):
        await bucket.put(f"a{number}", AdapterRecord(f"a{number}", MODEL, "org/a", digest, 8, 400))
    for _ in range(2):
        async with run_gateway(nats_settings) as gateway, gateway.http() as http:
            await used(gateway, http, ring, digests)


async def used(gateway: RunningGateway, http: httpx.AsyncClient, ring: FakeRing, digests: list[str]) -> None:
    assert len((await http.get("/v1/models")).json()["data"]) == 1001
    await asyncio.gather(*(complete(http, f"a{number}") for number in range(0, 1000, 20)))
    assert {one.adapter for one in ring.requests[-50:]} == set(digests[::20])


async def test_an_adapter_of_which_no_watch_has_told_yet_is_there_for_who_names_it(
    nats_settings: CommonSettings, bus: Bus, hosts: FakeHosts, ring: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway has registered it, while this one's watch is behind."""

    async def deaf(registry: AdapterRegistry) -> None:
        registry._caught_up.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(AdapterRegistry, "watch", deaf)
    bucket = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
    async with run_gateway(nats_settings) as gateway, gateway.http() as http:
        for name, path in (("a", "/v1/loras/a"), ("b", "/v1/models/b")):
            assert (await http.get(path)).status_code == 404
            await bucket.put(name, AdapterRecord(name, MODEL, "org/a", "d1", 8, 400))
            assert (await http.get(path)).json()["id"] == name
        await bucket.put("c", AdapterRecord("c", MODEL, "org/a", "d3", 8, 400))
        assert (await complete(http, "c")).status_code == 200
        assert ring.requests[-1].adapter == "d3"
        await bucket.put("d", AdapterRecord("d", MODEL, "org/a", "d4", 8, 400, tenant="acme"))
        assert (await complete(http, "d")).status_code == 404


async def test_files_stay_as_long_as_a_generation_may_need_them(bus: Bus, tmp_path: Path) -> None:
    holder = name_holder("sql")
    old, new = [await store_adapter(bus, tmp_path, number, holder=holder) for number in range(2)]
    assert old == make_adapter(tmp_path / "again", 0)
    registry, files = AdapterRegistry(bus, 100.0), AdapterFiles(bus)
    record = AdapterRecord("sql", "m", "org/sql", old, 8, 400)
    await registry.put(record, replace=False)
    other = AdapterRecord("other", "m", "org/sql", old, 8, 400)
    await registry.put(other, replace=False)
    replaced = await registry.put(AdapterRecord("sql", "m", "org/sql", new, 8, 400), replace=True)
    assert [digest for digest, _ in replaced.retired] == [old]
    now = time.time()
    await registry.sweep(now + 300)
    assert await files.has(old), "another name has it"
    await registry.remove("other", None)
    await registry.sweep(now + 50)
    assert await files.has(old), "a generation may need it"
    await registry.sweep(now + 300)
    assert not await files.has(old)
    assert await files.has(new)
    await registry.remove("sql", "acme")
    await registry.sweep(now + 300)
    bucket = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
    assert not await files.has(new)
    assert await bucket.items() == {}


async def test_what_a_gateway_has_not_heard_of_costs_nobody_its_files(bus: Bus, tmp_path: Path) -> None:
    """It knows of one name alone, and of no job."""
    now = time.time()
    digest = await store_adapter(bus, tmp_path, 0, holder=job_holder("ftjob-1", 4))
    registry, elsewhere, files = AdapterRegistry(bus, 100.0), AdapterRegistry(bus, 100.0), AdapterFiles(bus)
    await files.open()
    await registry.put(AdapterRecord("a", "m", "org/a", digest, 8, 400), replace=False)
    await elsewhere.put(AdapterRecord("b", "m", "org/b", digest, 8, 400), replace=False)
    await registry.remove("a", None)
    await registry.sweep(now + 300)
    assert await files.has(digest)
    assert name_holder("a") not in (await files.holders())[digest].holders
    await registry.release_job("ftjob-1")
    await elsewhere.sweep(now + 300)
    assert list((await files.holders())[digest].holders) == [name_holder("b")]
    await elsewhere.remove("b", None)
    await elsewhere.sweep(now + 300)
    assert not await files.has(digest)
    assert await files.holders() == {}


async def test_files_that_versions_before_have_registered_are_held(bus: Bus, tmp_path: Path) -> None:
    """And a deletion that was cut off is done."""
    now = time.time()
    digest = await store_adapter(bus, tmp_path, 0)
    registry, files = AdapterRegistry(bus, 100.0), AdapterFiles(bus)
    await files.open()
    await files._holders.purge(digest)
    for name in ("a", "b"):
        registry._set(name, await register(bus, name, "m", digest))
    await registry.sweep(now)
    assert set((await files.holders())[digest].holders) == {name_holder("a"), name_holder("b")}
    for name in ("a", "b"):
        assert await files.has(digest)
        await registry.remove(name, None)
        await registry.sweep(now + 300)
    assert not await files.has(digest)
    await files._holders.put(digest, AdapterHolders())
    await registry.sweep(now)
    assert await files.holders() == {}


async def test_another_tenants_adapter_is_not_unloaded_whatever_a_gateway_knows(bus: Bus) -> None:
    await register(bus, "ft:theirs", "m", "d" * 64, tenant="acme")
    registry = AdapterRegistry(bus, 100.0)
    with pytest.raises(RouteError, match="cannot be found"):
        await registry.remove("ft:theirs", "umbrella")
    assert (await registry.remove("ft:theirs", "acme")).digest == ""
