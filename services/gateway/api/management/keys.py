"""GET /v1/keys: who has keys, and what of their limits is used. Never a secret, nor its digest.

    `Authenticator`: all records of the KV bucket `api_keys` ──▶ a page ──▶ with what `Limiter` knows of their use

Gateways may not write that bucket: keys are made and revoked by the operator's `ryzanstein keys` alone, so that
whoever takes a gateway over can let nobody else in.
"""

import asyncio
import time
from typing import NamedTuple

import msgspec

from services.gateway.auth.authenticator import Authenticator, Principal
from services.gateway.core.pagination import ListPage, PageQuery, page
from services.gateway.ratelimit.limiter import Limiter, LimitsInUse
from shared.keys import KeyRecord

NO_LIMITS = LimitsInUse()


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """Times are unix seconds; null: none."""

    object: str = "api_key"
    id: str
    redacted_value: str  # the key without its secret
    name: str
    tenant: str
    state: str  # active, expired or revoked
    manage_models: bool
    view_keys: bool
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None  # when it let somebody in at this gateway; null: not since the gateway started
    limits: LimitsInUse  # of the key, by its record or the gateway's settings
    tenant_limits: LimitsInUse  # of all keys of its tenant together


class ApiKeyList(ListPage, kw_only=True):
    data: list[ApiKey]


class _Entry(NamedTuple):
    id: str
    created_at: float
    record: KeyRecord


class KeyManagement:
    """One per gateway."""

    def __init__(self, authenticator: Authenticator, limiter: Limiter) -> None:
        self._authenticator = authenticator
        self._limiter = limiter

    async def listed(self, wanted: PageQuery) -> ApiKeyList:
        """The newest first. Raises `RouteError`, `BrokerUnavailable`."""
        known = [_Entry(identity, one.created, one) for identity, one in self._authenticator.records.items()]
        entries, more = page(known, after=wanted.after, limit=wanted.limit)
        scopes = {
            scope.name: scope
            for entry in entries
            for scope in self._limiter.scopes(Principal(entry.id, entry.record.tenant, entry.record.limits))
        }
        used = await asyncio.gather(*map(self._limiter.in_use, scopes.values()))
        uses = dict(zip(scopes, used, strict=True))
        data = [self._shown(entry, uses) for entry in entries]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return ApiKeyList(object="list", data=data, first_id=first, last_id=last, has_more=more)

    def _shown(self, entry: _Entry, uses: dict[str, LimitsInUse]) -> ApiKey:
        record = entry.record
        return ApiKey(
            id=entry.id,
            redacted_value=f"rz-{entry.id}-***",
            name=record.name,
            tenant=record.tenant,
            state=record.state(time.time()),
            manage_models=record.manage_models,
            view_keys=record.view_keys,
            created_at=int(record.created),
            expires_at=int(record.expires) or None,
            revoked_at=int(record.revoked) or None,
            last_used_at=int(self._authenticator.used_at(entry.id) or 0) or None,
            limits=uses[f"key/{entry.id}"],
            tenant_limits=uses.get(f"tenant/{record.tenant}", NO_LIMITS),
        )
