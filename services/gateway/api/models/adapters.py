"""LoRA adapters over HTTP: vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter; /v1/loras."""

import msgspec
from starlette.responses import PlainTextResponse

from services.gateway.api.backend import RequestContext, routes_of
from services.gateway.api.models.routes import MANAGING, model_operation
from services.gateway.api.models.shapes import Deleted
from services.gateway.api.openapi.operation import TEXT
from services.gateway.core.adapters import not_found, not_read
from services.gateway.core.errors import InvalidParameter
from shared.messages.registry import AdapterRecord

PATH = "/v1/loras"


class LoadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As in vLLM, and the base model's name."""

    lora_name: str = ""
    # Hub name (ORGANISATION/NAME), or a path on the hosts below the directories that are allowed.
    lora_path: str = ""
    # Also where there is an adapter of that name: what runs goes on with the one that it began with.
    load_inplace: bool = False
    model: str | None = None  # name of its base; it may be left out where there is one model alone


class UnloadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str = ""
    lora_int_id: int | None = None  # of vLLM; it changes nothing


class AdapterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str  # as `lora_path`
    model: str | None = None


class Adapter(msgspec.Struct, frozen=True):
    """A registered adapter; requests name it as their `model`."""

    id: str
    object: str
    created: int
    parent: str  # its base
    root: str  # where it was read from
    digest: str  # of its content; empty: it is declared, and no host has read it yet
    rank: int
    bytes: int
    groups: list[str]  # groups that have it in memory now
    # What may be amiss with it: that it was trained for another base, or could not be read so far.
    warning: str | None = None


class AdapterList(msgspec.Struct, frozen=True):
    object: str
    data: list[Adapter]


LOAD = model_operation(
    "POST /v1/load_lora_adapter",
    "loadLoraAdapter",
    "Loads a LoRA adapter, as in vLLM.",
    "A host of its base reads and checks it; it is then on every replica of the base, and comes back after any "
    "restart." + MANAGING,
    request=LoadAdapter,
    example={"lora_name": "sql", "lora_path": "org/sql-lora", "model": "SmolLM2-135M-Instruct"},
    response_content={TEXT: {"type": "string"}},
    errors=(404, 409),
)
UNLOAD = model_operation(
    "POST /v1/unload_lora_adapter",
    "unloadLoraAdapter",
    "Unloads a LoRA adapter, as in vLLM; requests that use it finish first.",
    MANAGING.strip(),
    request=UnloadAdapter,
    example={"lora_name": "sql"},
    response_content={TEXT: {"type": "string"}},
    errors=(404,),
)
LIST = model_operation(f"GET {PATH}", "listLoras", "The LoRA adapters.", response=AdapterList)
GET = model_operation(f"GET {PATH}/{{adapter:path}}", "retrieveLora", "One LoRA adapter.", response=Adapter)
PUT = model_operation(
    f"PUT {PATH}/{{adapter:path}}",
    "putLora",
    "Loads a LoRA adapter, or replaces it.",
    "Running requests keep the adapter that they began with." + MANAGING,
    request=AdapterEntry,
    example={"source": "org/sql-lora", "model": "SmolLM2-135M-Instruct"},
    response=Adapter,
    errors=(404, 409),
)
DELETE = model_operation(
    f"DELETE {PATH}/{{adapter:path}}",
    "deleteLora",
    "Unloads a LoRA adapter; requests that use it finish first.",
    MANAGING.strip(),
    response=Deleted,
)


async def load(ask: RequestContext) -> None:
    ask.check_manages_models()
    request = await ask.decoded(LoadAdapter)
    if not request.lora_name or not request.lora_path:
        raise InvalidParameter(
            "Both 'lora_name' and 'lora_path' must be provided.",
            param="lora_path" if request.lora_name else "lora_name",
            reason="missing_required_parameter",
        )
    record = await ask.parts.adapters.load(
        request.lora_name, request.lora_path, request.model, replace=request.load_inplace
    )
    warning = ask.parts.adapters.warning(record)
    said = f"Success: LoRA adapter '{request.lora_name}' added successfully."
    await _say(ask, f"{said}\nWarning: {warning}" if warning else said)


async def unload(ask: RequestContext) -> None:
    ask.check_manages_models()
    name = (await ask.decoded(UnloadAdapter)).lora_name
    if not name:
        raise InvalidParameter(
            "'lora_name' needs to be provided to unload a LoRA adapter.",
            param="lora_name",
            reason="missing_required_parameter",
        )
    await ask.parts.adapters.unload(name, ask.tenant)
    await _say(ask, f"Success: LoRA adapter '{name}' removed successfully.")


async def list_adapters(ask: RequestContext) -> AdapterList:
    adapters = ask.backend.started.catalog.adapters
    seen = {one.name: one for one in adapters.seen_by(ask.tenant)}
    return AdapterList("list", [_shown(ask, record) for _, record in sorted({**seen, **adapters.wanted}.items())])


async def retrieve(ask: RequestContext) -> Adapter:
    adapters, name = ask.backend.started.catalog.adapters, ask.named("adapter")
    record = adapters.find(name, ask.tenant) or adapters.wanted.get(name)
    if record is None and await adapters.look_up(name):
        record = adapters.find(name, ask.tenant) or adapters.wanted.get(name)
    if record is None:
        raise not_found(name)
    return _shown(ask, record)


async def put(ask: RequestContext) -> Adapter:
    ask.check_manages_models()
    entry = await ask.decoded(AdapterEntry)
    record = await ask.parts.adapters.load(ask.named("adapter"), entry.source, entry.model, replace=True)
    return _shown(ask, record)


async def delete(ask: RequestContext) -> Deleted:
    ask.check_manages_models()
    return Deleted((await ask.parts.adapters.unload(ask.named("adapter"), ask.tenant)).name, "model", True)


async def _say(ask: RequestContext, text: str) -> None:
    """vLLM answers a text."""
    await PlainTextResponse(text)(ask.scope, ask.receive, ask.send)


def _shown(ask: RequestContext, record: AdapterRecord) -> Adapter:
    held = ask.backend.started.catalog.groups() if record.digest else []
    groups = [group.group for group in held if record.digest in group.adapters]
    warning = ask.parts.adapters.warning(record)
    if record.wanted is not None:
        warning = not_read(record).message
    return Adapter(
        record.name,
        "model",
        record.created,
        record.model,
        record.source,
        record.digest,
        record.rank,
        record.bytes,
        sorted(groups),
        warning or None,
    )


adapter_routes = routes_of(
    (LOAD, load), (UNLOAD, unload), (LIST, list_adapters), (GET, retrieve), (PUT, put), (DELETE, delete)
)
