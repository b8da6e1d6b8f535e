"""GET /v1/keys on a real NATS: who has keys and what they use of their limits, for those alone who may see it."""

import asyncio
import time
from typing import Any

import httpx

from shared.config import CommonSettings
from shared.keys import KeyLimits, NewKey, parse
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, silence, until

PATH = "/v1/keys"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


async def listed(gateway: RunningGateway, key: NewKey | None, **query: Any) -> httpx.Response:
    async with gateway.http(headers=bearer(key) if key else {}) as http:
        return await http.get(PATH, params=query)


def use(limit: int, used: int) -> dict[str, int]:
    return {"limit": limit, "used": used, "remaining": limit - used}


async def test_an_operator_sees_who_has_keys_and_their_use_at_all_gateways(
    nats_settings: CommonSettings, ring: FakeRing, keys: Keys
) -> None:
    ring.behave = silence
    limits = KeyLimits(10, 1000, 3)
    limited = await keys.make("acme", name="nightly", limits=limits, expires=time.time() + 3600)
    gone, late = await keys.make("acme"), await keys.make("b", expires=1.0)
    await keys.revoke(gone)
    viewer = await keys.make("ops", view_keys=True)
    tenants = {"tenant_requests_per_minute": 50}
    async with (
        run_gateway(nats_settings, **tenants) as one,
        run_gateway(nats_settings, **tenants) as two,
        two.http(headers=bearer(limited)) as http,
    ):
        asked = asyncio.create_task(http.post("/v1/chat/completions", json=BODY))
        await until(lambda: len(ring.requests) == 1)
        answer = await listed(one, viewer)
        while True:
            shown = {entry["id"]: entry for entry in answer.json()["data"]}
            if (shown[limited.identity]["limits"]["concurrent"] or {}).get("used") == 1:
                break
            answer = await listed(one, viewer)  # gateways tell each other every tenth of a second
        there = {entry["id"]: entry for entry in (await listed(two, viewer)).json()["data"]}
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    assert answer.headers["cache-control"] == "no-store"
    assert {entry["id"]: entry["state"] for entry in shown.values()} == {
        limited.identity: "active", gone.identity: "revoked", late.identity: "expired", viewer.identity: "active",
    }  # fmt: skip
    entry = shown[limited.identity]
    assert (entry["object"], entry["name"], entry["tenant"]) == ("api_key", "nightly", "acme")
    assert entry["redacted_value"] == f"rz-{limited.identity}-***"
    assert (entry["manage_models"], entry["view_keys"], entry["revoked_at"]) == (False, False, None)
    assert entry["expires_at"] == int(limited.record.expires)
    tokens = entry["limits"].pop("tokens_per_minute")
    assert entry["limits"] == {"requests_per_minute": use(10, 1), "concurrent": use(3, 1)}
    assert tokens == use(1000, tokens["used"])
    assert tokens["used"] > 5, "its prompt, and what it may come to"
    assert entry["tenant_limits"] == {"requests_per_minute": use(50, 1), "tokens_per_minute": None, "concurrent": None}
    assert shown[viewer.identity]["limits"] == dict.fromkeys(entry["tenant_limits"])
    assert shown[viewer.identity]["view_keys"]
    assert entry["last_used_at"] is None, "at the other gateway"
    assert there[limited.identity]["last_used_at"] >= int(limited.record.created)
    for key in (limited, gone, late, viewer):
        assert (parse(key.token) or "")[1] not in answer.text
        assert key.record.digest.hex() not in answer.text


async def test_pages_lead_through_all_keys_the_newest_first(gateway: RunningGateway, keys: Keys) -> None:
    assert (await listed(gateway, None)).json() == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip
    viewer = await keys.make("ops", view_keys=True)
    made = [viewer, *[await keys.make("t") for _ in range(4)]]
    await changes_to(gateway, bearer(made[-1]), 200)
    found: list[str] = []
    more = True
    while more:
        page = (await listed(gateway, viewer, limit=2, **({"after": found[-1]} if found else {}))).json()
        found += [entry["id"] for entry in page["data"]]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], found[-1])
        more = page["has_more"]
    assert found == [key.identity for key in reversed(made)]
    wrong = await listed(gateway, viewer, after="0123456789ab")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "after")
    wrong = await listed(gateway, viewer, limit=0)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limit")


async def test_other_keys_see_nobodys(gateway: RunningGateway, keys: Keys) -> None:
    for key in (await keys.make("t"), await keys.make("t", manage_models=True)):
        await changes_to(gateway, bearer(key), 200)
        refused = await listed(gateway, key)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert error["code"] == "insufficient_permissions"
        assert "--view-keys" in error["message"]
    assert (await listed(gateway, None)).status_code == 401
