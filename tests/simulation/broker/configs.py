"""Streams' and consumers' settings as the JetStream API has them, and what it refuses. Pure; durations in nanoseconds.

Error codes are those of nats-server's `server/errors.json`.
"""

import datetime
from typing import Any, NamedTuple

import msgspec

from tests.simulation.broker.subjects import is_valid, matches, overlaps

SECOND = 1_000_000_000
DEFAULT_DUPLICATES = 120 * SECOND
LEAST_AGE = 100_000_000
DEFAULT_ACK_WAIT = 30 * SECOND
DEFAULT_ACK_PENDING = 1000
DEFAULT_WAITING = 512
EPHEMERAL_KEPT = 5 * SECOND


class Refused(Exception):
    """What the API answers: an error of its own."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.code, self.err_code, self.description = code, err_code, description

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "err_code": self.err_code, "description": self.description}


STREAM_NOT_FOUND = (404, 10059, "stream not found")
CONSUMER_NOT_FOUND = (404, 10014, "consumer not found")
NO_MESSAGE = (404, 10037, "no message found")
BAD_REQUEST = (400, 10003, "bad request")
NOT_ENABLED = (503, 10076, "JetStream not enabled")
NO_LEADER = (503, 10008, "JetStream system temporarily unavailable")
NO_RESOURCES = (503, 10023, "insufficient resources")
WRONG_NAME = (400, 10056, "stream name in subject does not match request")


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    name: str = ""
    description: str | None = None
    subjects: list[str] | None = None
    retention: str = "limits"
    max_consumers: int = -1
    max_msgs: int = -1
    max_bytes: int = -1
    max_age: int = 0
    max_msgs_per_subject: int = -1
    max_msg_size: int = -1
    discard: str = "old"
    discard_new_per_subject: bool = False
    storage: str = "file"
    num_replicas: int = 1
    no_ack: bool = False
    duplicate_window: int = 0
    compression: str = "none"
    allow_direct: bool = False
    mirror_direct: bool = False
    first_seq: int = 0
    sealed: bool = False
    deny_delete: bool = False
    deny_purge: bool = False
    allow_rollup_hdrs: bool = False
    allow_msg_ttl: bool = False
    subject_delete_marker_ttl: int = 0
    consumer_limits: dict[str, Any] = {}
    metadata: dict[str, str] = {}

    def normal(self) -> "StreamConfig":
        """With nats-server's defaults. Raises `Refused`."""
        window = min(DEFAULT_DUPLICATES, self.max_age) if self.max_age else DEFAULT_DUPLICATES
        made = msgspec.structs.replace(
            self,
            subjects=self.subjects or [self.name],
            num_replicas=self.num_replicas or 1,
            duplicate_window=self.duplicate_window or window,
            **{name: getattr(self, name) or -1 for name in _UNLIMITED},
        )
        made.check()
        return made

    def check(self) -> None:
        if 0 < self.max_age < LEAST_AGE:
            raise Refused(500, 10052, "max age needs to be >= 100ms")
        if self.max_age and self.duplicate_window > self.max_age:
            raise Refused(500, 10052, "duplicates window can not be larger then max age")
        for subject in self.subjects or []:
            if not is_valid(subject, wildcards=True):
                raise Refused(500, 10052, "invalid subject")

    def changed(self, new: "StreamConfig") -> None:
        """Whether a stream with these settings may get the `new` ones. Raises `Refused`."""
        for name, what in (("storage", "storage type"), ("max_consumers", "MaxConsumers")):
            if getattr(self, name) != getattr(new, name):
                raise Refused(500, 10052, f"stream configuration update can not change {what}")
        if self.retention != new.retention and "workqueue" in (self.retention, new.retention):
            what = "retention policy to/from workqueue"
            raise Refused(500, 10052, f"stream configuration update can not change {what}")

    def as_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = msgspec.to_builtins(self)
        for name in _LEFT_OUT:
            if not made[name]:
                del made[name]
        made["metadata"] = {**self.metadata, "_nats.level": "5", "_nats.ver": "2.15.1"}
        return made


_UNLIMITED = ("max_consumers", "max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size")
_LEFT_OUT = ("description", "discard_new_per_subject", "no_ack", "first_seq", "subject_delete_marker_ttl")


def overlap(config: StreamConfig, others: list[StreamConfig]) -> None:
    """Raises `Refused` where another stream takes one of its subjects too."""
    for other in others:
        if other.name == config.name:
            continue
        for subject in config.subjects or []:
            if any(overlaps(subject, theirs) for theirs in other.subjects or []):
                raise Refused(400, 10065, "subjects overlap with an existing stream")


class ConsumerConfig(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    name: str | None = None
    durable_name: str | None = None
    description: str | None = None
    deliver_policy: str = "all"
    opt_start_seq: int = 0
    opt_start_time: str | None = None
    ack_policy: str = "none"
    ack_wait: int = 0
    max_deliver: int = 0
    backoff: list[int] | None = None
    filter_subject: str | None = None
    filter_subjects: list[str] | None = None
    replay_policy: str = "instant"
    max_waiting: int = 0
    max_ack_pending: int = 0
    flow_control: bool = False
    headers_only: bool = False
    deliver_subject: str | None = None
    deliver_group: str | None = None
    idle_heartbeat: int = 0
    inactive_threshold: int = 0
    max_batch: int = 0
    max_expires: int = 0
    num_replicas: int = 0
    mem_storage: bool = False
    metadata: dict[str, str] = {}

    def normal(self, name: str) -> "ConsumerConfig":
        """With nats-server's defaults."""
        acked = self.ack_policy != "none"
        wait = self.backoff[0] if self.backoff else self.ack_wait
        ephemeral = not self.durable_name
        return msgspec.structs.replace(
            self,
            name=name,
            ack_wait=wait or (DEFAULT_ACK_WAIT if acked else 0),
            max_deliver=self.max_deliver or -1,
            max_ack_pending=self.max_ack_pending or (DEFAULT_ACK_PENDING if acked else 0),
            max_waiting=self.max_waiting or (0 if self.deliver_subject else DEFAULT_WAITING),
            inactive_threshold=self.inactive_threshold or (EPHEMERAL_KEPT if ephemeral else 0),
        )

    @property
    def filters(self) -> list[str]:
        """None: everything."""
        return self.filter_subjects or ([self.filter_subject] if self.filter_subject else [])

    def check(self, stream: StreamConfig, others: list["ConsumerConfig"]) -> None:
        """Raises `Refused` where `stream`, which has the `others`, cannot have it."""
        if self.deliver_policy == "by_start_sequence" and not self.opt_start_seq:
            what = "deliver by start sequence, but optional start sequence is not set"
            raise Refused(400, 10094, f"consumer delivery policy is {what}")
        if stream.retention == "workqueue":
            self._check_queue(others)

    def _check_queue(self, others: list["ConsumerConfig"]) -> None:
        if self.ack_policy != "explicit":
            if self.ack_policy == "none" and not self.deliver_subject:
                raise Refused(400, 10084, "consumer in pull mode requires explicit ack policy on workqueue stream")
            raise Refused(400, 10098, "workqueue stream requires explicit ack")
        others = [other for other in others if other.name != self.name]
        if others and not self.filters:
            raise Refused(400, 10099, "multiple non-filtered consumers not allowed on workqueue stream")
        theirs = [subject for other in others for subject in other.filters or [">"]]
        if any(overlaps(mine, subject) for mine in self.filters for subject in theirs):
            raise Refused(400, 10100, "filtered consumer not unique on workqueue stream")
        if self.deliver_policy != "all":
            raise Refused(400, 10101, "consumer must be deliver all on workqueue stream")

    def changed(self, new: "ConsumerConfig") -> None:
        """Raises `Refused` where a consumer cannot get the `new` settings."""
        for name, what in (
            ("deliver_policy", "deliver policy"),
            ("opt_start_seq", "start sequence"),
            ("ack_policy", "ack policy"),
        ):
            if getattr(self, name) != getattr(new, name):
                raise Refused(500, 10012, f"{what} can not be updated")

    def as_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "deliver_policy": self.deliver_policy,
            "ack_policy": self.ack_policy,
            "replay_policy": self.replay_policy,
            "num_replicas": self.num_replicas,
            **msgspec.to_builtins(self),
        }
        return made | {"metadata": {**self.metadata, "_nats.level": "5", "_nats.ver": "2.15.1"}}


class Permissions(NamedTuple):
    """What a user may do; None: everything."""

    publish: tuple[str, ...] | None = None
    subscribe: tuple[str, ...] | None = None

    def may_publish(self, subject: str) -> bool:
        return self.publish is None or any(matches(one, subject) for one in self.publish)

    def may_subscribe(self, subject: str) -> bool:
        return self.subscribe is None or any(matches(one, subject) for one in self.subscribe)


def time_of(text: str) -> int:
    """RFC 3339 as unix nanoseconds."""
    head, _, rest = text.rstrip("Z").partition(".")
    fraction = rest.partition("+")[0]
    moment = datetime.datetime.fromisoformat(head.partition("+")[0]).replace(tzinfo=datetime.UTC)
    return int(moment.timestamp()) * SECOND + int((fraction + "0" * 9)[:9])


def text_of(time: int) -> str:
    """Unix nanoseconds as RFC 3339; 0: Go's zero time."""
    if not time:
        return "0001-01-01T00:00:00Z"
    seconds, rest = divmod(time, SECOND)
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{moment}.{rest:09d}".rstrip("0").rstrip(".") + "Z"
