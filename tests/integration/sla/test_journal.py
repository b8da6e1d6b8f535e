"""What the command says of journals that do not have what is asked for, and of options that make no sense."""

import json
import subprocess
import time

import pytest

from shared.config import CommonSettings
from shared.messages import GenerationRequest, TokenEntry, TokenFrame
from shared.messages.records import GenerationRecord, GenerationRecords
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.journal import from_moment, read_messages
from shared.nats.streams import ensure_streams
from tests.e2e.stack import run_cli
from tests.processes import nats_variables


def sla(nats: CommonSettings, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_cli("sla", *arguments, "--nats-url", nats.nats_url, **nats_variables(nats))


async def fill(bus: Bus, count: int, size: int = 16) -> None:
    """As many requests, each answered at once; `size`: tokens of each prompt."""
    for number in range(count):
        name = f"{number:032x}"
        request = GenerationRequest(f"{name}-0", "r", "m", "c", [1] * size, 16)
        record = GenerationRecord(name, "completions", time.time(), [request])
        await bus.publish_durable(subjects.records("w", "s"), GenerationRecords([record]))
        frame = TokenFrame("g", 1, number, [TokenEntry(f"{name}-0", 0, 0, [1, 2], "stop")])
        await bus.publish_durable(subjects.tokens("c"), frame)


def test_a_server_without_a_journal_is_told(nats_settings: CommonSettings) -> None:
    done = sla(nats_settings)
    assert done.returncode == 1
    assert "has no journal" in done.stderr


@pytest.mark.slow
async def test_targets_decide_the_exit_code(bus: Bus, nats_settings: CommonSettings) -> None:
    empty = sla(nats_settings, "--last", "1h", "--check")
    assert empty.returncode == 2, "nothing was shown"
    assert "not known" in empty.stdout
    await fill(bus, 20)
    met = sla(nats_settings, "--last", "1h", "--check", "--target-first-token", "5s", "--timezone", "UTC")
    assert met.returncode == 0, met.stderr + met.stdout
    assert "+00:00" in met.stdout
    missed = sla(nats_settings, "--last", "1h", "--check", "--target-first-token", "0.001ms", "--format", "json")
    assert missed.returncode == 2
    verdicts = {one["indicator"]: one["met"] for one in json.loads(missed.stdout)["verdicts"]}
    assert verdicts == {"availability": True, "error_rate": True, "mttr": True, "first_token_p95": False}


@pytest.mark.slow
async def test_a_journal_that_was_trimmed_says_what_it_covers(nats_settings: CommonSettings) -> None:
    small = nats_settings.model_copy(update={"journal_max_bytes": 2 << 20})
    bus = await Bus.connect(small, "test")
    try:
        await ensure_streams(bus)
        began = time.time()
        await fill(bus, 400, size=20_000)
        info = await bus.jetstream().stream_info(subjects.JOURNAL_STREAM)
        assert info.state.first_seq > 1, "it has been trimmed"
        async for message in read_messages(bus, ">", from_moment(0)):
            first = message.metadata.timestamp.timestamp()
            break
    finally:
        await bus.close()
    done = sla(nats_settings, "--last", "1h", "--format", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    ((begin, _),) = report["covered"]
    assert began < begin == pytest.approx(first, abs=1e-3)
    assert 0 < report["scopes"][0]["requests"]["completed"] < 400
    before = sla(nats_settings, "--from", "-2h", "--to", "-1h")
    assert before.returncode == 1
    assert "The journal has nothing of the period" in before.stderr
    assert "it begins at" in before.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--format", "xml"), "--format cannot be 'xml'"),
        (("--prometheus", "http://127.0.0.1:1"), "name two sources"),
        (("--from", "soon"), "--from cannot be 'soon'"),
        (("--last", "1y"), "--last cannot be"),
        (("--silence", "never"), "--silence cannot be"),
    ],
)
def test_options_that_make_no_sense_are_told(
    nats_settings: CommonSettings, arguments: tuple[str, ...], said: str
) -> None:
    done = sla(nats_settings, *arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prometheus_that_is_not_there_is_told() -> None:
    done = run_cli("sla", RYZANSTEIN_PROMETHEUS_URL="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "Prometheus at http://127.0.0.1:1 cannot be reached" in done.stderr
