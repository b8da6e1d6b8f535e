"""/v1/registry/models: the entries themselves, changed under their revision (RFC 9110, section 13)."""

import re
import time

import msgspec

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.models.routes import MANAGING, model_operation
from services.gateway.api.models.shapes import Deleted, Status
from services.gateway.api.openapi.operation import Parameter
from services.gateway.core.asgi import header
from services.gateway.core.errors import InvalidParameter
from services.gateway.core.registry import not_registered
from shared.messages import ModelSettings, ModelSpec, SparseAttention

PATH = "/v1/registry/models"
_TAG = re.compile(r'(?:W/)?"(\d{1,20})"')


class ModelEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What people declare of a model; what is left out is as it would be. PATCH leaves it as it is."""

    name: str = ""  # as the path has it; it may be left out
    # Hub name (ORGANISATION/NAME), built-in name, or a path below the directories that are allowed; left out: the
    # name.
    source: str = ""
    revision: str = ""  # of a hub name: branch, tag or commit
    settings: ModelSettings = ModelSettings()
    least: int = 0  # minimum of replicas, kept at all times
    most: int = 1  # replicas at most
    pinned: bool = False  # never unloaded to make room for others
    # Seconds, or a time such as 10m, without a request after which replicas beyond `least` are unloaded; 0: when
    # others need the memory.
    idle: float | str = 0.0
    aliases: list[str] = []
    # How its requests attend that do not say it themselves; true: with every default. null: to everything.
    sparse_attention: bool | SparseAttention | None = None


class RegisteredModel(msgspec.Struct, frozen=True):
    """An entry with its revision and what becomes of it."""

    name: str
    source: str
    revision: str
    settings: ModelSettings
    least: int
    most: int
    pinned: bool
    idle: float
    aliases: list[str]
    sparse_attention: bool | SparseAttention | None
    created: int
    object: str
    status: Status
    # Of a write: why it is not known whether a pinned model fits beside the others.
    warning: str | None = None


class RegisteredModels(msgspec.Struct, frozen=True):
    object: str
    data: list[RegisteredModel]


IF_MATCH = Parameter(
    "If-Match",
    "The ETag that the entry must still have; else 412.",
    {"type": "string", "pattern": r'^(\*|(W/)?"[0-9]{1,20}")$'},
)
IF_NONE_MATCH = Parameter(
    "If-None-Match", "`*`: only where there is no entry of that name; else 412.", {"type": "string", "enum": ["*"]}
)
LIST = model_operation(
    f"GET {PATH}", "listRegisteredModels", "The registry.", MANAGING.strip(), response=RegisteredModels
)
GET = model_operation(
    f"GET {PATH}/{{model:path}}",
    "retrieveRegisteredModel",
    "One entry; its ETag is the revision.",
    MANAGING.strip(),
    response=RegisteredModel,
)
PUT = model_operation(
    f"PUT {PATH}/{{model:path}}",
    "registerModel",
    "Adds a model, or replaces its entry.",
    "All errors are listed at once, in `error.errors`. 409 `model_does_not_fit` if the pinned models need more "
    "memory than the hosts have." + MANAGING,
    request=ModelEntry,
    example={"source": "HuggingFaceTB/SmolLM2-360M-Instruct", "least": 1},
    response=RegisteredModel,
    parameters=(IF_MATCH, IF_NONE_MATCH),
    errors=(409, 412),
)
PATCH = model_operation(
    f"PATCH {PATH}/{{model:path}}",
    "changeModel",
    "Changes some fields of an entry.",
    MANAGING.strip(),
    request_content={"application/json": {"type": "object"}},
    response=RegisteredModel,
    parameters=(IF_MATCH,),
    errors=(409, 412, 413),
)


class DeleteQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: bool = False


DELETE = model_operation(
    f"DELETE {PATH}/{{model:path}}",
    "unregisterModel",
    "Removes an entry; with `files` the hosts' files too.",
    "409 while it is pinned." + MANAGING,
    response=Deleted,
    query=DeleteQuery,
    parameters=(IF_MATCH,),
    errors=(409, 412),
)


async def list_entries(ask: RequestContext) -> RegisteredModels:
    ask.check_manages_models()
    catalog = ask.backend.started.catalog
    statuses, now = catalog.statuses(), time.time()
    data = [
        _shown(spec, Status.of(statuses[name], spec, now))
        for name, spec in sorted(catalog.registry.specs.items())
        if name in statuses
    ]
    return RegisteredModels("list", data)


async def retrieve_entry(ask: RequestContext) -> RegisteredModel:
    ask.check_manages_models()
    registry = ask.backend.started.catalog.registry
    name = registry.model_of(ask.named("model"))
    spec = registry.specs.get(name)
    if spec is None:
        raise not_registered(ask.named("model"))
    return _answer(ask, spec, registry.revisions[name])


async def put_entry(ask: RequestContext) -> RegisteredModel:
    ask.check_manages_models()
    fields = await ask.decoded(object)
    revision = _revision_of(ask)
    if (absent := header(ask.scope, b"if-none-match")) is not None:
        if absent.strip() != "*":
            raise InvalidParameter(
                "Invalid header 'If-None-Match': send * to write only where there is no entry, or leave it out.",
                param="If-None-Match",
                reason="invalid_header",
            )
        revision = revision or 0
    return _written(ask, *await ask.parts.management.put(ask.named("model"), fields, revision))


async def patch_entry(ask: RequestContext) -> RegisteredModel:
    ask.check_manages_models()
    fields = await ask.decoded(object)
    return _written(ask, *await ask.parts.management.patch(ask.named("model"), fields, _revision_of(ask)))


async def delete_entry(ask: RequestContext) -> Deleted:
    ask.check_manages_models()
    files = ask.query(DeleteQuery).files
    removed = await ask.parts.management.delete(ask.named("model"), _revision_of(ask), files=files)
    return Deleted(removed, "model", True)


def _revision_of(ask: RequestContext) -> int | None:
    """Of If-Match; None: any. Raises `InvalidParameter`."""
    given = header(ask.scope, b"if-match")
    if given is None or given.strip() == "*":
        return None
    match = _TAG.fullmatch(given.strip())
    if match is None:
        raise InvalidParameter(
            "Invalid header 'If-Match': send the ETag from GET, such as \"7\".",
            param="If-Match",
            reason="invalid_header",
        )
    return int(match[1])


def _written(ask: RequestContext, spec: ModelSpec, revision: int) -> RegisteredModel:
    warning = ask.parts.management.pin_warning(spec)
    return msgspec.structs.replace(_answer(ask, spec, revision), warning=warning or None)


def _answer(ask: RequestContext, spec: ModelSpec, revision: int) -> RegisteredModel:
    ask.answer_headers["etag"] = f'"{revision}"'
    return _shown(spec, Status.of(ask.parts.catalog.status(spec.name), spec, time.time()))


def _shown(spec: ModelSpec, status: Status) -> RegisteredModel:
    return RegisteredModel(
        name=spec.name,
        source=spec.source,
        revision=spec.revision,
        settings=spec.settings,
        least=spec.least,
        most=spec.most,
        pinned=spec.pinned,
        idle=spec.idle,
        aliases=spec.aliases,
        sparse_attention=spec.sparse_attention,
        created=spec.created,
        object="registered_model",
        status=status,
    )


registry_routes = routes_of(
    (LIST, list_entries), (GET, retrieve_entry), (PUT, put_entry), (PATCH, patch_entry), (DELETE, delete_entry)
)
