"""Rights on a real NATS: every service may what it needs, and the broker refuses everything else."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg

from services.cli.supervision.nats_server import LocalNats, deployed, find_binary, variable_of
from services.gateway.core.settings import GatewaySettings
from services.gateway.files.files import Files
from services.gateway.lifecycle.records import LargeRecords
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable
from shared.messages import GenerationRequest
from shared.messages.batches import FileRecord
from shared.messages.records import GenerationRecord
from shared.nats import subjects
from shared.nats.accounts import API, MAPPED
from shared.nats.bus import Bus, encode
from shared.nats.permissions import USERS, User, inbox_of
from shared.nats.streams import ensure_streams
from shared.nats.tenants import tenant_key
from tests.integration.gateway.fake_ring import until

G, S, H, E, O, B = "gateway", "scheduler", "health-monitor", "executor", "operator", "batch"  # noqa: E741
ALL = {G, S, H, E, O}
SERVICES = {G, S, H, E}

PUBLISH: dict[str, set[str]] = {
    "intake.interactive.m": {G},
    "intake.recovery.m": {G},
    "records.w.1": {G},
    "tokens.gateway-1": {G, S, E},
    "groups.g.dispatch": {S},
    "groups.g.control": {G, S, O},
    "groups.g.debug": {O},
    "groups.g.handover": {E},
    "gateways.gateway-1": {G},
    "generations.cancel": {G},
    "services.gateway.g": {O},
    "services.executor.e": {O},
    "limits.in_use": {G},
    "health.events": {H},
    "health.connections.closed": set(),
    "health.beats.gateway.x": {G},
    "health.beats.executor.x": {E},
    "health.beats.health-monitor.x": {H},
    "$KV.groups.g": {H},
    "$KV.services.g": {H},
    "$KV.models.m": {E},
    "$KV.registry.m": {G, O},
    "$KV.adapters.a": {G, S, O},
    "$KV.hosts.h": {H},
    "$KV.leases.models": {S},
    "$KV.placements.m": {S},
    "models.waiting": {S},
    "hosts.h.control": {G, S, O},
    "models.demand": {G},
    "$KV.sessions.s": {S, E},
    "$KV.api_keys.k": {O},
    "$KV.idempotency.k": {G},
    "$KV.limits.k": {G},
    "$KV.responses.r": {G},
    "$KV.generations.k": {G},
    "$O.tokenizers.M.x": {E},
    "$O.adapters.M.x": {G, E},
    "$JS.API.STREAM.MSG.GET.KV_api_keys": {G, O},
    "$JS.API.DIRECT.GET.KV_api_keys.$KV.api_keys.k": {G, O},
    "$JS.API.CONSUMER.CREATE.KV_api_keys.c.$KV.api_keys.>": {G, O},
    "$JS.API.CONSUMER.CREATE.KV_api_keys": {G, O},
    "$JS.API.CONSUMER.DELETE.KV_api_keys.c": set(),
    "$JS.API.CONSUMER.CREATE.KV_groups.c.$KV.groups.>": ALL,
    "$JS.API.CONSUMER.CREATE.KV_sessions": {S},
    "batches.submit": {O, B},
    "batches.status": {O, B},
    "batches.results.b": {G},
    "$KV.batches.b": {G},
    "$KV.files.f": {G},
    "$O.files.C.n": {G, O, B},
    "$JS.API.STREAM.PURGE.OBJ_files": {G},
    "$JS.API.STREAM.PURGE.BATCHES": {G},
    "$JS.API.STREAM.PURGE.KV_files": {G},
    "$JS.API.STREAM.PURGE.KV_responses": {G},
    "$JS.API.STREAM.PURGE.KV_records": {G},
    "$JS.API.STREAM.UPDATE.KV_records": {G, O},
    "$JS.API.CONSUMER.DELETE.KV_files.c": {G},
    "$JS.API.STREAM.PURGE.KV_groups": set(),
    "$JS.API.CONSUMER.CREATE.KV_idempotency": {G},
    "$JS.API.CONSUMER.CREATE.JOURNAL": {G, O},
    "$JS.API.CONSUMER.MSG.NEXT.JOURNAL.c": {G, O},
    "$JS.API.CONSUMER.CREATE.INTAKE": {S},
    "$JS.API.CONSUMER.MSG.NEXT.INTAKE.c": {S},
    "$JS.ACK.INTAKE.c.1.1.1.1.1": {S},
    "$JS.API.STREAM.MSG.DELETE.INTAKE": {G},
    "$JS.API.STREAM.MSG.DELETE.JOURNAL": set(),
    "$JS.API.STREAM.CREATE.JOURNAL": {G, S, H, O},
    "$JS.API.STREAM.CREATE.KV_models": {G, O},
    "$JS.API.STREAM.CREATE.OBJ_tokenizers": {G},
    "$JS.API.STREAM.CREATE.OBJ_files": {G, O},
    "$JS.API.STREAM.CREATE.KV_api_keys": {O},
    "$KV.keys.k": set(),
    "$JS.API.STREAM.CREATE.KV_keys": set(),
    "$JS.API.CONSUMER.CREATE.KV_keys": {G, O},
    "$JS.API.STREAM.CREATE.other": set(),
    "$JS.API.STREAM.UPDATE.JOURNAL": {G, O},
    "$JS.API.STREAM.UPDATE.KV_api_keys": {O},
    "$JS.API.STREAM.UPDATE.KV_responses": {G, O},
    "$JS.API.STREAM.DELETE.JOURNAL": set(),
    "$JS.API.STREAM.PURGE.INTAKE": set(),
    "$JS.API.STREAM.PURGE.KV_api_keys": set(),
    "$JS.API.ACCOUNT.PURGE.RYZANSTEIN": set(),
    "$SYS.REQ.SERVER.PING": set(),
    "_INBOX.gateway.x": {G, E},
    "_INBOX.scheduler.x": {E},
    "_INBOX.executor.x": {E},
    "_INBOX.operator.x": SERVICES,
    "_INBOX.batch.x": {G},
    "_INBOX.health-monitor.x": set(),
}
SUBSCRIBE: dict[str, set[str]] = {
    "tokens.gateway-1": {G},
    "gateways.gateway-1": {G},
    "limits.in_use": {G},
    "generations.cancel": {S},
    "health.events": {G, S, O},
    "health.beats.>": {H, O},
    "health.connections.opened": {H},
    "groups.g.dispatch": {E},
    "groups.g.control": {E},
    "groups.g.debug": {E},
    "services.gateway.g": {G},
    "services.scheduler.s": {S},
    "services.health-monitor.m": {H},
    "services.executor.e": {E},
    "services.>": set(),
    "groups.g.handover": {E},
    "batches.submit": {G},
    "batches.results.b": set(),
    "intake.>": set(),
    "records.>": set(),
    "$KV.api_keys.>": set(),
    "$KV.>": set(),
    "$JS.>": set(),
    "$SYS.>": set(),
    "_INBOX.>": set(),
    ">": set(),
    **{f"{inbox_of(user)}.x.>": {user} for user in USERS},
}
_VIOLATION = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]+)\"", re.IGNORECASE)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[LocalNats]:
    made = LocalNats(tmp_path / "nats", least_rights=True)
    await made.start()
    bus = await Bus.connect(settings_of(made, O), "test")
    await ensure_streams(bus)
    await bus.close()
    yield made
    await made.stop()


def settings_of(server: LocalNats, user: str) -> CommonSettings:
    return server.settings(user)


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
async def test_the_broker_lets_each_user_do_what_the_table_says_and_nothing_else(server: LocalNats, user: str) -> None:
    refused: set[tuple[str, str]] = set()

    async def on_error(error: Exception) -> None:
        if found := _VIOLATION.search(str(error)):
            subject = found[2].lower().replace(MAPPED.lower(), API.lower())
            refused.add(("publish" if found[1].lower() == "publish" else "subscribe", subject))

    client = await nats.connect(
        server.url, user=user, password=server.passwords[user], error_cb=on_error, inbox_prefix=inbox_of(user)
    )
    try:
        for subject in PUBLISH:
            await client.publish(subject, b"{}")
        for subject in SUBSCRIBE:
            await client.subscribe(subject)
        await client.flush()
        expected = {("publish", name.lower()) for name, who in PUBLISH.items() if user not in who}
        expected |= {("subscribe", name.lower()) for name, who in SUBSCRIBE.items() if user not in who}
        await until(lambda: len(refused) >= len(expected))
        assert refused == expected
    finally:
        await client.close()
    assert "Violation" in server.log.read_text()


async def test_one_users_password_is_no_use_to_another(server: LocalNats) -> None:
    assert len({server.passwords[user] for user in USERS}) == len(USERS)
    mixed = CommonSettings(nats_url=server.url, nats_user=G, nats_password=server.passwords[E])
    with pytest.raises(BrokerUnavailable, match="refused the user name or password"):
        await Bus.connect(mixed, "test")


async def test_health_monitors_hear_whose_connections_open_and_close(server: LocalNats) -> None:
    """Of every user, though each has an account of its own: a process that died is seen at once."""
    monitor = await Bus.connect(settings_of(server, H), "monitor")
    heard: dict[str, list[str]] = {subjects.CONNECTION_OPENED: [], subjects.CONNECTION_CLOSED: []}

    async def on_event(message: Msg) -> None:
        heard[message.subject].append(json.loads(message.data)["client"]["name"])

    async def hears(subject: str, name: str) -> None:
        await until(lambda: any(name in other for other in heard[subject]))

    for subject in heard:
        await monitor.client.subscribe(subject, cb=on_event)
    await monitor.client.flush()
    for user in USERS:
        bus = await Bus.connect(settings_of(server, user), f"of-{user}")
        await hears(subjects.CONNECTION_OPENED, f"of-{user}")
        await bus.close()
        await hears(subjects.CONNECTION_CLOSED, f"of-{user}")
    await monitor.close()


async def test_a_gateway_keeps_its_tenants_quotas_within_its_rights(server: LocalNats) -> None:
    bus = await Bus.connect(settings_of(server, G), "test")
    try:
        made = GatewaySettings(tenant_record_bytes=1 << 20)
        files, large = Files(bus, made), LargeRecords(bus, made)
        await files.start()
        await large.bucket.ensure()
        watching = asyncio.create_task(files.watch())
        record = FileRecord("file-1", "acme", "a", "batch", 1.0, "file-1")
        await files.publish(record)
        assert await files.listed("acme", None) == [record]
        await files.delete("file-1", "acme")
        await until(lambda: len(files._marks) == 1)
        await files._records.purge(tenant_key("acme", "file-1"))
        assert (await bus.jetstream().stream_info(f"KV_{subjects.FILES_BUCKET}")).state.messages == 0
        request = GenerationRequest("i-0", "r", "m", "g", [1] * 100_000, 9, tenant="acme")
        for number in range(20):
            whole = GenerationRecord(f"{number}", "completions", 1.0, [request], tenant="acme")
            await large.put(whole, [encode(whole)])
        await large._trimmed.looked()
        assert (await bus.jetstream().stream_info(f"KV_{subjects.RECORDS_BUCKET}")).state.messages < 15
        watching.cancel()
    finally:
        await bus.close()
    assert "Violation" not in server.log.read_text()


def set_up(folder: Path) -> dict[User, str]:
    """The passwords that compose/setup makes there."""
    setup = Path(__file__).parents[2] / "compose" / "setup"
    subprocess.run([setup], env={**os.environ, "SECRETS": str(folder)}, check=True, capture_output=True)
    return {user: (folder / f"nats-password-{user}").read_text() for user in USERS}


@pytest.mark.parametrize("file", ["", "../secrets/nats-passwords"])
async def test_a_configuration_for_a_server_of_ones_own(tmp_path: Path, file: str) -> None:
    """nats-server takes it, with the passwords in its environment alone, or in the file that compose/setup makes."""
    config = tmp_path / "etc" / "nats.conf"
    config.parent.mkdir()
    store = str(tmp_path / "store")
    config.write_text(deployed(listen="127.0.0.1:-1", store=store, tls={}, passwords=file))
    config.write_text(config.read_text() + f'ports_file_dir: "{tmp_path}"\n')
    passwords = {user: f"secret-of-{user}" for user in USERS}
    if file:
        passwords = set_up(tmp_path / "secrets")
    process = await asyncio.create_subprocess_exec(
        str(find_binary()),
        "-c",
        str(config),
        env={} if file else {variable_of(user): password for user, password in passwords.items()},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        ports = tmp_path / f"nats-server_{process.pid}.ports"
        await until(lambda: ports.exists() and ports.read_text().strip().endswith("}"))
        url = re.search(r"nats://[\d.:]+", ports.read_text())
        assert url
        for user in USERS:
            settings = CommonSettings(nats_url=url[0], nats_user=user, nats_password=passwords[user])
            bus = await Bus.connect(settings, "test")
            await bus.flush()
            await bus.close()
        assert not any(password in config.read_text() for password in passwords.values())
    finally:
        process.terminate()
        await process.wait()
