"""A tenant's quota over what its fine-tuning keeps, at a gateway."""

import openai
import pytest

from shared.config import CommonSettings
from shared.messages.training import Hyperparameters
from shared.nats.bus import Bus
from shared.nats.training import training_objects
from shared.training_storage import reserved_bytes
from tests.integration.gateway.conftest import run_gateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, stub_card, until
from tests.integration.gateway.training.test_files import LINE, checked, jsonl, record_of, submit

WIDE = "wide"
WIDTHS = {"q_proj": 1 << 16}
QUOTA = reserved_bytes(WIDTHS, Hyperparameters(epochs=1, rank=1))
ONCE = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 1}}}


@pytest.fixture
async def wide(ring: FakeRing) -> str:
    await ring.add_model(stub_card(WIDE, adapter_widths=WIDTHS))
    return WIDE


async def test_a_job_that_may_come_to_more_is_refused_at_once(
    nats_settings: CommonSettings, wide: str, bus: Bus
) -> None:
    async with run_gateway(nats_settings, tenant_training_bytes=2 * QUOTA) as gateway, gateway.openai() as client:
        await until(lambda: wide in gateway.service.work.catalog.cards)
        named = "limit tenant_training_bytes: .* RYZANSTEIN_TENANT_TRAINING_BYTES changes it"
        with pytest.raises(openai.RateLimitError, match=named) as refused:
            await submit(client, jsonl(LINE, LINE), model=wide, method=ONCE, lora={"rank": 64})
        assert refused.value.code == "quota_exceeded"
        first = await checked(
            client, await submit(client, jsonl(LINE, LINE), model=wide, method=ONCE, lora={"rank": 1})
        )
        assert first.status == "queued"
        record = await record_of(bus, first.id)
        stored = await training_objects(bus).info(record.data.object_name)
        assert record.data.bytes == stored.size
        assert record.storage == reserved_bytes(WIDTHS, record.hyperparameters, 2, stored.size)
        with pytest.raises(openai.RateLimitError, match=named):
            await submit(client, jsonl(LINE, LINE), model=wide, method=ONCE, lora={"rank": 1})
        await client.fine_tuning.jobs.cancel(first.id)
        await submit(client, jsonl(LINE, LINE), model=wide, method=ONCE, lora={"rank": 1})


async def test_examples_and_steps_count_when_they_are_known(nats_settings: CommonSettings, wide: str, bus: Bus) -> None:
    async with run_gateway(nats_settings, tenant_training_bytes=QUOTA) as gateway, gateway.openai() as client:
        await until(lambda: wide in gateway.service.work.catalog.cards)
        job = await submit(client, jsonl(LINE, LINE), model=wide, method=ONCE, lora={"rank": 1})
        job = await checked(client, job)
        assert job.status == "failed"
        assert job.error.code == "quota_exceeded"
        assert "RYZANSTEIN_TENANT_TRAINING_BYTES" in (job.error.message or "")
        assert await training_objects(bus).info(f"{job.id}-examples") is None


async def test_of_a_base_that_no_card_tells_of_as_many_jobs_fit_as_there_may_be(
    nats_settings: CommonSettings, ring: FakeRing
) -> None:
    few = {"tenant_training_bytes": 160, "tenant_training_jobs": 2}
    async with run_gateway(nats_settings, **few) as gateway, gateway.openai() as client:
        for _ in range(2):
            job = await checked(client, await submit(client, jsonl(LINE, LINE), model=MODEL))
            assert job.status == "queued"
