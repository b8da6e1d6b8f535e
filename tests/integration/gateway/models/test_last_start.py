"""Another stack ran over the same NATS: its models are neither listed nor accepted."""

import time

import httpx

from shared.config import CommonSettings
from shared.messages import GroupLoad, GroupRecord, HostModel
from shared.nats import subjects
from shared.nats.kv import Bucket
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import FakeRing, stub_card, until


async def listed(http: httpx.AsyncClient) -> list[str]:
    return [model["id"] for model in (await http.get("/models")).json()["data"]]


async def test_a_model_of_a_stack_that_was_killed_is_of_the_past(
    nats_settings: CommonSettings, hosts: FakeHosts
) -> None:
    ring = FakeRing(hosts.bus)
    await ring.add_model(stub_card("old"))
    groups = await Bucket.open(hosts.bus, subjects.GROUPS_BUCKET, GroupRecord)
    heard = time.time() - 3600
    await groups.put("g1", GroupRecord("g1", "old", "ready", 1, [], GroupLoad(), heard_at=heard))
    await hosts.register("new", least=1)
    async with run_gateway(nats_settings) as gateway, gateway.http() as http:
        assert await listed(http) == ["new"]
        assert gateway.service.models() == [], "who starts the stack waits until its own is served"
        refused = await http.post("/v1/completions", json={"model": "old", "prompt": "Hi"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        await hosts.say(HostModel("new", "loading"))
        await ring.start(stub_card("new"))
        await ring.put_record("ready", model="new")
        await until(lambda: gateway.service.models() == ["new"])
        assert await listed(http) == ["new"]
        answer = await http.post("/v1/completions", json={"model": "new", "prompt": "Hi"})
        assert answer.json()["model"] == "new"
    await ring.stop()
