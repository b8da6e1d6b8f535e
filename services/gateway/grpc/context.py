"""What a call's metadata says: the one place where it is read and checked."""

import msgspec

from services.gateway.errors import InvalidParameter
from services.gateway.grpc.call import Call
from services.gateway.readers import cursor
from services.gateway.requests.build import Context
from services.gateway.requests.validation import check_background, check_idempotency_key, check_session_id
from services.gateway.settings import GatewaySettings

_NEED_KEY = (
    "Invalid '{}': a call goes on with a generation only under the idempotency key that began it; send that too, or "
    "call Attach."
)


def context_of(call: Call, settings: GatewaySettings) -> Context:
    """Raises `InvalidParameter`."""
    key = check_idempotency_key(call.metadata("idempotency-key"))
    position = call.metadata("last-event-id")
    context = Context(
        call.request_id,
        check_session_id(call.metadata("x-session-id")),
        background=check_background(call.metadata("x-ryzanstein-background"), settings.background_limit),
        key=key,
        tenant=call.principal.tenant,
        principal=call.principal,
        answer_headers=call.trailing,
    )
    return at_position(with_deadline(context, call), position, "last-event-id")


def with_deadline(context: Context, call: Call) -> Context:
    """`context` with the call's deadline, where it has one."""
    return context if call.deadline is None else msgspec.structs.replace(context, deadline=call.deadline)


def at_position(context: Context, position: str | None, name: str) -> Context:
    """`context` for a reader that stands at `position`. Raises `InvalidParameter`."""
    if not position:
        return context
    if not context.key:
        raise InvalidParameter(_NEED_KEY.format(name), param=name, reason="invalid_value")
    return msgspec.structs.replace(context, after=cursor.parse(position, name))
