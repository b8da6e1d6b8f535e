"""Tenants: what one of them does costs the others nothing."""

from collections.abc import Iterator
from typing import Any, ClassVar

from tests.simulation.clients.history import BatchSeen, Request
from tests.simulation.promises.evidence import Evidence
from tests.simulation.promises.promise import Finding, Promise

# Virtual seconds within which others are answered beside a flood: their answer, and the steps that they share.
SERVED_WITHIN = 20.0
MOST_GATEWAYS = 3  # that a line may end before it is struck
BEYOND = 2  # what two gateways may admit beyond a quota within the moment that news take
FLOOD = ("flood",)
AT_THEIR_OWN_PACE = ("slow", "limited", "flooding")


class OthersServed(Promise):
    """Beside a tenant's flood, with nothing else wrong, others are answered as quickly as they share a ring."""

    name: ClassVar[str] = "others_served"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        floods = [one for one in evidence.history.requests if one.kind == "flooding"]
        for request in evidence.history.requests:
            if request.kind in AT_THEIR_OWN_PACE or request.ended < 0:
                continue
            took = request.ended - request.started
            beside = any(one.tenant != request.tenant and _overlap(one, request) for one in floods)
            if beside and took > SERVED_WITHIN * evidence.patience and not self._explained(evidence, request):
                told = f"{request.name} of {request.tenant} took {took:.1f} s beside the flood of another tenant."
                yield told, request.identity or request.name

    def _explained(self, evidence: Evidence, request: Request) -> bool:
        faults = evidence.during(request.started, request.ended, SERVED_WITHIN)
        return any(fault.name not in FLOOD for fault in faults)


def _overlap(flood: Request, request: Request) -> bool:
    return flood.started <= request.ended and (flood.ended < 0 or request.started <= flood.ended)


class FatalLines(Promise):
    """A line that ends gateways is struck: it fails alone, with the error that says so, and its batch ends."""

    name: ClassVar[str] = "fatal_lines"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for batch, lost in evidence.history.poisoned.items():
            if lost > MOST_GATEWAYS:
                yield f"A line of {batch} has ended {lost} gateways.", batch
        for batch in evidence.history.batches:
            if batch.fatal and batch.ended >= 0:
                yield from self._end(batch)

    def _end(self, batch: BatchSeen) -> Iterator[Finding]:
        errors = {str(one["custom_id"]): _code(one) for one in batch.errors}
        if errors != {batch.fatal: "fatal_request"}:
            told = f"Batch {batch.identity} ({batch.status}) has the errors {errors} where {batch.fatal} is fatal."
            yield told, batch.identity


def _code(line: dict[str, Any]) -> str:
    """Of a line's error: of the answer that a client would have got, or of the batch's own."""
    error = line["error"] or line["response"]["body"]["error"]
    return str(error["code"])


class QuotasApart(Promise):
    """Who has filled a quota is refused, in a sentence that names the setting; nobody else is."""

    name: ClassVar[str] = "quotas_apart"

    def after(self, evidence: Evidence) -> Iterator[Finding]:
        for filled in evidence.history.filled:
            if filled.made > filled.most + BEYOND:
                told = f"{filled.tenant} made {filled.made} {filled.what}, and may have {filled.most}."
                yield told, f"{filled.client} {filled.what}"
        for at, tenant, told in evidence.history.quotas:
            if "RYZANSTEIN_TENANT_" not in told:
                yield f"{tenant} was refused at {at:.3f} s without the setting's name: {told}.", told
            if not any(one.tenant == tenant and one.since <= at for one in evidence.history.filled):
                yield f"{tenant}, which had filled no quota, was refused at {at:.3f} s: {told}.", tenant
