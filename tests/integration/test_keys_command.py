"""`ryzanstein keys` on a real NATS."""

import json
import time

import pytest

from services.cli.commands.keys import keys_app, when
from shared.config import CommonSettings
from shared.errors import ConfigurationError
from shared.keys import KeyLimits, KeyRecord, digest_of, parse
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.commands import Command


@pytest.fixture
def command(nats_settings: CommonSettings) -> Command:
    return Command(keys_app, nats_settings)


async def test_a_key_is_made_shown_and_revoked_and_only_its_digest_is_kept(command: Command, bus: Bus) -> None:
    limits = ("--requests-per-minute", "5", "--tokens-per-minute", "700", "--concurrent", "2")
    made = await command.invoke(
        "create", "--tenant", "acme", "--name", "ci", "--expires", "30d", "--manage-models", *limits
    )
    token = made.stdout.strip()
    identity, secret = parse(token) or ("", "")
    keys = await Bucket.open(bus, subjects.KEYS_BUCKET, KeyRecord)
    entry = await keys.get(identity)
    record = entry.value
    assert (record.digest, record.tenant, record.name) == (digest_of(secret), "acme", "ci")
    assert record.limits == KeyLimits(5, 700, 2)
    assert record.manage_models
    assert abs(record.expires - time.time() - 30 * 86_400) < 60

    other = (await command.invoke("create", "nightly evaluation", "--view-keys")).stdout.strip()
    twice = await command.invoke("create", "one", "--name", "two")
    assert "has two names" in str(twice.exception)
    table = (await command.invoke("list")).stdout
    assert [line.split()[0] for line in table.splitlines()] == ["id", identity, (parse(other) or "")[0]]
    assert [line.split()[-2:] for line in table.splitlines()] == [["models", "keys"], ["manage", "-"], ["-", "view"]]
    shown = json.loads((await command.invoke("show", token, "--json")).stdout)
    assert (shown["manage_models"], shown["view_keys"]) == (True, False)
    assert (shown["id"], shown["state"], shown["limits"]["tokens_per_minute"]) == (identity, "active", 700)

    assert (await command.invoke("revoke", identity)).exit_code == 0
    assert (await command.invoke("revoke", identity)).exit_code == 0
    states = {key["id"]: key["state"] for key in json.loads((await command.invoke("list", "--json")).stdout)}
    assert sorted(states.values()) == ["active", "revoked"]
    assert states[identity] == "revoked"
    text = (await command.invoke("show", identity)).stdout
    assert secret not in text + table
    assert "acme" in text


async def test_an_unknown_key_is_named(command: Command) -> None:
    for name in ("revoke", "show"):
        failed = await command.invoke(name, "00112233aabb")
        assert isinstance(failed.exception, ConfigurationError)
        assert "00112233aabb" in str(failed.exception)


def test_when_a_key_expires() -> None:
    assert when("", 5.0) == 0.0
    assert [when(span, 5.0) for span in ("9s", "2m", "1h", "1d", "1w")] == [14, 125, 3605, 86_405, 604_805]
    assert when("1970-01-02", 5.0) == 86_400
    for wrong in ("tomorrow", "-3d", "3 days", "1970-01-01"):
        with pytest.raises(ConfigurationError, match="--expires"):
            when(wrong, 5.0)
