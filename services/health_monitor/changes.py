"""Which records are due: a change of state at once, load at most once per interval."""

from collections.abc import Mapping
from typing import Generic, TypeVar

import msgspec

from shared.messages import GroupRecord, ServiceRecord

Record = TypeVar("Record", GroupRecord, ServiceRecord)

CONFIRM_INTERVAL = 2.0
"""Seconds after which an unchanged record is written again, so that readers see that it is not stale, and
another monitor that the group is heard."""


class Due(msgspec.Struct, Generic[Record], frozen=True):
    """What to write and what to delete."""

    put: dict[str, Record]
    delete: list[str]


class Changes(Generic[Record]):
    """Compares records with the ones written last."""

    def __init__(self, load_interval: float) -> None:
        self._load_interval = load_interval
        self._written: dict[str, tuple[Record, float]] = {}

    def restore(self, records: Mapping[str, Record], now: float) -> None:
        """These records stand in the bucket already."""
        self._written = {key: (record, now) for key, record in records.items()}

    def due(self, records: Mapping[str, Record], now: float) -> Due[Record]:
        """What the bucket lacks at `now` (monotonic seconds)."""
        put = {key: record for key, record in records.items() if self._is_due(key, record, now)}
        return Due(put, [key for key in self._written if key not in records])

    def written(self, key: str, record: Record, now: float) -> None:
        self._written[key] = (record, now)

    def deleted(self, key: str) -> None:
        self._written.pop(key, None)

    def _is_due(self, key: str, record: Record, now: float) -> bool:
        if key not in self._written:
            return True
        last, when = self._written[key]
        if _lasting(record) != _lasting(last):
            return True
        interval = CONFIRM_INTERVAL if _content(record) == _content(last) else self._load_interval
        return now - when >= interval


def _lasting(record: GroupRecord | ServiceRecord) -> object:
    """What must be known at once."""
    if isinstance(record, GroupRecord):
        pids = [rank.pid for rank in record.ranks]
        return record.model, record.state, record.epoch, record.instance, record.weight < 1, pids
    return record.name, record.pid, record.state, record.address


def _content(record: GroupRecord | ServiceRecord) -> GroupRecord | ServiceRecord:
    return msgspec.structs.replace(record, updated_at=0.0, heard_at=0.0)
