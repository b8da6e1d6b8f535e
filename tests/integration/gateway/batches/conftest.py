"""A ring that is up by the health monitor's records, as batches want it."""

import openai
import pytest

from tests.integration.gateway.batches.helpers import ready
from tests.integration.gateway.fake_ring import FakeRing


@pytest.fixture
async def served(ring: FakeRing, client: openai.AsyncOpenAI) -> openai.AsyncOpenAI:
    """A client of a gateway whose model has a group."""
    await ready(ring)
    return client


@pytest.fixture(autouse=True)
def frequent_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each a gateway in this process sees what has become of its batch."""
    monkeypatch.setattr("services.gateway.jobs.leases.RENEW", 0.3)
