"""Who calls: the one place of the gRPC API where a key is looked at, before a request is read."""

from collections.abc import Callable

from services.gateway.backend import Backend
from services.gateway.grpc.call import Call


def authorizer(backend: Backend) -> Callable[[Call], None]:
    """What the server asks of every call whose method is not public; it raises where a call is refused."""

    def authorize(call: Call) -> None:
        scheme, _, token = (call.metadata("authorization") or "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else call.metadata("x-api-key")
        call.principal = backend.authenticator.authenticate(given)

    return authorize
