"""An account of NATS per user, and what each takes from the others. Pure.

nats-server checks what a client publishes, and not where it has the server send something for it: the reply of a
request to JetStream (the message itself, read directly), the subject that a consumer delivers to, the heartbeats of
one, the copies that a stream publishes. All these stay in one account. So nobody logs in where the streams are:

    executor ──EXECUTOR──┐ services: JetStream's API, what streams take   ┌─ STREAMS, no users ─┐
    gateway ──GATEWAY────┼───────────────────────────────────────────────▶│ every other stream  │
    operator ─OPERATOR───┤ streams: what consumers deliver to one's inbox │  exports all        │
                         └───────────────────────────────────────────────▶└─ KEYS: API keys ────┘

A reply in such a request is one of the account that has asked; what streams and consumers publish by themselves reaches
inboxes alone, whose names are random. What users say to each other goes from account to account: questions as services
of who hears them, news to several as streams of who says them.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from shared.nats import subjects
from shared.nats.permissions import USERS, Rights, User, inbox_of, matches, rights

# The account of the streams. Its name is older than the others: stores have their streams below it.
STREAMS = "RYZANSTEIN"
KEYS = "KEYS"  # that of the bucket of API keys
SYSTEM = "SYS"
API, MAPPED = "$JS.API.", "streams.API."

# What streams take of the subjects that are not JetStream's own.
_CAPTURED = (subjects.ALL_INTAKE, subjects.ALL_TOKENS, subjects.ALL_RECORDS, subjects.ALL_BATCH_RESULTS)
_ONE_ANSWER = (
    "STREAM.>",
    "DIRECT.>",
    "CONSUMER.CREATE.>",
    "CONSUMER.DURABLE.>",
    "CONSUMER.INFO.>",
    "CONSUMER.DELETE.>",
)
# JetStream's API. nats-server takes the kind of the first export that fits, so they must not overlap.
_MANY_ANSWERS = ("CONSUMER.MSG.NEXT.>",)
_OWN = ("$JS.API.>", "$JS.ACK.>", "$JS.FC.>", "$KV.>", "$O.>")
_HEARD = ("_INBOX.>", "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.*")  # what users hear of the streams' account

Kind = Literal["service", "stream"]


class Export(NamedTuple):
    kind: Kind
    subject: str
    many: bool = False  # whether a question has more than one answer


class AccountImport(NamedTuple):
    kind: Kind
    account: str
    subject: str
    to: str = ""  # its name here, where it is another


class NatsAccount(NamedTuple):
    exports: tuple[Export, ...] = ()
    imports: tuple[AccountImport, ...] = ()


def account_of(user: User) -> str:
    return user.upper().replace("-", "_")


def accounts() -> Mapping[str, NatsAccount]:
    """All but the system's, by name."""
    stored = tuple(_stored_exports())
    table = {user: rights(user) for user in USERS}
    made = {STREAMS: NatsAccount(stored), KEYS: NatsAccount(stored)}
    return made | {account_of(user): _of_user(user, table) for user in USERS}


def _stored_exports() -> Iterator[Export]:
    yield from (Export("service", f"{API}{act}") for act in _ONE_ANSWER)
    yield from (Export("service", f"{API}{act}", many=True) for act in _MANY_ANSWERS)
    yield from (Export("service", subject) for subject in (*_OWN[1:], *_CAPTURED))
    yield from (Export("stream", subject) for subject in _HEARD)


def _of_user(user: User, table: Mapping[User, Rights]) -> NatsAccount:
    exports = [
        *(Export("service", subject) for subject, kind in _heard(user, table) if kind == "service"),
        *(Export("stream", subject) for subject, kind, _ in _said(user, table) if kind == "stream"),
    ]
    imports = [
        *(
            AccountImport("service", _home(subject), subject, mapped(subject))
            for subject in table[user].publish
            if _is_stored(subject)
        ),
        *(
            AccountImport("service", account_of(to), subject)
            for subject, kind, to in _said(user, table)
            if kind == "service"
        ),
        *(
            AccountImport("stream", account_of(by), subject)
            for by in table
            if by != user
            for subject, kind, to in _said(by, table)
            if kind == "stream" and to == user
        ),
        *_from_streams(user, table[user]),
    ]
    return NatsAccount(tuple(dict.fromkeys(exports)), tuple(dict.fromkeys(imports)))


def mapped(subject: str) -> str:
    """What a question to JetStream is called in an account that has no streams: under its own name nats-server answers
    as well, that there are none. Empty: another subject."""
    return f"{MAPPED}{subject.removeprefix(API)}" if subject.startswith(API) else ""


def _is_stored(subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in (*_OWN, *_CAPTURED))


def _home(subject: str) -> str:
    """The account of the stream that the subject is about."""
    about = (f"KV_{subjects.KEYS_BUCKET}", subjects.KEYS_BUCKET)
    return KEYS if any(token in about for token in subject.split(".")) else STREAMS


def _said(user: User, table: Mapping[User, Rights]) -> Iterator[tuple[str, Kind, User]]:
    """What it says that streams do not take, as far as users of other accounts hear it."""
    for subject in table[user].publish:
        if subject.startswith(("_INBOX.", "_R_.")):
            continue
        hearing = [
            (other, heard)
            for other in table
            for pattern in table[other].subscribe
            if (heard := _common(subject, pattern))
        ]
        several = len({other for other, heard in hearing if heard == subject}) > 1
        kind: Kind = "stream" if several or _is_stored(subject) else "service"
        yield from ((heard, kind, other) for other, heard in hearing if other != user)


def _heard(user: User, table: Mapping[User, Rights]) -> Iterator[tuple[str, Kind]]:
    for other in table:
        if other != user:
            yield from ((subject, kind) for subject, kind, to in _said(other, table) if to == user)


def _common(one: str, other: str) -> str:
    """The narrower of two patterns; empty: they have nothing in common."""
    if matches(other, one):
        return one
    return other if matches(one, other) else ""


def _from_streams(user: User, given: Rights) -> Iterator[AccountImport]:
    for subject in given.subscribe:
        if any(matches(pattern, subject) for pattern in _HEARD):
            yield AccountImport("stream", STREAMS, subject)
    if any(_home(subject) == KEYS for subject in given.publish):
        yield AccountImport("stream", KEYS, f"{inbox_of(user)}.>")
    events = ((subjects.CONNECTION_OPENED, "CONNECT"), (subjects.CONNECTION_CLOSED, "DISCONNECT"))
    for subject, event in events:
        if subject in given.subscribe:
            for other in USERS:
                yield AccountImport("stream", SYSTEM, f"$SYS.ACCOUNT.{account_of(other)}.{event}", subject)
