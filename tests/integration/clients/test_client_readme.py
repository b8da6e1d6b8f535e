"""The examples of the Python client's README do what it says."""

import pytest

from tests.integration.clients.programs import ROOT, Command, blocks, python_script, run
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, saying

BLOCKS = blocks(ROOT / "clients" / "python", "python")
TEXT = "Once upon a time."


def example(contains: str, *gateways: str) -> Command:
    """A block of the page, for these gateways."""
    (found,) = [block for block in BLOCKS if contains in block]
    for port, url in zip(("8000", "8001"), gateways, strict=False):
        found = found.replace(f"http://127.0.0.1:{port}", url)
    return python_script(found.replace("SmolLM2-135M-Instruct", MODEL))


@pytest.mark.parametrize("contains", ["for piece in", "Cursor.load"])
async def test_streams(contains: str, gateway: RunningGateway, other: RunningGateway, ring: FakeRing) -> None:
    ring.behave = saying(TEXT)
    shown = await run(example(contains, gateway.url, other.url), gateway.url)
    assert shown.removesuffix("\n") == TEXT
    assert len(ring.requests) == 1
