"""What NATS keeps says which versions have used it, and a version that cannot is refused at its start."""

from pathlib import Path

import pytest
import structlog

from shared import releases
from shared.config import CommonSettings
from shared.errors import ConfigurationError
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.streams import ensure_streams
from shared.process import VERSION
from tests.processes import service_process

OWN = releases.metadata({})


async def said(bus: Bus) -> dict[str, str]:
    info = await bus.jetstream().stream_info(subjects.JOURNAL_STREAM)
    return {key: value for key, value in (info.config.metadata or {}).items() if not key.startswith("_nats.")}


async def say(bus: Bus, **versions: str) -> None:
    """As another release has left it."""
    config = (await bus.jetstream().stream_info(subjects.JOURNAL_STREAM)).config
    config.metadata = {**(config.metadata or {}), **{f"ryzanstein-{key}": value for key, value in versions.items()}}
    await bus.jetstream().update_stream(config)


async def test_a_gateway_says_which_version_has_used_the_streams(bus: Bus) -> None:
    assert await said(bus) == OWN
    await say(bus, version="99.0.0")
    await ensure_streams(bus)
    assert (await said(bus))["ryzanstein-version"] == "99.0.0", (
        "the newest stays, also when an older one is started again"
    )


async def test_who_changes_no_streams_takes_them_as_they_are(nats_settings: CommonSettings) -> None:
    first = await Bus.connect(nats_settings, "monitor")
    await ensure_streams(first, change=False)
    assert await said(first) == {}
    await ensure_streams(first)
    assert await said(first) == OWN
    await ensure_streams(first, change=False)
    assert await said(first) == OWN
    await first.close()


@pytest.mark.parametrize("change", [True, False])
async def test_what_a_newer_version_has_written_is_refused(bus: Bus, change: bool) -> None:
    await say(bus, version="99.1.0", **{"readable-by": "99.0"})
    with pytest.raises(
        ConfigurationError, match=rf"written by Ryzanstein 99\.1\.0, which {VERSION} cannot read; run 99\.0"
    ):
        await ensure_streams(bus, change=change)


async def test_the_end_of_going_back_is_told_before_it_is_written(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "READABLE_BY", "99.0")
    with structlog.testing.capture_logs() as logged:
        await ensure_streams(bus, change=False)
        assert logged == []
        await ensure_streams(bus)
    assert [(line["event"], line["version"], line["readable_by"]) for line in logged] == [
        ("downgrade_ends", VERSION, "99.0")
    ]
    assert (await said(bus))["ryzanstein-readable-by"] == "99.0"
    with pytest.raises(ConfigurationError, match=rf"{VERSION} cannot read; run 99\.0 or newer"):
        await ensure_streams(bus)


async def test_a_service_of_a_version_that_is_too_old_ends_with_one_sentence(
    bus: Bus, nats_settings: CommonSettings, tmp_path: Path
) -> None:
    await say(bus, version="99.1.0", **{"readable-by": "99.0"})
    async with service_process(bus, nats_settings, "services.scheduler", tmp_path, instance="scheduler-0") as process:
        assert await process.process.wait() == 1
    last = process.log.read_text().splitlines()[-1]
    assert last == (
        f"error: The data in NATS at {bus.where} was written by Ryzanstein 99.1.0, which {VERSION} cannot read; run "
        "99.0 or newer."
    )
