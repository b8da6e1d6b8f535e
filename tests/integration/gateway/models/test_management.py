"""Models over HTTP: OpenAI's list, llama.cpp's router, and the registry under its revision."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from shared.config import CommonSettings
from shared.keys import NewKey
from shared.messages import HostCommand, HostModel, HostReply, ModelSettings, ModelSpec, PullModel, RemoveModel
from shared.nats import subjects
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import MODEL, FakeRing, stub_card, until

HUB = "org/a-model"
REGISTRY = "/v1/registry/models"


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def known(gateway: RunningGateway, name: str) -> None:
    await until(lambda: name in gateway.service.work.catalog.registry.specs)


async def spec_of(hosts: FakeHosts, name: str) -> ModelSpec:
    entry = await hosts.registry.get(name)
    return entry.value


async def test_the_list_has_registered_and_served_models_with_their_status(
    gateway: RunningGateway, http: httpx.AsyncClient, client: openai.AsyncOpenAI, hosts: FakeHosts, ring: FakeRing
) -> None:
    await ring.put_record("ready")
    settings = ModelSettings(context_length=512)
    await hosts.register("cold", aliases=["gpt-4"], settings=settings, source=HUB, created=1_700_000_000)
    await known(gateway, "cold")
    found = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    assert sorted(found) == ["cold", "gpt-4", MODEL]
    assert found["gpt-4"]["root"] == "cold"
    assert found["cold"]["max_model_len"] == 512
    assert found[MODEL]["status"] == {
        "value": "loaded",
        "state": "loaded",
        "completed": 1.0,
        "replicas": 1,
        "reason": None,
        "expected_at": None,
        "expected_seconds": None,
        "waiting": 0,
    }
    assert [model["id"] for model in (await http.get("/models?reload=1")).json()["data"]] == ["cold", MODEL]
    assert (await client.models.retrieve("gpt-4")).id == "gpt-4"
    assert code(await http.post("/models/unload", json={"model": MODEL})) == (409, "model_not_managed")
    assert (await http.post("/models/load", json={"model": MODEL})).json() == {"success": True}

    async def status(*models: HostModel) -> dict[str, Any]:
        await hosts.say(*models)
        known = gateway.service.work.catalog.registry.hosts
        await until(lambda: "host-1" in known and known["host-1"].host.models == list(models))
        found: dict[str, Any] = (await http.get("/v1/models/cold")).json()["status"]
        return found

    shown = await status(HostModel("cold", "downloading", done=1, total=4))
    assert (shown["value"], shown["progress"]) == ("downloading", {HUB: {"done": 1, "total": 4}})
    shown = await status(HostModel("cold", "loading", done=3, total=4, load_seconds=40))
    assert shown["progress"] == {"stages": ["text_model"], "current": "text_model", "value": 0.75}
    assert 8 < shown["expected_at"] - time.time() <= 10.1
    assert shown["expected_seconds"] == 10.0
    await hosts.place("cold", waiting=6)
    await until(lambda: gateway.service.work.catalog.status("cold").waiting == 6)
    assert (await http.get("/v1/models/cold")).json()["status"]["waiting"] == 6
    shown = await status(HostModel("cold", "failed", error="No weights.", failed_at=time.time()))
    assert (shown["value"], shown["failed"], shown["exit_code"]) == ("unloaded", True, 1)
    assert (shown["state"], shown["reason"]) == ("failed", "No weights.")
    assert (await status(HostModel("cold", "sleeping")))["value"] == "sleeping"


async def test_an_entry_is_added_read_changed_and_removed_under_its_revision(
    http: httpx.AsyncClient, hosts: FakeHosts, client: openai.AsyncOpenAI
) -> None:
    path = f"{REGISTRY}/team/m"
    put = await http.put(path, json={"source": HUB, "least": 1, "idle": "10m", "aliases": ["gpt-4"]})
    assert put.status_code == 200, put.text
    entry = put.json()
    assert (entry["name"], entry["idle"], entry["most"]) == ("team/m", 600.0, 1)
    assert abs(entry["created"] - time.time()) < 60
    assert code(await http.put(path, json={"source": HUB}, headers={"if-none-match": "*"}))[0] == 412
    seen = await http.get(path)
    assert seen.headers["etag"] == put.headers["etag"]
    patched = await http.patch(path, json={"pinned": True}, headers={"if-match": seen.headers["etag"]})
    assert (patched.json()["pinned"], patched.json()["least"]) == (True, 1)
    stale = {"if-match": seen.headers["etag"]}
    assert code(await http.patch(path, json={"least": 0}, headers=stale)) == (412, "precondition_failed")
    assert code(await http.put(path, json={"source": HUB}, headers=stale))[0] == 412
    assert code(await http.delete(path, headers=stale)) == (409, "model_pinned")
    assert code(await http.post("/models/unload", json={"model": "gpt-4"})) == (409, "model_pinned")
    assert (await http.patch(path, json={"pinned": False})).status_code == 200
    assert code(await http.delete(path, headers=stale))[0] == 412
    assert [one["name"] for one in (await http.get(REGISTRY)).json()["data"]] == ["team/m"]
    assert (await client.models.delete("team/m")).deleted
    assert await hosts.registry.get("team/m") is None
    for answer in (await http.get(path), await http.patch(path, json={}), await http.delete(path)):
        assert code(answer) == (404, "model_not_found")


async def test_everything_wrong_with_an_entry_is_told_at_once(
    http: httpx.AsyncClient, hosts: FakeHosts, gateway: RunningGateway
) -> None:
    await hosts.register("other", aliases=["taken"])
    await known(gateway, "other")
    wrong = {
        "source": "/etc/models",
        "least": 3,
        "most": 2,
        "aliases": ["taken"],
        "settings": {"tp": 0, "colour": 1},
        "x": 1,
    }
    refused = await http.put(f"{REGISTRY}/m", json=wrong)
    assert code(refused) == (400, "invalid_model")
    fields = [one["field"] for one in refused.json()["error"]["errors"]]
    assert sorted(fields) == ["aliases", "least", "settings.colour", "settings.tp", "source", "x"]
    assert await hosts.registry.get("m") is None
    assert code(await http.put(f"{REGISTRY}/m", json={"name": "n"}))[0] == 400
    assert code(await http.put(f"{REGISTRY}/m", content=b"[1]"))[0] == 400
    assert code(await http.put(f"{REGISTRY}/m", content=b"{"))[0] == 400
    assert code(await http.put(f"{REGISTRY}/m", content=b'{"name":"' + b"m" * 70_000 + b'"}'))[0] == 413
    assert code(await http.patch(f"{REGISTRY}/other", json={"name": "n"}))[0] == 400
    assert code(await http.patch(f"{REGISTRY}/other", json={}, headers={"if-match": "x"}))[0] == 400
    assert code(await http.put(f"{REGISTRY}/m", json={}, headers={"if-none-match": "x"}))[0] == 400
    assert code(await http.post("/models/load", json={"model": "nobody"})) == (404, "model_not_found")
    assert code(await http.post("/models/load", json={"name": "m"}))[0] == 400


async def test_which_sources_may_be_named(one_directory: RunningGateway) -> None:
    for source, allowed in [
        (HUB, True),
        (f"hf://{HUB}:Q4_K_M", True),
        ("SmolLM2-135M-Instruct", True),
        ("/srv/models/a", True),
        ("/a/model", True),
        ("/b:c/model", True),
        ("/b/model", False),
        ("/srv/models/../../etc", False),
        ("/srv/models", False),
        ("/srv/models-of-others/a", False),
        ("/etc", False),
        ("org/../../etc", False),
        ("../etc", False),
        ("etc", False),
        ("~/models/a", False),
        ("org/model/more", False),
    ]:
        async with one_directory.http() as http:
            for entry in ({"source": source}, {"source": HUB, "settings": {"draft_model": source}}):
                answer = await http.put(f"{REGISTRY}/m", json=entry)
                assert answer.status_code == (200 if allowed else 400), answer.text
                assert allowed or "RYZANSTEIN_MODEL_DIRECTORIES" in answer.text


@pytest.fixture
async def one_directory(nats_settings: CommonSettings, ring: FakeRing) -> AsyncIterator[RunningGateway]:
    async with run_gateway(nats_settings, model_directories="/a:/srv/models/, /b:c") as running:
        yield running


async def test_a_model_is_loaded_once_and_unloaded(
    http: httpx.AsyncClient, hosts: FakeHosts, gateway: RunningGateway, ring: FakeRing
) -> None:
    await hosts.register("cold")
    await known(gateway, "cold")
    await hosts.place("cold", hosts=["host-1"])
    answers = await asyncio.gather(*(http.post("/models/load", json={"model": "cold"}) for _ in range(4)))
    assert [answer.json() for answer in answers] == [{"success": True}] * 4
    assert (await spec_of(hosts, "cold")).action == "load"
    assert (await http.get("/v1/models/cold")).json()["status"]["value"] == "loading"
    await ring.add_model(stub_card("cold"))
    await ring.put_record("ready", model="cold")
    await until(lambda: gateway.service.work.catalog.status("cold").ready)
    before = await spec_of(hosts, "cold")
    assert (await http.post("/models/load", json={"model": "cold"})).json() == {"success": True}
    assert await spec_of(hosts, "cold") == before, "it is loaded: nobody is told anything"
    assert (await http.post("/models/unload", json={"model": "cold", "force": True})).json() == {"success": True}
    after = await spec_of(hosts, "cold")
    assert (after.action, after.force) == ("unload", True)


async def test_a_load_that_fits_nowhere_is_refused_with_what_would_have_to_go(
    http: httpx.AsyncClient, hosts: FakeHosts, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hosts.register("cold")
    await known(gateway, "cold")
    loading = asyncio.create_task(http.post("/models/load", json={"model": "cold"}))
    await until(lambda: gateway.service.work.catalog.registry.specs["cold"].action == "load")
    await hosts.place("cold", code="model_does_not_fit", reason="The pinned model big would have to go.")
    refused = await loading
    assert code(refused) == (409, "model_does_not_fit")
    assert "big would have to go" in refused.text
    assert (await spec_of(hosts, "cold")).action == "", "nothing has been asked for"
    monkeypatch.setattr("services.gateway.api.management.models.REFUSAL_TIMEOUT", 0.1)
    again = await http.post("/models/load", json={"model": "cold"})  # nobody says anything new
    assert code(again) == (409, "model_does_not_fit")


async def test_downloads_and_files_are_the_hosts(
    http: httpx.AsyncClient, hosts: FakeHosts, gateway: RunningGateway
) -> None:
    assert code(await http.post("/models", json={"model": HUB})) == (409, "no_host_takes_models")
    commands: list[tuple[str, HostCommand]] = []
    replies = {"host-1": HostReply(ok=True), "host-2": HostReply(ok=False, code="storage_full", error="Full.")}

    def answering(host: str) -> Any:
        async def answer(command: HostCommand) -> HostReply:
            commands.append((host, command))
            return replies[host]

        return answer

    for host in replies:
        await hosts.bus.subscribe(subjects.host_control(host), HostCommand, answering(host))  # type: ignore[arg-type]
        await hosts.say(instance=host)
    await hosts.bus.flush()
    await until(lambda: len(gateway.service.work.catalog.registry.hosts) == 2)
    assert (await http.post("/models", json={"model": HUB})).json() == {"success": True}
    ((host, command),) = commands
    assert host == "host-1"
    assert isinstance(command, PullModel)
    assert command.spec.source == HUB
    await hosts.say(HostModel(HUB, "stored"), instance="host-2")
    await until(lambda: gateway.service.work.catalog.registry.hosts["host-2"].host.models)
    full = await http.post(f"{REGISTRY}:pull", json={"model": HUB})  # where it is already
    assert full.status_code == 507, full.text
    replies["host-2"] = HostReply(ok=True)
    assert (await http.delete("/models", params={"model": HUB})).json() == {"success": True}
    assert [host for host, one in commands if isinstance(one, RemoveModel)] == ["host-2"]
    assert await hosts.registry.get(HUB) is None
    await hosts.register("one", source=HUB)
    await hosts.register("two", source=HUB)
    await hosts.say(HostModel("one", "stored"), HostModel("two", "stored"), instance="host-2")
    await until(lambda: len(gateway.service.work.catalog.registry.hosts["host-2"].host.models) == 2)
    commands.clear()
    assert (await http.delete(f"{REGISTRY}/one", params={"files": "true"})).status_code == 200
    assert not commands, "they are those of another entry too"
    replies["host-2"] = HostReply(ok=False, code="invalid_request", error="They are not mine.")
    await until(lambda: "one" not in gateway.service.work.catalog.registry.specs)
    left = await http.delete(f"{REGISTRY}/two", params={"files": "true"})
    told = "The model 'two' was removed, but some of its files remain: They are not mine."
    assert (left.status_code, left.json()["error"]["message"]) == (409, told)
    await hosts.say(instance="nobody")
    await until(lambda: len(gateway.service.work.catalog.registry.hosts) == 3)
    both = await http.post(f"{REGISTRY}:pull", json={"model": HUB, "hosts": 3})
    assert both.json() == {"success": True}, "one of them is enough"


async def test_only_keys_with_the_right_manage_models(
    http: httpx.AsyncClient, hosts: FakeHosts, keys: Keys, gateway: RunningGateway
) -> None:
    await hosts.register("cold")
    await known(gateway, "cold")
    plain = await keys.make("t")
    right = await keys.make("t", manage_models=True)
    changes = [
        ("PUT", f"{REGISTRY}/m", {"source": HUB}),
        ("PATCH", f"{REGISTRY}/cold", {}),
        ("GET", REGISTRY, None),
        ("GET", f"{REGISTRY}/cold", None),
        ("POST", "/models/unload", {"model": "cold"}),
        ("POST", "/models/load", {"model": MODEL}),
        ("POST", "/models", {"model": HUB}),
        ("DELETE", f"{REGISTRY}/cold", None),
        ("DELETE", "/v1/models/cold", None),
        ("DELETE", "/models?model=cold", None),
    ]

    def asked(key: NewKey, method: str, path: str, sent: Any) -> Any:
        return http.request(method, path, json=sent, headers=bearer(key))

    await changes_to(gateway, bearer(right), 200)
    await until(lambda: not gateway.service._backend.authenticator.open)
    for change in changes:
        assert code(await asked(plain, *change)) == (403, "insufficient_permissions"), change
    assert (await asked(plain, "GET", "/models", None)).status_code == 200
    assert (await asked(right, *changes[0])).status_code == 200
    assert (await asked(right, *changes[4])).status_code == 200


async def test_management_can_be_closed_altogether(nats_settings: CommonSettings, ring: FakeRing) -> None:
    async with run_gateway(nats_settings, manage_models=False) as closed, closed.http() as http:
        refused = await http.put(f"{REGISTRY}/m", json={"source": HUB})
        assert code(refused) == (403, "model_management_off")


async def test_events_tell_what_happens_as_it_happens(
    http: httpx.AsyncClient, hosts: FakeHosts, gateway: RunningGateway, no_trace: None
) -> None:
    await hosts.register("cold", source=HUB)
    await known(gateway, "cold")
    async with http.stream("GET", "/models/sse") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()

        async def event(model: str = "cold") -> dict[str, Any]:
            while True:
                line = await anext(lines)
                if line.startswith("data: "):
                    found: dict[str, Any] = json.loads(line[6:])
                    if found["model"] == model:
                        return found

        first = await event()
        assert (first["event"], first["data"]["status"]) == ("model_status", "unloaded")
        await hosts.say(HostModel("cold", "downloading", done=1, total=4))
        assert (await event())["data"]["status"] == "downloading"
        assert await event() == {"model": "cold", "event": "download_progress", "data": {HUB: {"done": 1, "total": 4}}}
        await hosts.say(HostModel("cold", "loading", done=2, total=4))
        assert (await event())["event"] == "download_finished"
        assert (await event())["data"]["progress"]["value"] == 0.5
        await hosts.registry.delete("cold")
        assert await event() == {"model": "cold", "event": "model_remove"}


async def test_a_stream_of_events_ends_with_its_key_and_with_the_gateway(
    nats_settings: CommonSettings, ring: FakeRing, keys: Keys
) -> None:
    key = await keys.make("t")
    async with run_gateway(nats_settings) as running, running.http() as http:
        async with http.stream("GET", "/models/sse", headers=bearer(key)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await keys.revoke(key)
            assert "was revoked" in "".join([line async for line in lines])
        other = await keys.make("t")
        await changes_to(running, bearer(other), 200)
        async with http.stream("GET", "/models/sse", headers=bearer(other)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            running.service.end()
            assert "shutting down" in "".join([line async for line in lines])


async def test_pins_that_the_hosts_cannot_keep_are_refused(
    http: httpx.AsyncClient, gateway: RunningGateway, hosts: FakeHosts
) -> None:
    answer = await http.put(f"{REGISTRY}/first", json={"source": "org/first", "pinned": True})
    assert "No host loads models now" in answer.json()["warning"]
    size = 1 << 50  # more than any host has
    await hosts.say(HostModel("cold", "stored", memory=size))
    known = gateway.service.work.catalog.registry.hosts
    await until(lambda: "host-1" in known)
    body = {"source": "org/cold", "pinned": True}
    refused = await http.put(f"{REGISTRY}/cold", json=body)
    assert code(refused) == (409, "model_does_not_fit")
    assert "no host has more than" in refused.text
    assert (await http.put(f"{REGISTRY}/cold", json=body | {"pinned": False})).json()["warning"] is None
    assert code(await http.patch(f"{REGISTRY}/cold", json={"pinned": True})) == (409, "model_does_not_fit")
    patched = await http.patch(f"{REGISTRY}/first", json={"aliases": ["one"]})
    assert "how much memory first will take" in patched.json()["warning"]
