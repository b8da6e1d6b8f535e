"""What the generations of one request send to the queue together is bounded, and told before anything is sent."""

from shared.config import CommonSettings
from shared.limits import GENERATION_BYTES
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing

MOST = 20_000


async def test_choices_share_a_bound_of_bytes(nats_settings: CommonSettings, ring: FakeRing) -> None:
    completion = {"model": MODEL, "prompt": [200] * 100, "max_tokens": 1}
    async with run_gateway(nats_settings, generation_bytes=MOST) as gateway, gateway.http() as http:
        few = await http.post("/v1/completions", json=completion | {"n": 8})
        assert few.status_code == 200, few.text
        asked = len(ring.requests)
        many = await http.post("/v1/completions", json=completion | {"n": 128})
        prompts = await http.post("/v1/completions", json=completion | {"prompt": [[200] * 100] * 128})
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "a" * 100}], "max_tokens": 1, "n": 128}
        also = await http.post("/v1/chat/completions", json=chat)
    for refused in (many, prompts, also):
        assert refused.status_code == 413, refused.text
        error = refused.json()["error"]
        assert error["code"] == "payload_too_large"
        assert GENERATION_BYTES.cited(MOST) in error["message"]
    assert many.json()["error"]["param"] == "n"
    assert len(ring.requests) == asked, "nothing of them was sent"
