"""POST and DELETE /v1/sessions/{session}/prefill: a session's next turn is prepared while its user types."""

from functools import partial
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.openapi.operation import GENERATING, Operation
from services.gateway.core.asgi import send_json
from services.gateway.core.errors import RouteError
from services.gateway.intake.headers import check_session_id
from services.gateway.intake.prompts.prefill import Prefilled
from services.gateway.intake.record import Context
from services.gateway.intake.schemas import ChatCompletionRequest

PATH = "/v1/sessions/{session}/prefill"
MOST_WAIT = 60.0


class PrefillQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    wait: Annotated[
        float,
        Meta(ge=0, le=MOST_WAIT, description="Seconds to wait for it to be completed; 202 where it is not by then."),
    ] = 30.0


class PrefillCancelled(msgspec.Struct, frozen=True):
    session: str
    cancelled: bool  # False when none was under way at this gateway
    object: Literal["session.prefill"] = "session.prefill"


_operation = partial(Operation, tag="Sessions")
PREFILL = _operation(
    f"POST {PATH}",
    "prefillSession",
    "Computes a conversation ahead of its next turn.",
    "The body is that of a chat completion, or the input of a response (`input`, `previous_response_id`, ...); "
    "fields that concern the answer alone have no effect. 200 when it is computed, 202 while it is under way. A "
    "later one for the session replaces it.",
    request=ChatCompletionRequest,
    example={
        "model": "SmolLM2-135M-Instruct",
        "messages": [
            {"role": "user", "content": "What is the capital of Japan?"},
            {"role": "assistant", "content": "Tokyo."},
        ],
    },
    response=Prefilled,
    accepted=True,
    query=PrefillQuery,
    errors=GENERATING,
)
CANCEL = _operation(
    f"DELETE {PATH}",
    "cancelSessionPrefill",
    "Cancels what a session is preparing.",
    "At this gateway; `DELETE /v1/generations/{id}` ends it at any.",
    response=PrefillCancelled,
)


async def prefill(ask: RequestContext) -> None:
    if not ask.settings.prefill_ahead:
        raise RouteError(
            "Preparing prompts ahead is off (RYZANSTEIN_PREFILL_AHEAD); send the request itself.",
            status=403,
            reason="prefill_off",
        )
    seconds = ask.query(PrefillQuery).wait
    session = check_session_id(ask.named("session"))
    context = Context(
        ask.request_id, session, tenant=ask.tenant, principal=ask.principal, answer_headers=ask.answer_headers
    )
    intake = ask.parts.intake
    begun = await intake.prefill(await ask.received(ask.settings.body_limit), context)
    ask.of_model(begun.run.model)
    told = await intake.prefills.wait(begun, seconds)
    await send_json(ask.send, 202 if told.status == "in_progress" else 200, told)


async def cancel(ask: RequestContext) -> PrefillCancelled:
    session = check_session_id(ask.named("session"))
    return PrefillCancelled(session, ask.parts.intake.prefills.cancel(ask.tenant, session))


session_routes = routes_of((PREFILL, prefill), (CANCEL, cancel))
