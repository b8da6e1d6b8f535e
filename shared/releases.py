"""Which versions may use the same streams and buckets, one after the other or side by side. Pure.

    stream JOURNAL, metadata  ┌ ryzanstein-version      the newest that has used them
                              └ ryzanstein-readable-by  the oldest that reads all of what is in them

Gateways write it, everyone reads it before touching anything (`shared.nats.streams.ensure_streams`). Only minor
versions count: patches of one read and say the same (docs/compatibility.md).
"""

import re
from collections.abc import Iterable, Mapping

from shared.errors import ConfigurationError
from shared.process import VERSION

# Raised by a release that no longer reads what an older one has stored or says.
UPGRADES_FROM = "0.1"
# Raised by a release that stores what an older one does not read: its part of the changelog names it as the end of
# going back.
READABLE_BY = "0.1"

_VERSION_KEY, _READABLE_KEY = "ryzanstein-version", "ryzanstein-readable-by"
_NUMBERS = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def check(stored: Mapping[str, str], where: str, own: str = VERSION, upgrades_from: str = UPGRADES_FROM) -> None:
    """`stored`: the stream's metadata. Raises `ConfigurationError` where the version `own` cannot use what is there.
    What has no number (a tree that is not installed, a stream that no gateway has seen yet) is let through."""
    used = stored.get(_VERSION_KEY, "")
    if _minor(used) and _minor(used) < _minor(upgrades_from):
        raise ConfigurationError(
            f"The data in NATS at {where} was last used by Ryzanstein {used}, which {own} cannot upgrade; run "
            f"{upgrades_from} first, then {own}."
        )
    readable_by = stored.get(_READABLE_KEY, "")
    if _minor(own) and _minor(own) < _minor(readable_by):
        raise ConfigurationError(
            f"The data in NATS at {where} was written by Ryzanstein {used}, which {own} cannot read; run {readable_by} "
            "or newer."
        )


def metadata(stored: Mapping[str, str], own: str = VERSION, readable_by: str = READABLE_BY) -> dict[str, str]:
    """What the stream says from now on: neither number ever falls."""
    said = {_VERSION_KEY: own, _READABLE_KEY: readable_by}
    return {key: max(stored.get(key, ""), value, key=_numbers) for key, value in said.items()}


def downgrade_ends(stored: Mapping[str, str], readable_by: str) -> str:
    """The version that has used the streams and cannot read them any more from now on; empty: none."""
    used = stored.get(_VERSION_KEY, "")
    return used if _minor(used) and _minor(used) < _minor(readable_by) else ""


def far_apart(versions: Iterable[str]) -> tuple[str, str] | None:
    """The oldest and the newest of the `versions` that run, where these are no neighbours."""
    known = sorted(filter(_minor, versions), key=_numbers)
    if not known:
        return None
    oldest, newest = _minor(known[0]), _minor(known[-1])
    neighbours = ((oldest[0], oldest[1] + 1), (oldest[0] + 1, 0))
    return None if newest in (oldest, *neighbours) else (known[0], known[-1])


def _minor(version: str) -> tuple[int, ...]:
    """Empty, so below every version, where it is none."""
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, ...]:
    found = _NUMBERS.match(version)
    return tuple(int(number or 0) for number in found.groups()) if found else ()
