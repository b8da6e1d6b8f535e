"""Keys: one generation for each idempotency key, and nothing for a key that was revoked."""

from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

from tests.simulation.clients.history import Request
from tests.simulation.promises.evidence import Evidence, finished
from tests.simulation.promises.promise import Finding, Promise

# Virtual seconds in which every gateway that is reached by the broker knows of a revoked key.
REVOKED_WITHIN = 5.0
# And in which one that was not reached, or that has just started, is reached again: silence of a line is noticed by
# beats, and TCP sends again after up to half a minute.
RECONNECTED = 60.0


class OneAnswerPerKey(Promise):
    """All that is asked under one idempotency key gets one answer, which was computed once."""

    name: ClassVar[str] = "one_answer_per_key"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        by_key: dict[tuple[str, str], list[Request]] = defaultdict(list)
        for request in evidence.history.requests:
            if request.key and request.outcome == "answered":
                by_key[request.tenant, request.key].append(request)
        for (_, key), requests in by_key.items():
            names = sorted({request.identity for request in requests})
            if len(names) > 1:
                yield (f"The key {key} of {requests[0].client} got {len(names)} answers: {', '.join(names)}.", names[0])
            elif len({request.text for request in requests}) > 1:
                yield f"{requests[0].name} was answered with different texts under one key.", names[0]
        yield from self._computed(evidence)

    def _computed(self, evidence: Evidence) -> Iterator[Finding]:
        """By what the broker was given: generations that came to a good end, by the key that they were begun under."""
        ends = {wire.rpartition("-")[0] for wire in finished(evidence.store)}
        identities: dict[str, set[str]] = defaultdict(set)
        for _, record in evidence.store.records():
            if record.idempotency and record.identity in ends:
                identities[record.idempotency].add(record.identity)
        for several in identities.values():
            if len(several) > 1:
                shown = sorted(several)
                yield (
                    f"Under one idempotency key {len(shown)} generations were computed: {', '.join(shown)}.",
                    shown[0],
                )


class RevokedKeys(Promise):
    """A revoked key is refused within its stated time, by every gateway that the broker reaches."""

    name: ClassVar[str] = "revoked_keys"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for key in evidence.history.keys:
            for at, gateway in key.accepted:
                if at > self._known(evidence, key.revoked_at, at, gateway) + REVOKED_WITHIN:
                    late = at - key.revoked_at
                    told = f"{gateway} took the key rz-{key.identity} {late:.1f} s after it had been revoked."
                    yield told, key.identity
            known = {gateway: at for at, gateway in sorted(key.refused, reverse=True)}
            for at, gateway in key.accepted:
                if at > known.get(gateway, at):
                    yield f"{gateway} took the key rz-{key.identity} again at {at:.1f} s.", key.identity

    def _known(self, evidence: Evidence, revoked_at: float, at: float, gateway: str) -> float:
        """Since when the gateway must have known of it, at the latest; no earlier than that."""
        host, patience = gateway.rpartition(":")[0], RECONNECTED * evidence.patience
        away = [
            fault.ended + patience
            for fault in evidence.faults
            if fault.concerns(host) and fault.explains(revoked_at, at, patience)
        ]
        return max([revoked_at, *away])
