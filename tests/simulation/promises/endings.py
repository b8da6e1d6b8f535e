"""Ends: everything has one in time, and refuses only where the pages say so."""

from collections.abc import Iterator
from typing import ClassVar

from services.gateway.core.settings import GatewaySettings
from tests.simulation.clients.client import LOST_TOO_OFTEN
from tests.simulation.clients.history import Request, Try
from tests.simulation.promises.evidence import Evidence
from tests.simulation.promises.promise import Finding, Promise

# Virtual seconds after the last fault in which a request has an end: recovery, an answer, its client's pauses.
REQUEST_WITHIN = 180.0
BATCH_WITHIN = 1800.0
JOB_WITHIN = 3600.0
# Seconds after a fault in which a gateway that has only just started, or has lost its broker, may refuse.
AFTERMATH = 30.0
WINDOW = 60.0  # seconds that a limit which was lowered is felt by what was asked before it was raised again
NEVER = ("internal_error",)  # codes that no page allows
FATAL = "fatal_request"  # of one that seems to end the rings that compute it
SUSPECTS = ("rank_fault", "engine_fault", "engine_stall")  # faults for which what was computed may be to blame
IN_ORDER = ("drain", "rolling_restart", "upgrade")  # what operators do, by which nothing is lost
ATTEMPTS: int = GatewaySettings.model_fields["recovery_attempts"].default
# Codes of what is beyond the limits of a key or tenant; the second is gRPC's RESOURCE_EXHAUSTED.
LIMITED = ("rate_limit_exceeded", "8")
FULL = ("queue_full", "8")  # and beyond the places of a gateway
AT_THEIR_OWN_PACE = ("slow", "limited")  # kinds of clients that make themselves wait


class EveryEnd(Promise):
    """No request, batch or job is left without an end once faults are over."""

    name: ClassVar[str] = "every_end"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        now, history = evidence.now, evidence.history
        for request in history.requests:
            if request.kind not in AT_THEIR_OWN_PACE:
                since, within = max(request.started, evidence.quiet_since), REQUEST_WITHIN * evidence.patience
                yield from self._late(request.name, request.identity, since, request.ended, now, within)
        for batch in history.batches:
            since, name = max(batch.started, evidence.quiet_since), f"batch {batch.identity} ({batch.status})"
            yield from self._late(name, batch.identity, since, batch.ended, now, BATCH_WITHIN)
        for job in history.jobs:
            since, name = max(job.started, evidence.quiet_since), f"job {job.identity} ({job.status})"
            yield from self._late(name, job.identity, since, job.ended, now, JOB_WITHIN)

    def _late(
        self, name: str, identity: str, since: float, ended: float, now: float, within: float
    ) -> Iterator[Finding]:
        took = (now if ended < 0 else ended) - since
        if took > within:
            state = "has no end" if ended < 0 else "had its end only"
            yield f"{name} {state} {took:.0f} s after it began and faults were over.", identity or name


class AllowedRefusals(Promise):
    """A refusal says to retry, and happens only while the broker, or the client's own gateway, is in trouble."""

    name: ClassVar[str] = "allowed_refusals"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for request in evidence.history.requests:
            if request.fault and not (FATAL in request.fault and self._looks_guilty(evidence, request)):
                yield f"{request.name}: {request.fault}.", request.identity or request.name
            for tried in request.tries:
                if tried.ending == "refused" and not self._allowed(evidence, request, tried):
                    told = (
                        f"{request.name} was refused by {tried.gateway} at {tried.until:.3f} s with "
                        f"{tried.status} {tried.code}, and nothing was wrong there."
                    )
                    yield told, request.identity or request.name

    def _looks_guilty(self, evidence: Evidence, request: Request) -> bool:
        """Two groups, one of which may have computed it alone, have ended by a fault of their own meanwhile."""
        until = evidence.now if request.ended < 0 else request.ended
        faults = evidence.during(request.started, until, AFTERMATH * evidence.patience)
        return sum(one.name in SUSPECTS for one in faults) > 1

    def _lost_often(self, evidence: Evidence, request: Request, tried: Try) -> bool:
        """More executors than it has attempts were lost meanwhile; one that was drained was not."""
        faults = evidence.during(request.started, tried.until, AFTERMATH * evidence.patience)
        return sum(one.target.startswith("executor") and one.name not in IN_ORDER for one in faults) > ATTEMPTS

    def _allowed(self, evidence: Evidence, request: Request, tried: Try) -> bool:
        if tried.code in NEVER:
            return False
        if tried.code == request.wanted.refusal or request.cancel_asked:
            return True
        if tried.code == FATAL:
            return self._looks_guilty(evidence, request)
        if tried.replaced or (tried.code == LOST_TOO_OFTEN and self._lost_often(evidence, request, tried)):
            return True
        if self._limited(evidence, request, tried):
            return True
        if tried.status == 429:
            return False
        if tried.code.startswith("model_") and request.kind == "models":
            return True
        host = tried.gateway.rpartition(":")[0]
        aftermath = AFTERMATH * evidence.patience
        return any(
            fault.concerns(host) and fault.explains(tried.at, tried.until, aftermath) for fault in evidence.faults
        )

    def _limited(self, evidence: Evidence, request: Request, tried: Try) -> bool:
        """Its client tries limits, or an operator has lowered them; or gateways have few places."""
        if tried.code in FULL and evidence.settings.get("max_generations"):
            return True
        lowered = evidence.during(tried.at, tried.until, WINDOW)
        tries = request.kind == "limited" or any(fault.refuses == "limits" for fault in lowered)
        return tried.code in LIMITED and tries


class NoSurprises(Promise):
    """Clients of files, batches, jobs and models meet nothing that no page describes."""

    name: ClassVar[str] = "no_surprises"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for at, told in evidence.history.faults:
            yield f"At {at:.3f} s {told}.", told.partition(":")[0]
