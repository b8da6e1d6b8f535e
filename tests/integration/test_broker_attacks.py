"""A service that was taken over, on a real NATS: through the server it says no more than it may.

Every user with each of its rights: replies of JetStream's answers, of messages read directly, of pulls and of stored
messages; subjects and heartbeats of consumers; streams that it makes or changes to copy, rename or republish.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.cli.commands.keys import open_keys
from services.cli.supervision.nats_server import LocalNats
from shared.keys import new_key
from shared.nats import subjects
from shared.nats.bus import Bus, encode
from shared.nats.permissions import USERS, Rights, User, inbox_of, rights
from shared.nats.streams import ensure_streams

ATTACKERS: tuple[User, ...] = tuple(user for user in USERS if user != "operator")
KEY = new_key("acme", 1.0)
FORGED = encode(new_key("acme", 2.0).record)
OF_KEYS = f"KV_{subjects.KEYS_BUCKET}"
# What others hear, and an attacker may not say; and each one's inbox, whose name it has no way to know.
LISTENERS: dict[User, tuple[str, ...]] = {
    "executor": ("groups.g.control", "groups.g.dispatch", "hosts.h.control", "groups.g.debug"),
    "gateway": ("services.gateway.g", "health.events", "tokens.g", "batches.submit"),
    "scheduler": ("services.scheduler.s", "generations.cancel", "models.demand", "health.events"),
    "health-monitor": ("services.health-monitor.m", "health.beats.>"),
    "operator": ("health.events", "health.beats.>"),
}
TARGETS = (
    f"$KV.{subjects.KEYS_BUCKET}.forged",
    f"$KV.{subjects.KEYS_BUCKET}.{KEY.identity}",
    f"$JS.API.STREAM.DELETE.{OF_KEYS}",
    f"$JS.API.STREAM.PURGE.{OF_KEYS}",
    f"$JS.API.CONSUMER.CREATE.{OF_KEYS}",
    f"$KV.{subjects.OLD_KEYS_BUCKET}.forged",
    "$KV.groups.forged",
    "$KV.registry.forged",
    "$JS.API.STREAM.DELETE.KV_groups",
    "intake.interactive.m",
    *sorted({heard.replace(">", "executor.e") for several in LISTENERS.values() for heard in several}),
)
# Streams whose messages change what a group or a host is asked to do.
UNWRITTEN = ("KV_groups", "KV_registry", "INTAKE")


class Attack:
    """One user's connection."""

    def __init__(self, user: User, client: Client) -> None:
        self.user = user
        self.rights: Rights = rights(user)
        self._client = client

    async def ask(self, subject: str, about: Any = None) -> dict[str, Any]:
        """JetStream's answer; empty where the user may not ask, or nobody answers."""
        if not self.rights.may("publish", subject):
            return {}
        payload = b"" if about is None else json.dumps(about).encode()
        try:
            return json.loads((await self._client.request(subject, payload, timeout=2)).data or b"{}")
        except (nats.errors.Error, TimeoutError):
            return {}

    async def say(self, subject: str, payload: bytes, reply: str = "") -> None:
        if self.rights.may("publish", subject):
            await self._client.publish(subject, payload, reply=reply)

    async def write(self, stream: str, reply: str = "") -> None:
        """Something that would be a key, or a request of JetStream, under any name."""
        for payload in (FORGED, b""):
            await self.say(f"{subjects_of(stream)[0].removesuffix('>')}x", payload, reply)

    async def remake(self, stream: str) -> None:
        """Makes it, or changes it, so that what it stores gets elsewhere, or what is elsewhere gets into it."""
        own = subjects_of(stream)
        for more in (
            *({"republish": {"src": own[0], "dest": target}} for target in TARGETS),
            {"subject_transform": {"src": own[0], "dest": f"$KV.{subjects.KEYS_BUCKET}.>"}},
            {"sources": [{"name": OF_KEYS}]},
            {"mirror": {"name": OF_KEYS}, "subjects": []},
            {"subjects": [*own, f"$KV.{subjects.KEYS_BUCKET}.>"]},
            {"subjects": [*own, "$KV.groups.>"]},
        ):
            config = {"name": stream, "subjects": list(own), "storage": "file", "allow_direct": True} | more
            for act in ("CREATE", "UPDATE"):
                await self.ask(f"$JS.API.STREAM.{act}.{stream}", config)
            await self.write(stream)

    async def read_to(self, stream: str, target: str) -> None:
        """Has the server send what the stream holds, and what it says of it, to `target`."""
        last = f"{subjects_of(stream)[0].removesuffix('>')}x"
        about = json.dumps({"last_by_subj": last}).encode()
        await self.write(stream, target)
        await self.say(f"$JS.API.STREAM.INFO.{stream}", b"", target)
        await self.say(f"$JS.API.STREAM.MSG.GET.{stream}", about, target)
        await self.say(f"$JS.API.DIRECT.GET.{stream}", about, target)
        await self.say(f"$JS.API.DIRECT.GET.{stream}", b'{"seq": 999999}', target)  # its answer is empty
        await self.say(f"$JS.API.DIRECT.GET.{stream}.{last}", b"", target)
        pull: dict[str, Any] = {"ack_policy": "none", "inactive_threshold": 60 * 10**9, "mem_storage": True}
        push = pull | {"deliver_subject": target, "idle_heartbeat": 10**8}
        for config in (push, push | {"flow_control": True}):
            await self.ask(f"$JS.API.CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
        made = await self.ask(f"$JS.API.CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": pull})
        for wanted in ({"batch": 2, "no_wait": True}, {"batch": 9, "no_wait": True}):
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{made.get('name', 'none')}"
            await self.say(subject, json.dumps(wanted).encode(), target)

    async def settle(self) -> None:
        """Until the server has done what it was asked: the heartbeats of its last consumer have come."""
        inbox = self._client.new_inbox()
        stream = next(
            name
            for name in streams_of(self.rights)
            if self.rights.may("publish", _consumer(name)) and name not in _PLAIN
        )
        heartbeats = await self._client.subscribe(inbox)
        config = {"deliver_subject": inbox, "idle_heartbeat": 10**8, "deliver_policy": "new", "ack_policy": "none"}
        await self.ask(_consumer(stream), {"stream_name": stream, "config": config})
        for _ in range(3):
            await heartbeats.next_msg(timeout=10)


def _consumer(stream: str) -> str:
    return f"$JS.API.CONSUMER.CREATE.{stream}"


def streams_of(given: Rights) -> list[str]:
    """Those that stand in a user's rights to JetStream."""
    api = (subject.split(".") for subject in given.publish if subject.startswith("$JS.API."))
    return sorted({part for parts in api for part in parts if part.startswith(("KV_", "OBJ_")) or part in _PLAIN})


_PLAIN = {
    subjects.INTAKE_STREAM: (subjects.ALL_INTAKE,),
    subjects.JOURNAL_STREAM: ("tokens.>", subjects.ALL_RECORDS),
    subjects.BATCHES_STREAM: ("batches.results.>",),
}


def subjects_of(stream: str) -> tuple[str, ...]:
    kind, _, name = stream.partition("_")
    return _PLAIN.get(stream) or ((f"$KV.{name}.>",) if kind == "KV" else (f"$O.{name}.>",))


class Heard:
    """What the others' clients get."""

    def __init__(self) -> None:
        self.subjects: list[str] = []

    async def hear(self, message: Msg) -> None:
        self.subjects.append(message.subject)


async def connected(server: LocalNats, user: User) -> Client:
    async def ignore(error: Exception) -> None:
        """Refusals are what is asked for here."""

    return await nats.connect(
        server.url, user=user, password=server.passwords[user], inbox_prefix=inbox_of(user), error_cb=ignore
    )


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[LocalNats]:
    made = LocalNats(tmp_path / "nats", least_rights=True)
    await made.start()
    yield made
    await made.stop()


async def make_streams(server: LocalNats) -> None:
    """Each by somebody who may, with answers to direct questions, which not all have."""
    for user in USERS:
        client = await connected(server, user)
        maker = Attack(user, client)
        for stream in streams_of(maker.rights):
            config = {"name": stream, "subjects": list(subjects_of(stream)), "allow_direct": True}
            await maker.ask(f"$JS.API.STREAM.CREATE.{stream}", config)
        await client.close()


async def listening(server: LocalNats, attacker: User) -> tuple[list[Client], dict[tuple[User, str], Heard]]:
    """All others, and what they hear."""
    clients, heard = [], {}
    for other, wanted in LISTENERS.items():
        if other == attacker:
            continue
        clients.append(await connected(server, other))
        for subject in wanted:
            heard[other, subject] = Heard()
            await clients[-1].subscribe(subject, cb=heard[other, subject].hear)
        await clients[-1].flush()
    return clients, heard


@pytest.mark.parametrize(
    "before", [pytest.param(False, id="streams there"), pytest.param(True, id="no streams yet", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "user", [pytest.param(user, marks=() if user == "batch" else pytest.mark.slow) for user in ATTACKERS]
)
async def test_who_takes_a_service_over_makes_no_key_and_says_nothing_that_it_may_not(
    server: LocalNats, user: User, before: bool
) -> None:
    async with Bus.session(server.settings("operator"), "test") as bus:
        await ensure_streams(bus)
        keys = await open_keys(bus)
        await keys.put(KEY.identity, KEY.record)
        if not before:
            await make_streams(server)
        clients, heard = await listening(server, user)
        attacker = await connected(server, user)
        clients.append(attacker)
        attack = Attack(user, attacker)
        streams = streams_of(attack.rights)
        for stream in streams:
            await attack.remake(stream)
        await make_streams(server)
        counted = {name: await last(bus, name) for name in UNWRITTEN}
        for target in TARGETS:
            if attack.rights.may("publish", target):
                continue
            for stream in streams:
                await attack.read_to(stream, target)
        await attack.settle()
        await asyncio.gather(*(client.flush() for client in clients))

        assert (await keys.items()) == {KEY.identity: KEY.record}
        assert await last(bus, OF_KEYS) == 1, "nothing was ever written there"
        for (other, subject), messages in heard.items():
            said = {name for name in messages.subjects if not attack.rights.may("publish", name)}
            assert not said, f"{other} has heard {said} on {subject}"
        if user in ("executor", "batch"):
            assert {name: await last(bus, name) for name in UNWRITTEN} == counted
        await asyncio.gather(*(client.close() for client in clients))


async def last(bus: Bus, stream: str) -> int:
    """Number of the last message that was written."""
    return (await bus.jetstream().stream_info(stream)).state.last_seq
