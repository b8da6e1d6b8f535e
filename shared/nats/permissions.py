"""Who may say and hear what on NATS: one user per service, with the least rights that it works with. Pure.

    user ──publish──▶ subjects of its own role, JetStream's API for the streams it reads, answers to who asks it
         ◀─subscribe─ subjects of its own role, its own inbox

Only who owns something may write it: groups, services and hosts the health monitor, keys the operator, the registry of
models the gateways and the operator, that of adapters the schedulers too, session pins the schedulers, and executors
that hand sessions over.
Streams and buckets are made by whoever comes first; what exists is changed by the gateways (limits of INTAKE, JOURNAL,
`records` and `responses`) and the operator (all) alone. Gateways remove entries of the buckets of which each tenant has
a quota. Patterns are NATS': `*` is one token, `>` all that follow.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from shared.messages import ServiceName
from shared.nats import subjects

User = Literal["gateway", "scheduler", "health-monitor", "executor", "operator", "batch"]
# The four services, `operator`: the command line, and `batch`: other programs that submit batches.
USERS: tuple[User, ...] = get_args(User)

_API = "$JS.API"
_STREAMS = (subjects.INTAKE_STREAM, subjects.JOURNAL_STREAM)
# Buckets of which each tenant has a quota.
_OF_TENANTS = (
    subjects.BATCHES_BUCKET,
    subjects.CHATS_BUCKET,
    subjects.CONVERSATIONS_BUCKET,
    subjects.FILES_BUCKET,
    subjects.RECORDS_BUCKET,
    subjects.RESPONSES_BUCKET,
    subjects.TRAINING_BUCKET,
    subjects.TRAINING_EVENTS_BUCKET,
)


# Who may create none: whoever creates one may have it copy another, or publish what it stores anywhere else.
_TAKE_STREAMS_AS_THEY_ARE: tuple[User, ...] = ("executor", "batch")


class Rights(NamedTuple):
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def may(self, action: Literal["publish", "subscribe"], subject: str) -> bool:
        """Whether the broker lets it."""
        return any(matches(pattern, subject) for pattern in getattr(self, action))


def rights(user: User) -> Rights:
    publish, subscribe = _TABLE[user]
    if user in _TAKE_STREAMS_AS_THEY_ARE:
        publish = tuple(subject for subject in publish if not subject.startswith(_create("")))
    inbox = f"{inbox_of(user)}.>"
    heard = (inbox, "$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.*", *subscribe)
    if user not in get_args(ServiceName):
        return Rights(publish, heard)
    streams = map(_info if user in _TAKE_STREAMS_AS_THEY_ARE else _create, _STREAMS)
    said = (f"health.beats.{user}.*", *_answers("operator"), *streams, _info(subjects.JOURNAL_STREAM), *publish)
    return Rights(said, (f"services.{user}.*", *heard))


def may_create(user: str, stream: str) -> bool:
    """Whether the broker lets it make the stream; a user that is not in the table may do everything."""
    return user not in USERS or rights(user).may("publish", _create(stream))


def inbox_of(user: str) -> str:
    """Where answers to that user go: nobody else hears them. An empty user has NATS' own default."""
    return f"_INBOX.{subjects.escape(user)}" if user else "_INBOX"


def matches(pattern: str, subject: str) -> bool:
    """Whether every subject of `subject`, which may be a pattern too, is one of `pattern`."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(given) > index
        if index >= len(given) or given[index] == ">" or part not in ("*", given[index]):
            return False
    return len(given) == len(wanted)


# --- JetStream's API, by what one wants of it ----------------------------------------------------


def _create(stream: str) -> str:
    """Makes it, or finds it as it is: what exists cannot be changed by this."""
    return f"{_API}.STREAM.CREATE.{stream}"


def _change(stream: str) -> str:
    return f"{_API}.STREAM.UPDATE.{stream}"


def _info(stream: str) -> str:
    return f"{_API}.STREAM.INFO.{stream}"


def _read(stream: str) -> Iterator[str]:
    """Messages by number or subject, and consumers of one's own."""
    yield _info(stream)
    yield f"{_API}.STREAM.MSG.GET.{stream}"
    yield f"{_API}.DIRECT.GET.{stream}"
    yield f"{_API}.DIRECT.GET.{stream}.>"
    yield f"{_API}.CONSUMER.CREATE.{stream}"
    yield f"{_API}.CONSUMER.CREATE.{stream}.>"
    yield f"{_API}.CONSUMER.INFO.{stream}.*"
    yield f"{_API}.CONSUMER.MSG.NEXT.{stream}.*"
    yield f"$JS.FC.{stream}.>"


def _read_through(stream: str) -> Iterator[str]:
    """Reads it with consumers that are removed behind each reading: nobody has a lasting one there."""
    yield from _read(stream)
    yield f"{_API}.CONSUMER.DELETE.{stream}.*"


def _work_off(stream: str) -> Iterator[str]:
    """Takes messages of a work queue, and says what became of them."""
    yield from _read(stream)
    yield f"{_API}.CONSUMER.DURABLE.CREATE.{stream}.*"
    yield f"$JS.ACK.{stream}.>"


def _bucket(name: str) -> Iterator[str]:
    """Reads a KV bucket."""
    yield _create(f"KV_{name}")
    yield from _read(f"KV_{name}")


def _own_bucket(name: str) -> Iterator[str]:
    """Reads and writes it."""
    yield from _bucket(name)
    yield f"$KV.{name}.>"


def _clear(name: str) -> Iterator[str]:
    """Removes entries of a KV bucket, and not only marks them as deleted; and one's readings of it in pages."""
    yield f"{_API}.STREAM.PURGE.KV_{name}"
    yield f"{_API}.CONSUMER.DELETE.KV_{name}.*"


def _own_keys(name: str) -> Iterator[str]:
    """Reads and writes keys that it knows, and cannot list the others."""
    yield _create(f"KV_{name}")
    yield f"{_API}.STREAM.INFO.KV_{name}"
    yield f"{_API}.STREAM.MSG.GET.KV_{name}"
    yield f"{_API}.DIRECT.GET.KV_{name}"
    yield f"{_API}.DIRECT.GET.KV_{name}.>"
    yield f"$KV.{name}.>"


def _objects(name: str) -> Iterator[str]:
    """Reads an object store. nats-py asks for the stream's name by its subject."""
    yield f"{_API}.STREAM.NAMES"
    yield from _read(f"OBJ_{name}")


def _own_objects(name: str) -> Iterator[str]:
    """Reads and writes it; what is overwritten is purged."""
    yield from _objects(name)
    yield _create(f"OBJ_{name}")
    yield f"{_API}.STREAM.PURGE.OBJ_{name}"
    yield f"$O.{name}.>"


def _submit_batches() -> Iterator[str]:
    """Batches by request-reply, their files in the object store: who may do this names the tenant itself."""
    yield from (subjects.BATCH_SUBMIT, subjects.BATCH_STATUS, subjects.BATCH_CANCEL, subjects.BATCH_LIST)
    yield from _objects(subjects.FILES_STORE)
    yield _create(f"OBJ_{subjects.FILES_STORE}")
    yield f"$O.{subjects.FILES_STORE}.>"


def _answers(*askers: User) -> Iterator[str]:
    """To whom one may answer: what the server calls a question of another account, or one's own kind; never any
    subject that a question names."""
    yield "_R_.>"
    yield from (f"{inbox_of(asker)}.>" for asker in askers)


def _stores() -> Iterator[str]:
    """The streams behind all buckets and object stores."""
    for name, value in vars(subjects).items():
        if name.endswith(("_BUCKET", "_STORE")):
            yield f"{'KV' if name.endswith('_BUCKET') else 'OBJ'}_{value}"


# --- the table -----------------------------------------------------------------------------------

_ALL_DISPATCH, _ALL_CONTROL, _ALL_GATEWAYS = "groups.*.dispatch", "groups.*.control", "gateways.*"
_ALL_DEBUG = "groups.*.debug"
_ALL_HANDOVER = "groups.*.handover"
_ALL_HOSTS = "hosts.*.control"

_TABLE: dict[User, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gateway": (
        (
            subjects.ALL_INTAKE,
            subjects.ALL_TOKENS,  # the end of a generation that no ring has said
            subjects.ALL_RECORDS,
            subjects.CANCEL,
            subjects.IN_USE,
            _ALL_CONTROL,
            _ALL_HOSTS,
            subjects.MODEL_DEMAND,
            _ALL_GATEWAYS,
            f"{_API}.STREAM.MSG.GET.{subjects.INTAKE_STREAM}",
            f"{_API}.STREAM.MSG.DELETE.{subjects.INTAKE_STREAM}",
            *map(_change, _STREAMS),
            *_read_through(subjects.JOURNAL_STREAM),
            *_bucket(subjects.GROUPS_BUCKET),
            *_bucket(subjects.SERVICES_BUCKET),
            *_bucket(subjects.MODELS_BUCKET),
            *_bucket(subjects.HOSTS_BUCKET),
            *_bucket(subjects.PLACEMENTS_BUCKET),
            *_own_bucket(subjects.REGISTRY_BUCKET),
            *_own_bucket(subjects.ADAPTERS_BUCKET),
            *_own_bucket(subjects.ADAPTER_FILES_BUCKET),
            f"{_API}.STREAM.PURGE.KV_{subjects.ADAPTER_FILES_BUCKET}",
            *_own_objects(subjects.ADAPTERS_STORE),  # they delete what no generation needs any more
            *_read(f"KV_{subjects.KEYS_BUCKET}"),
            *_read(f"KV_{subjects.OLD_KEYS_BUCKET}"),
            *_own_bucket(subjects.GENERATIONS_BUCKET),
            *_own_bucket(subjects.UNFINISHED_BUCKET),
            *_own_bucket(subjects.INHERITANCES_BUCKET),
            *_own_bucket(subjects.IDEMPOTENCY_BUCKET),
            *_own_bucket(subjects.LIMITS_BUCKET),
            *_own_bucket(subjects.RECORDS_BUCKET),
            *_own_bucket(subjects.RESPONSES_BUCKET),
            _change(f"KV_{subjects.RECORDS_BUCKET}"),  # their bytes and age are settings
            _change(f"KV_{subjects.RESPONSES_BUCKET}"),
            *_own_bucket(subjects.CHATS_BUCKET),
            *_own_bucket(subjects.CONVERSATIONS_BUCKET),
            *_objects(subjects.TOKENIZERS_STORE),
            _create(f"OBJ_{subjects.TOKENIZERS_STORE}"),  # for executors, which may not
            *_own_bucket(subjects.BATCHES_BUCKET),
            *_own_bucket(subjects.FILES_BUCKET),
            *_own_objects(subjects.FILES_STORE),
            *_own_bucket(subjects.TRAINING_BUCKET),
            *_own_bucket(subjects.TRAINING_EVENTS_BUCKET),
            *_own_objects(subjects.TRAINING_STORE),
            *(right for bucket in _OF_TENANTS for right in _clear(bucket)),
            subjects.ALL_BATCH_RESULTS,
            _create(subjects.BATCHES_STREAM),
            _change(subjects.BATCHES_STREAM),
            f"{_API}.STREAM.PURGE.{subjects.BATCHES_STREAM}",
            *_read(subjects.BATCHES_STREAM),
            *_answers("gateway", "operator", "batch"),
        ),
        (
            subjects.ALL_TOKENS,
            subjects.HEALTH_EVENTS,
            subjects.IN_USE,
            _ALL_GATEWAYS,
            subjects.BATCH_SUBMIT,
            subjects.BATCH_STATUS,
            subjects.BATCH_CANCEL,
            subjects.BATCH_LIST,
        ),
    ),
    "scheduler": (
        (
            _ALL_DISPATCH,
            _ALL_CONTROL,
            subjects.ALL_TOKENS,  # the end of a generation that no group has taken
            *_work_off(subjects.INTAKE_STREAM),
            *_bucket(subjects.GROUPS_BUCKET),
            *_own_bucket(subjects.SESSIONS_BUCKET),
            _ALL_HOSTS,
            *_bucket(subjects.HOSTS_BUCKET),
            *_bucket(subjects.REGISTRY_BUCKET),
            *_own_bucket(subjects.LEASES_BUCKET),  # of them one decides which host loads what
            *_own_bucket(subjects.PLACEMENTS_BUCKET),
            *_own_bucket(subjects.ADAPTERS_BUCKET),  # what has become of those that are declared
            *_own_bucket(subjects.TRAINING_BUCKET),  # which host trains
            *_own_bucket(subjects.TRAINING_EVENTS_BUCKET),
            subjects.SCHEDULER_DEMAND,
        ),
        (subjects.CANCEL, subjects.HEALTH_EVENTS, subjects.MODEL_DEMAND, subjects.SCHEDULER_DEMAND),
    ),
    "health-monitor": (
        (
            subjects.HEALTH_EVENTS,
            *_own_bucket(subjects.GROUPS_BUCKET),
            *_own_bucket(subjects.SERVICES_BUCKET),
            *_own_bucket(subjects.HOSTS_BUCKET),
            *map(_info, _STREAMS),  # how full they are
        ),
        (subjects.ALL_BEATS, subjects.CONNECTION_OPENED, subjects.CONNECTION_CLOSED),
    ),
    "executor": (
        (
            subjects.ALL_TOKENS,
            *_bucket(subjects.GROUPS_BUCKET),
            *_own_bucket(subjects.MODELS_BUCKET),
            *_own_objects(subjects.TOKENIZERS_STORE),
            *_bucket(subjects.ADAPTERS_BUCKET),
            *_bucket(subjects.REGISTRY_BUCKET),  # whose models' files stay
            *_own_bucket(subjects.ADAPTER_FILES_BUCKET),  # who needs what it has stored
            f"{_API}.STREAM.PURGE.KV_{subjects.ADAPTER_FILES_BUCKET}",
            *_own_objects(subjects.ADAPTERS_STORE),
            *_own_bucket(subjects.TRAINING_BUCKET),  # of jobs that it trains
            *_own_bucket(subjects.TRAINING_EVENTS_BUCKET),
            *_own_objects(subjects.TRAINING_STORE),
            *_own_keys(subjects.SESSIONS_BUCKET),  # a ring that leaves pins them to who has their blocks
            _ALL_HANDOVER,
            *_answers("scheduler", "gateway", "operator", "executor"),
        ),
        (_ALL_DISPATCH, _ALL_CONTROL, _ALL_DEBUG, _ALL_HANDOVER, _ALL_HOSTS),
    ),
    "operator": (
        (
            _ALL_CONTROL,
            _ALL_DEBUG,
            "services.*.*",
            *map(_create, _STREAMS),
            *map(_change, _STREAMS),
            *map(_info, _STREAMS),
            *_read_through(subjects.JOURNAL_STREAM),  # what the report of service levels is made from
            *map(_change, _stores()),
            *_bucket(subjects.GROUPS_BUCKET),
            *_bucket(subjects.SERVICES_BUCKET),
            _ALL_HOSTS,
            *_bucket(subjects.HOSTS_BUCKET),
            *_bucket(subjects.PLACEMENTS_BUCKET),
            *_bucket(subjects.MODELS_BUCKET),
            *_own_bucket(subjects.REGISTRY_BUCKET),
            *_own_bucket(subjects.ADAPTERS_BUCKET),
            *_own_bucket(subjects.KEYS_BUCKET),
            *_read(f"KV_{subjects.OLD_KEYS_BUCKET}"),
            *_submit_batches(),
        ),
        (subjects.ALL_BEATS, subjects.HEALTH_EVENTS),
    ),
    "batch": (tuple(_submit_batches()), ()),
}
