"""Which model could not be loaded where, and when it may be tried there again. Pure: times are unix seconds."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from shared.messages import ModelSpec

# Seconds before a load is tried again where it has failed, doubled with each time in a row.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0
# Times in a row that a load is tried on one host; then not before the model is changed or loaded by name, or
# `FORGOTTEN_AFTER` seconds have passed.
MOST_TRIES = 5
FORGOTTEN_AFTER = 3600.0
NO_ROOM_PAUSE = 5.0  # seconds for which a host is not asked again that has refused for want of memory
FORGOTTEN_SOON = 60.0  # seconds after which it is forgotten that there was no room
NO_ROOM_TRIES = 4  # times in a row that it may say so where there should be room; then the load has failed


@dataclass(slots=True)
class Failure:
    """Of one model on one host."""

    host: str
    error: str
    told_at: float  # when it failed, by the host's clock
    times: int
    until: float  # when it may be tried again


class Failures:
    """Bounded by the models of the registry times the hosts that are there."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Failure]] = {}
        self._versions: dict[str, tuple[object, ...]] = {}
        # Hosts where there was no room for each model: until when, and how often in a row.
        self._full: dict[str, dict[str, tuple[float, int]]] = {}
        # When hosts have said so by a heartbeat, by their clocks.
        self._full_at: dict[tuple[str, str], float] = {}

    def on_failure(self, model: str, host: str, failed_at: float, error: str, now: float) -> bool:
        """A host says that a load failed at `failed_at`; whether that is news."""
        known = self._known.get(model, {}).get(host)
        if known is not None and failed_at <= known.told_at:
            return False
        self.failed(model, host, error, now, failed_at)
        return True

    def told_no_room(self, model: str, host: str, failed_at: float, error: str, now: float) -> bool:
        """The same where it had no room for it."""
        if failed_at <= self._full_at.get((model, host), 0.0):
            return False
        self._full_at[model, host] = failed_at
        self.no_room(model, host, error, now)
        return True

    def failed(self, model: str, host: str, error: str, now: float, failed_at: float = 0.0) -> None:
        """A load has failed, or was refused."""
        known = self._known.setdefault(model, {}).get(host)
        times = known.times + 1 if known is not None else 1
        pause = min(FIRST_PAUSE * 2.0 ** (times - 1), LONGEST_PAUSE)
        until = now + (pause if times < MOST_TRIES else FORGOTTEN_AFTER)
        told_at = max(failed_at, known.told_at if known is not None else 0.0)
        self._known[model][host] = Failure(host, error, told_at, times, until)

    def no_room(self, model: str, host: str, error: str, now: float) -> None:
        """The host has refused for want of memory: that is no fault of the model's."""
        full = self._full.setdefault(model, {})
        times = full.get(host, (0.0, 0))[1] + 1
        full[host] = now + NO_ROOM_PAUSE, times
        if times >= NO_ROOM_TRIES:
            self.failed(model, host, error, now)

    def succeeded(self, model: str, host: str) -> None:
        self._known.get(model, {}).pop(host, None)
        self._full.get(model, {}).pop(host, None)

    def blocked(self, model: str, now: float) -> set[str]:
        """Hosts where it is not to be tried now."""
        known, full = self._known.get(model, {}), self._full.get(model, {})
        hosts = {host for host, failure in known.items() if now < failure.until}
        return hosts | {host for host, (until, _) in full.items() if now < until}

    def of(self, model: str) -> Iterator[Failure]:
        yield from self._known.get(model, {}).values()

    def keep(self, specs: Mapping[str, ModelSpec], hosts: Container[str], now: float) -> None:
        """Forgets models and hosts that are gone, and what was known of a model before it was changed."""
        for model in list(self._known):
            spec = specs.get(model)
            if spec is None:
                del self._known[model]
                continue
            version = (spec.source, spec.revision, spec.settings, spec.action_at)
            if self._versions.setdefault(model, version) != version:
                self._versions[model] = version
                self._known[model].clear()
            for host in [host for host in self._known[model] if host not in hosts]:
                del self._known[model][host]
        for model in [model for model in self._versions if model not in self._known]:
            del self._versions[model]
        for key in [key for key in self._full_at if key[0] not in specs or key[1] not in hosts]:
            del self._full_at[key]
        for model, full in list(self._full.items()):
            for host in [host for host, (until, _) in full.items() if until + FORGOTTEN_SOON <= now]:
                del full[host]
            if not full:
                del self._full[model]
