"""Large requests lie beside the journal, each tenant's within a quota of its own: nobody pushes out another's logs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx

from services.gateway.core.settings import GatewaySettings
from services.gateway.lifecycle.records import LARGE, LargeRecords, RecordReader, RecordWriter, outline_of
from shared.config import CommonSettings
from shared.messages import GenerationRequest
from shared.messages.records import GenerationRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.journal import JournalEnd
from tests.integration.gateway.api_keys import Keys, bearer, changes_to
from tests.integration.gateway.conftest import RunningGateway, run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying

KIB = 1 << 10
SMALL_JOURNAL = 2 << 20


@contextlib.asynccontextmanager
async def two_gateways(
    nats_settings: CommonSettings, **changes: object
) -> AsyncIterator[tuple[RunningGateway, RunningGateway]]:
    given = {"journal_max_bytes": SMALL_JOURNAL, **changes}
    async with run_gateway(nats_settings, **given) as one, run_gateway(nats_settings, **given) as two:
        yield one, two


async def asked(http: httpx.AsyncClient, size: int, key: dict[str, str] | None = None) -> str:
    """The id of an answer whose request had a conversation of `size` bytes, most of them cut off before the ring."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x" * size}],
        "store": True,
        "max_tokens": 5,
        "truncate_prompt_tokens": 4,
    }
    answer = await http.post("/v1/chat/completions", json=body, headers=key)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def found(http: httpx.AsyncClient, public_id: str, key: dict[str, str] | None = None) -> int:
    return (await http.get(f"/v1/generations/{public_id}", headers=key)).status_code


async def journal_bytes(bus: Bus) -> int:
    return (await bus.jetstream().stream_info(subjects.JOURNAL_STREAM)).state.bytes


async def test_a_tenant_of_large_requests_pushes_out_its_own_alone(
    nats_settings: CommonSettings, ring: FakeRing, keys: Keys, bus: Bus
) -> None:
    ring.behave = saying("Hello")
    flood, calm = bearer(await keys.make("flood")), bearer(await keys.make("calm"))
    async with two_gateways(nats_settings, tenant_record_bytes=1 << 20) as (gateway, other):
        for one in (gateway, other):
            for key in (flood, calm):
                await changes_to(one, key, 200)
        async with gateway.http() as http, other.http() as elsewhere:
            small, large = await asked(http, 10, calm), await asked(http, 100 * KIB, calm)
            theirs = [await asked(http, 100 * KIB, flood) for _ in range(40)]
            assert await found(elsewhere, small, calm) == 200
            assert await found(elsewhere, large, calm) == 200
            assert await journal_bytes(bus) < 200 * KIB
            await gateway.service.work.answers.large_records._trimmed.looked()
            statuses = [await found(elsewhere, each, flood) for each in theirs]
            kept = statuses.count(200)
            assert 5 <= kept <= 15
            assert statuses == [404] * (40 - kept) + [200] * kept, "the oldest have made room"


async def test_one_that_is_too_large_for_a_message_is_whole_again(bus: Bus) -> None:
    settings = GatewaySettings()
    large = LargeRecords(bus, settings)
    await large.bucket.ensure()
    writer, reader = RecordWriter(bus, "0" * 8, JournalEnd(bus), large), RecordReader(bus, large)
    size = bus.max_payload // 8
    identity = f"{'0' * 8}{1:08x}{'1' * 16}"
    requests = [
        GenerationRequest(f"{identity}-{number}", "r", "m", "g", [70_000 + number] * size, 9, tenant="acme")
        for number in range(5)
    ]
    record = GenerationRecord(
        identity, "completions", 1.0, requests, prompts=5, tenant="acme", stop=["x"], log_behind=3
    )
    await writer.write(record)
    await asyncio.gather(writer.stop())
    assert await reader.find(identity) == record
    assert await reader.find(identity[:-1] + "2") is None
    await bus.jetstream().purge_stream(f"KV_{subjects.RECORDS_BUCKET}")
    assert await reader.find(identity) is None


def test_an_outline_says_what_reports_need_and_nothing_large() -> None:
    request = GenerationRequest(
        "i-0", "r", "m", "g", [1] * LARGE, 9, tenant="acme", lane="batch", prediction=[1] * LARGE
    )
    record = GenerationRecord(
        "i", "chat.completions", 1.0, [request], choices=3, stop=["x"], messages=b"x" * LARGE, tenant="acme"
    )
    outline = outline_of(record, 1)
    assert (outline.outline.model, outline.outline.lane) == ("m", "batch")
    assert (outline.choices, outline.prompts, bool(outline.stop)) == (3, 1, True)
    assert outline.prompt_tokens == LARGE
    assert (outline.messages, outline.outline.prompt, outline.outline.prediction) == (b"", [], [])
