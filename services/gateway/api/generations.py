"""/v1/generations/{id}: any generation, whichever endpoint began it: its state, its end, its stream."""

from functools import partial
from typing import Any

import msgspec

from services.gateway.api import shapes
from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.generating import positions_of, reading, stream, wants_positions
from services.gateway.api.openapi import operation
from services.gateway.api.openapi.operation import Operation
from services.gateway.streams.reading import GenerationState


class Cancelled(msgspec.Struct, frozen=True):
    """What DELETE answers."""

    id: str
    object: str
    cancelled: bool  # False when it had ended before


_operation = partial(Operation, tag="Generations")
GENERATION = _operation(
    "GET /v1/generations/{generation}",
    "retrieveGeneration",
    "The output of a generation so far.",
    "At any gateway, for as long as the journal keeps its tokens.",
    response=GenerationState,
    errors=(504,),
)
CANCEL = _operation(
    "DELETE /v1/generations/{generation}",
    "cancelGeneration",
    "Cancels a generation, for all its readers.",
    "Its output so far stays readable.",
    response=Cancelled,
    errors=(504,),
)
GENERATION_STREAM = _operation(
    "GET /v1/generations/{generation}/stream",
    "streamGeneration",
    "The events of a generation, from a position on.",
    "In the format of the endpoint that began it; without `Last-Event-ID` from the beginning.",
    events=(shapes.ChatCompletionChunk, shapes.Completion, shapes.TypedEvent),
    lines=(dict[str, Any],),
    parameters=(operation.LAST_EVENT,),
    errors=(504,),
)


async def retrieve_generation(ask: RequestContext) -> GenerationState:
    """What has come of it so far."""
    state = await ask.parts.reading.state(ask.named("generation"), ask.request_id, ask.tenant, ask.answer_headers)
    ask.of_model(state.model)
    return state


async def cancel_generation(ask: RequestContext) -> Cancelled:
    answer, going = await ask.parts.reading.cancel(ask.named("generation"), ask.tenant)
    return Cancelled(answer.public_id, "generation", going)


async def stream_generation(ask: RequestContext) -> None:
    """Its events behind `Last-Event-ID`, in the format of the endpoint that began it."""
    after, positions = positions_of(ask.scope), wants_positions(ask.scope)
    run = await ask.parts.reading.attach(ask.named("generation"), after, tenant=ask.tenant)
    with reading(run, ask.scope, ask.receive):
        await stream(run, ask.scope, ask.send, positions=positions)


generation_routes = routes_of(
    (GENERATION, retrieve_generation), (CANCEL, cancel_generation), (GENERATION_STREAM, stream_generation)
)
