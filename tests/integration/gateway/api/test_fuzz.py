"""schemathesis, as anybody would run it, against a gateway with a ring: `make fuzz` for longer.

It makes requests from the document, valid and not, and finds statuses, headers and bodies that the document does
not tell of, server errors, bad requests that are accepted, and good ones that are refused.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.messages import GenerationRequest
from shared.nats.bus import Bus
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, say, stub_card
from tests.integration.gateway.intake.test_embeddings import embed
from tests.integration.gateway.intake.test_scoring import judge

ROOT = Path(__file__).parents[4]
EXAMPLES = int(os.environ.get("RYZANSTEIN_FUZZ_EXAMPLES") or 4)
SEED = os.environ.get("RYZANSTEIN_FUZZ_SEED") or "1"


LINE = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": MODEL, "prompt": "Hi", "max_tokens": 4},
}


# Bad requests may be refused as too large, too; and two methods that a path does not have say what all of them do.
CONFIGURATION = """[checks]
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
[phases.coverage]
unexpected-methods = ["DELETE", "PUT"]
"""


async def say_or_embed(ring: FakeRing, request: GenerationRequest) -> None:
    if request.classify:
        await judge(ring, request)
    else:
        await (embed if request.embed else say)(ring, request)


@pytest.fixture
async def ring(bus: Bus) -> AsyncIterator[FakeRing]:
    """One whose model gives embeddings and scores too."""
    fake = FakeRing(bus)
    fake.behave = say_or_embed
    tasks = ["generate", "embed", "classify"]
    card = stub_card(embedding_size=4, tasks=tasks, labels=["relevant"], activation="sigmoid")
    await fake.start(card)
    yield fake
    await fake.stop()


@pytest.mark.timeout(900 + 8 * EXAMPLES)
@pytest.mark.parametrize(
    "phases",
    [
        pytest.param("examples,fuzzing", marks=pytest.mark.slow, id="some"),
        pytest.param("examples,coverage,fuzzing,stateful", marks=pytest.mark.nightly, id="all"),
    ],
)
async def test_schemathesis_finds_nothing(
    gateway: RunningGateway, ring: FakeRing, tmp_path: Path, capfd: pytest.CaptureFixture[str], phases: str
) -> None:
    """`coverage`, values at every bound of every field, takes minutes."""
    await ring.put_record("ready")
    async with gateway.http() as http:
        form = {"file": ("input.jsonl", json.dumps(LINE).encode())}
        file = (await http.post("/v1/files", data={"purpose": "batch"}, files=form)).json()["id"]
    hooks = {
        "SCHEMATHESIS_HOOKS": "tests.integration.gateway.api.schemathesis_hooks",
        "RYZANSTEIN_FUZZED_MODEL": MODEL,
        "RYZANSTEIN_FUZZED_FILE": file,
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json"]
    limits = [
        "--checks",
        "all",
        "--phases",
        phases,
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        SEED,
        "--generation-database",
        "none",
        "--exclude-path",
        "/models/sse",  # it has no end
        "--exclude-path-regex",
        "^(/v2/rerank|/rerank|/score|/classify|/invocations)$",  # the same under /v1
    ]
    # It runs nothing of ours: traced for coverage it would take twice as long.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")} | hooks
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    process = await asyncio.create_subprocess_exec(
        *command,
        *limits,
        "--suppress-health-check=filter_too_much",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        cwd=tmp_path,  # it leaves a folder of findings
    )
    try:
        shown = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    sys.stdout.write(shown)
    assert process.returncode == 0, shown
    cases = re.search(r"(\d+) generated", shown)
    assert cases is not None, shown
    assert int(cases[1]) > 200
    assert any(request.max_tokens for request in ring.requests), "some reached the ring"
    assert any(request.embed for request in ring.requests)
    assert any(request.classify for request in ring.requests)
    async with gateway.http() as http:
        assert (await http.get("/v1/batches")).json()["data"]
    assert "Traceback" not in capfd.readouterr().err
