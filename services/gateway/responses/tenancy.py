"""Whose responses are read: a tenant sees its own alone. Without API keys there is one tenant, ""."""

from typing import TYPE_CHECKING

from shared.telemetry import Scope

if TYPE_CHECKING:
    from services.gateway.build import Context


def tenant_of(scope: Scope) -> str:
    """The tenant of a request."""
    principal = scope["state"].get("principal")
    return principal.tenant if principal is not None else ""


def tenant_of_context(context: "Context") -> str:
    """The tenant of a request that is taken in."""
    principal = getattr(context, "principal", None)
    return principal.tenant if principal is not None else ""
