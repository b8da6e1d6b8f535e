"""Where a client puts its key."""

from services.gateway.http_io import header
from shared.service.endpoints import OpsApp, Scope

PUBLIC_PATHS = frozenset(OpsApp.paths)
"""Answered without a key: what load balancers and Prometheus ask for. /metrics can be closed by a setting."""


def token_of(scope: Scope) -> str | None:
    """The key in `Authorization: Bearer`, else in `api-key` (Azure's clients) or `x-api-key` (Anthropic's)."""
    scheme, _, token = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return header(scope, b"api-key") or header(scope, b"x-api-key")
