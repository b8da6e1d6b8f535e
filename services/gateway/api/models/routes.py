"""OpenAI's /v1/models; llama.cpp's /models, /models/load, /models/unload and /models/sse."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.dialect import ModelView, dialects_of
from services.gateway.api.models.shapes import Deleted, Done, Model, ModelEvent, ModelList, Models, events_between
from services.gateway.api.openapi.operation import Operation
from services.gateway.core.asgi import EventStream, StreamChunk, disconnected
from services.gateway.core.errors import ClientGone, describe
from shared.errors import Unavailable
from shared.model_status import ModelStatus

model_operation = partial(Operation, tag="Models")
MANAGING = " Requires a key that can manage models, once any key exists."
# Seconds between two looks at all models for a stream of events: what changes within is one event.
SETTLE = 0.25
LOOK = 1.0  # seconds after which a stream looks whether it may go on
KEEP_ALIVE = 15.0  # seconds of silence after which a comment is sent


class NamedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str


class UnloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    force: bool = False  # do not wait for what runs: it ends with an error


class PullRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # a name of the registry, or a hub name, which is registered
    hosts: Annotated[int, Meta(ge=1, le=1024)] = 1  # on how many hosts


class ListQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reload: Annotated[int, Meta(description="As in llama.cpp; the list is always current.")] = 0


class ModelQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(description="The model's name.")] = ""


LIST = model_operation(
    "GET /v1/models",
    "listModels",
    "Models that are registered or served, loaded or not.",
    "An alias is an entry of its own, whose `root` is the model. `status` is the state of a model. "
    "With the header `anthropic-version` the answer is Anthropic's list, with its `before_id`, `after_id` and `limit`.",
    response=ModelList,
)
MODEL = model_operation(
    "GET /v1/models/{model:path}", "retrieveModel", "One model, also while it is not loaded.", response=Model
)
DELETE = model_operation(
    "DELETE /v1/models/{model:path}",
    "deleteModel",
    "Removes a model from the registry; running requests finish first.",
    "409 while it is pinned. Its files stay. A LoRA adapter is unloaded."
    + MANAGING
    + " The model of your own fine-tuning job (`ft:...`) needs no such key.",
    response=Deleted,
    errors=(409, 412),
)
ROUTER_LIST = model_operation(
    "GET /models",
    "models",
    "The same, without entries of aliases, as in llama.cpp's router.",
    response=ModelList,
    query=ListQuery,
)
LOAD = model_operation(
    "POST /models/load",
    "loadModel",
    "Loads a model, as in llama.cpp's router.",
    "Answers when the load has begun; loading a loaded model is no error. 409 if no host has room for it beside "
    "pinned models: the message says which would have to go." + MANAGING,
    request=NamedModel,
    example={"model": "SmolLM2-135M-Instruct"},
    response=Done,
    errors=(404, 409),
)
UNLOAD = model_operation(
    "POST /models/unload",
    "unloadModel",
    "Unloads a model, as in llama.cpp's router.",
    "Running requests finish first, unless `force` is set. It stays unloaded until it is loaded or requested. 409 "
    "while it is pinned." + MANAGING,
    request=UnloadRequest,
    example={"model": "SmolLM2-135M-Instruct"},
    response=Done,
    errors=(404, 409),
)
PULL = tuple(
    model_operation(
        path,
        name,
        "Downloads a model's files, and loads nothing.",
        "`GET /models/sse` tells the progress. A name that is not registered is treated as a hub name." + MANAGING,
        request=PullRequest,
        example={"model": "HuggingFaceTB/SmolLM2-360M-Instruct"},
        response=Done,
        errors=(409,),
    )
    for path, name in (("POST /models", "downloadModel"), ("POST /v1/registry/models:pull", "pullModel"))
)
ROUTER_DELETE = model_operation(
    "DELETE /models",
    "removeModel",
    "Removes a model and its files on the hosts, as in llama.cpp's router.",
    MANAGING.strip(),
    query=ModelQuery,
    response=Done,
    errors=(404, 409),
)
EVENTS = model_operation(
    "GET /models/sse",
    "modelEvents",
    "Events of models as they happen, as in llama.cpp's router.",
    "Begins with the status of each.",
    events=(ModelEvent,),
)


async def list_models(ask: RequestContext) -> object:
    found = Models(ask.backend.started.catalog, time.time(), ask.tenant).all(aliases=True)
    if not found:  # clients read the first one
        raise Unavailable(
            "No model is served yet: its executors are loading it, or there are none; try again in a moment "
            "(`ryzanstein status` shows them).",
            retry_after=2,
        )
    view = _view(ask)
    return ModelList("list", found) if view is None else view.page(ask, found)


async def router_models(ask: RequestContext) -> ModelList:
    ask.query(ListQuery)
    return ModelList("list", Models(ask.backend.started.catalog, time.time(), ask.tenant).all(aliases=False))


async def retrieve_model(ask: RequestContext) -> object:
    """Names may have slashes."""
    catalog, name = ask.backend.started.catalog, ask.named("model")
    await catalog.resolve_or_look_up(name, ask.tenant)
    found = Models(catalog, time.time(), ask.tenant).one(name)
    view = _view(ask)
    return found if view is None else view.one(found)


def _view(ask: RequestContext) -> ModelView | None:
    """How the API shows models whose client asks; None: as OpenAI's does."""
    return dialects_of(ask.scope).of_request(ask.scope).models


async def delete_model(ask: RequestContext) -> Deleted:
    name = ask.named("model")
    record = ask.parts.catalog.adapters.find(name, ask.tenant)
    if record is None or record.tenant is None or ask.parts.catalog.is_model(name):
        ask.check_manages_models()
    if ask.parts.catalog.resolve(name, ask.tenant).adapter:
        return Deleted((await ask.parts.adapters.unload(name, ask.tenant)).name, "model", True)
    return Deleted(await ask.parts.management.delete(name), "model", True)


async def router_delete(ask: RequestContext) -> Done:
    ask.check_manages_models()
    await ask.parts.management.delete(ask.query(ModelQuery).model, files=True)
    return Done(True)


async def load(ask: RequestContext) -> Done:
    ask.check_manages_models()
    await ask.parts.management.load((await ask.decoded(NamedModel)).model)
    return Done(True)


async def unload(ask: RequestContext) -> Done:
    ask.check_manages_models()
    request = await ask.decoded(UnloadRequest)
    await ask.parts.management.unload(request.model, force=request.force)
    return Done(True)


async def pull(ask: RequestContext) -> Done:
    ask.check_manages_models()
    request = await ask.decoded(PullRequest)
    await ask.parts.management.pull(request.model, request.hosts)
    return Done(True)


async def stream_events(ask: RequestContext) -> None:
    """Until the client goes, its key is good no longer, or the gateway stops."""
    stream = EventStream(ask.send)
    catalog = ask.parts.catalog
    known: dict[str, ModelStatus] = {}
    silent = 0.0
    try:
        async with contextlib.aclosing(looks(ask, SETTLE)) as every:
            async for _ in every:
                now, after = time.time(), catalog.statuses(SETTLE)
                found = events_between(known, after, catalog.registry.specs, now)
                known = after
                if found or not stream.started:
                    await stream.write([StreamChunk(msgspec.json.encode(one)) for one in found])
                    silent = now
                elif now - silent >= KEEP_ALIVE:
                    await stream.comment()
                    silent = now
    except ClientGone:
        return
    except Exception as error:
        if stream.started:
            await stream.write([StreamChunk(msgspec.json.encode(describe(error, ask.request_id)))], end=True)
        raise


async def looks(ask: RequestContext, settle: float) -> AsyncGenerator[None, None]:
    """One look at the models now, and one whenever something has changed, `settle` seconds after it has. Raises
    `ClientGone`, `Unavailable` when the gateway stops, `AuthenticationFailed` when the key is good no longer."""
    gone = asyncio.create_task(disconnected(ask.receive))
    registry = ask.parts.catalog.registry
    try:
        while True:
            news = registry.news
            yield
            waiting = asyncio.create_task(news.wait())
            try:
                await asyncio.wait([waiting, gone], timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
            if gone.done():
                raise ClientGone
            await asyncio.sleep(settle)
            ask.backend.check_draining()
            ask.backend.authenticator.check(ask.principal)
    finally:
        gone.cancel()


model_routes = routes_of(
    (LIST, list_models),
    (MODEL, retrieve_model),
    (DELETE, delete_model),
    (ROUTER_LIST, router_models),
    (PULL[0], pull),
    (ROUTER_DELETE, router_delete),
    (LOAD, load),
    (UNLOAD, unload),
    (EVENTS, stream_events),
    (PULL[1], pull),
)
