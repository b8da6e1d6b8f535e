"""Ollama's models: GET /api/version, /api/tags and /api/ps, POST /api/show, /api/copy, /api/create and /api/pull,
DELETE /api/delete; /api/push and /api/blobs, which are refused.

A model of Ollama's is here an entry of the registry, an alias of one, or a LoRA adapter:

    copy             ──▶ an alias            create with adapters ──▶ an adapter
    create           ──▶ an alias            delete of a model    ──▶ its entry and its files, of an alias the alias
"""

from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec

from services.gateway.api.backend import Handler, RequestContext, routes_of
from services.gateway.api.models.routes import MANAGING
from services.gateway.core.errors import InvalidField, InvalidParameter, RouteError, missing, unsupported
from services.gateway.core.registry import not_registered
from services.gateway.dialects.ollama import shapes
from services.gateway.dialects.ollama.downloads import pull, send_progress
from services.gateway.dialects.ollama.generating import ollama_operation
from services.gateway.dialects.ollama.residency import ModelNamed, named
from services.gateway.dialects.ollama.schemas import Options
from services.gateway.dialects.ollama.shapes import Progress, ShowResponse
from services.gateway.dialects.ollama.translation import LATEST, names_of, plain_name
from services.gateway.intake.headers import tell_ignored
from services.gateway.intake.rules import neutral
from services.gateway.intake.schemas import ModelName
from services.gateway.intake.validation import check_fields, checked_fields, marked
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages import ModelSpec
from shared.process import VERSION

MOST_DEFAULTS = 64  # names of one model that have parameters of their own


class OllamaShowRequest(ModelNamed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    verbose: bool = False  # changes nothing: no tensors or vocabularies are listed here


class OllamaDeleteRequest(ModelNamed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class OllamaPullRequest(ModelNamed, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Names as Ollama has them for the hub: `hf.co/ORGANISATION/NAME:QUANTIZATION`, with or without `hf.co/`."""

    insecure: bool = False  # changes nothing: hubs are asked over HTTPS
    stream: bool | None = None  # left out: true


class OllamaCopyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    source: ModelName
    destination: ModelName  # becomes an alias of it


class OllamaCreateRequest(ModelNamed, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"base": "from"}):
    """A name for the model `from`, or with `adapters` a LoRA adapter of it."""

    base: str | None = None
    # One: by any name, where its files are: a hub name, or a path on the hosts below the directories that are
    # allowed.
    adapters: dict[str, str] | None = None
    stream: bool | None = None
    files: Annotated[Any, neutral({})] = None
    quantize: Annotated[Any, neutral("")] = None
    template: Annotated[Any, neutral("")] = None
    license: Annotated[Any, neutral("", [])] = None
    system: Annotated[Any, neutral("")] = None
    # Sampling defaults: temperature, top_k, top_p, min_p and repeat_penalty.
    parameters: Options | None = None
    messages: Annotated[Any, neutral([])] = None


VERSIONS = ollama_operation(
    "GET /api/version",
    "ollamaVersion",
    "The version of Ollama's API that is spoken here.",
    response=shapes.OllamaVersion,
)
TAGS = ollama_operation("GET /api/tags", "ollamaTags", "The models, as in Ollama.", response=shapes.TaggedModels)
PS = ollama_operation("GET /api/ps", "ollamaPs", "The models that are loaded.", response=shapes.LoadedModels)
SHOW = ollama_operation(
    "POST /api/show",
    "ollamaShow",
    "Details of a model.",
    request=OllamaShowRequest,
    example={"model": "SmolLM2-135M-Instruct"},
    response=shapes.ShownModel,
    errors=(404,),
)
PULL = ollama_operation(
    "POST /api/pull",
    "ollamaPull",
    "Downloads a model, with progress in lines.",
    "A name that is not registered is treated as a hub name." + MANAGING,
    request=OllamaPullRequest,
    example={"model": "HuggingFaceTB/SmolLM2-360M-Instruct"},
    response=Progress,
    lines=(Progress,),
    errors=(409,),
)
DELETE = ollama_operation(
    "DELETE /api/delete",
    "ollamaDelete",
    "Removes a model with its files, an alias or an adapter.",
    MANAGING.strip(),
    request=OllamaDeleteRequest,
    example={"model": "SmolLM2-135M-Instruct"},
    errors=(404, 409, 412),
)
COPY = ollama_operation(
    "POST /api/copy",
    "ollamaCopy",
    "Gives a model another name.",
    MANAGING.strip(),
    request=OllamaCopyRequest,
    example={"source": "SmolLM2-135M-Instruct", "destination": "small"},
    errors=(404, 409, 412),
)
CREATE = ollama_operation(
    "POST /api/create",
    "ollamaCreate",
    "Makes a name for a model, or a LoRA adapter of it.",
    "Uploaded files, and what would change a model's text, are refused by name." + MANAGING,
    request=OllamaCreateRequest,
    example={"model": "sql", "from": "SmolLM2-135M-Instruct", "adapters": {"sql": "org/sql-lora"}},
    response=Progress,
    lines=(Progress,),
    errors=(404, 409, 412),
)
PUSH = ollama_operation(
    "POST /api/push", "ollamaPush", "Refused: there is no registry to send models to.", errors=(404,)
)
BLOB = ollama_operation(
    "POST /api/blobs/{digest}", "ollamaBlob", "Refused: files are not uploaded; /api/pull fetches them."
)


async def version(ask: RequestContext) -> shapes.OllamaVersion:
    return shapes.OllamaVersion(shapes.API_VERSION, VERSION)


async def tags(ask: RequestContext) -> shapes.TaggedModels:
    return shapes.TaggedModels(ShowResponse(ask.backend.started.catalog).tags(ask.tenant))


async def processes(ask: RequestContext) -> shapes.LoadedModels:
    return shapes.LoadedModels(ShowResponse(ask.backend.started.catalog).loaded())


async def show(ask: RequestContext) -> shapes.ShownModel:
    name = named(ask.parts.catalog, _name(await ask.decoded(OllamaShowRequest)), ask.tenant)
    tokenizer: Tokenizer | None = None
    model = ask.parts.catalog.resolve(name, ask.tenant).model
    if ask.parts.catalog.known_card(model) is not None:
        _, tokenizer = await ask.parts.intake.processor.tokenizer(model)
    return ShowResponse(ask.parts.catalog).one(name, tokenizer, ask.tenant)


async def pull_model(ask: RequestContext) -> None:
    ask.check_manages_models()
    request = await ask.decoded(OllamaPullRequest)
    given, registry = _name(request), ask.parts.catalog.registry
    known = [one for one in names_of(given) if registry.model_of(one) in registry.specs]
    await pull(ask, known[0] if known else plain_name(given), streamed=request.stream is not False)


async def delete(ask: RequestContext) -> bytes:
    ask.check_manages_models()
    name = named(ask.parts.catalog, _name(await ask.decoded(OllamaDeleteRequest)), ask.tenant)
    resolved = ask.parts.catalog.resolve(name, ask.tenant)
    if resolved.adapter:
        await ask.parts.adapters.unload(name, ask.tenant)
    elif resolved.model != name:
        await _set_aliases(ask, resolved.model, without=name)
    else:
        await ask.parts.management.delete(name, files=True)
        return b""
    await _set_defaults(ask, resolved.model, name, {})
    return b""


async def copy(ask: RequestContext) -> bytes:
    ask.check_manages_models()
    request = await ask.decoded(OllamaCopyRequest)
    source, wanted = (named(ask.parts.catalog, request.source, ask.tenant), request.destination.removesuffix(LATEST))
    await _name_it(ask, source, wanted)
    resolved = ask.parts.catalog.resolve(source, ask.tenant)
    await _set_defaults(ask, resolved.model, wanted, dict(resolved.defaults))
    return b""


async def create(ask: RequestContext) -> None:
    ask.check_manages_models()
    request = await ask.decoded(OllamaCreateRequest)
    check_fields(request)
    given = _defaults(request.parameters, ask)
    if not request.base:
        raise missing("from", "the name of a model that is there")
    name, base = _name(request), named(ask.parts.catalog, request.base, ask.tenant)
    creation = _creation(ask, name.removesuffix(LATEST), base, request.adapters or {}, given)
    await send_progress(ask, creation, streamed=request.stream is not False)


# Parameters that a name may have, and what a model's generation_config.json calls them.
_DEFAULTS = {"repeat_penalty": "repetition_penalty"} | {
    name: name for name in ("temperature", "top_k", "top_p", "min_p")
}


def _defaults(parameters: Options | None, ask: RequestContext) -> dict[str, float]:
    """Raises `InvalidParameter` for one that a name cannot have."""
    if parameters is None:
        return {}
    ignored = checked_fields(parameters, "parameters.")
    tell_ignored(ignored, ask.answer_headers, strict=ask.settings.strict_fields)
    changing = marked(Options, "ignored").keys() | marked(Options, "neutral").keys()
    given = {name: value for name, value in msgspec.structs.asdict(parameters).items() if value is not None}
    for name in given:
        if name not in _DEFAULTS and name not in changing:
            raise unsupported(f"parameters.{name}", "send it with each request, in its options")
    return {_DEFAULTS[name]: value for name, value in given.items() if name in _DEFAULTS}


async def _creation(
    ask: RequestContext, name: str, base: str, adapters: dict[str, str], defaults: dict[str, float]
) -> AsyncGenerator[Progress, None]:
    resolved = ask.parts.catalog.resolve(base, ask.tenant)
    defaults = {**resolved.defaults, **defaults}
    if defaults and resolved.model not in ask.parts.catalog.registry.specs:
        raise not_registered(resolved.model)
    if not adapters:
        await _name_it(ask, base, name)
        await _set_defaults(ask, resolved.model, name, defaults)
        yield Progress("writing manifest")
        return
    if len(adapters) > 1:
        raise InvalidField(
            "adapters", f"there are {len(adapters)}, and a model has one adapter; create a model for each."
        )
    (source,) = adapters.values()
    if source.startswith("sha256:"):
        raise unsupported("adapters", "files are not uploaded here; name a hub repository or a path on the hosts")
    yield Progress("reading adapter")
    await ask.parts.adapters.load(name, source, base, replace=True)
    await _set_defaults(ask, resolved.model, name, defaults)
    yield Progress("writing manifest")


def _refused(path: str, why: str) -> Handler:
    async def refuse(ask: RequestContext) -> None:
        raise RouteError(f"{path} is not supported here: {why}.", reason="unsupported_endpoint")

    return refuse


async def _name_it(ask: RequestContext, source: str, wanted: str) -> None:
    """Gives what is called `source` here one more name."""
    catalog = ask.parts.catalog
    if not wanted:
        raise missing("destination", "the new name")
    resolved = catalog.resolve(source, ask.tenant)
    if resolved.adapter:
        record = catalog.adapters.records[resolved.name]
        await ask.parts.adapters.load(wanted, record.source, record.model, replace=True)
    elif wanted != resolved.model:
        await _set_aliases(ask, resolved.model, also=wanted)


async def _set_aliases(ask: RequestContext, model: str, *, also: str = "", without: str = "") -> None:
    spec = ask.parts.catalog.registry.specs.get(model)
    if spec is None:
        raise not_registered(model)
    aliases = [one for one in spec.aliases if one not in (also, without)]
    await ask.parts.management.patch(model, {"aliases": [*aliases, also] if also else aliases}, None)


async def _set_defaults(ask: RequestContext, model: str, name: str, defaults: dict[str, float]) -> None:
    """Of a name of `model`, in the place of those that it had."""
    spec = ask.parts.catalog.registry.specs.get(model)
    if spec is None or spec.defaults.get(name, {}) == defaults:
        return

    def change(known: ModelSpec) -> ModelSpec:
        others = {one: given for one, given in known.defaults.items() if one != name}
        if len(others) >= MOST_DEFAULTS and defaults:
            raise InvalidParameter(
                f"The model '{model}' has {len(others)} names with parameters of their own, and may have no more; "
                "delete one.",
                param="parameters",
            )
        return msgspec.structs.replace(known, defaults=others | ({name: defaults} if defaults else {}))

    await ask.parts.catalog.registry.change(model, change)


def _name(request: ModelNamed) -> str:
    check_fields(request)
    return request.given


ollama_model_routes = routes_of(
    (VERSIONS, version),
    (TAGS, tags),
    (PS, processes),
    (SHOW, show),
    (PULL, pull_model),
    (DELETE, delete),
    (COPY, copy),
    (CREATE, create),
    (PUSH, _refused("/api/push", "models cannot be pushed from here")),
    (BLOB, _refused("/api/blobs", "files are not uploaded; POST /api/pull has a host fetch them")),
)
