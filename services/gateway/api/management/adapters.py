"""What may be done to LoRA adapters over HTTP: the rules, and who reads them.

load ──PullAdapter──▶ a host: reads, checks, stores the files under their digest ──▶ AdapterRecord ──▶ KV
"""

import structlog

from services.gateway.api.management.models import Management
from services.gateway.core.adapters import AdapterRegistry, already_loaded
from services.gateway.core.catalog import Catalog
from services.gateway.core.errors import InvalidParameter, RouteError
from shared.engine_features import refusal
from shared.errors import BrokerUnavailable, InternalError, Unavailable, UnknownModel, error_from_code
from shared.messages import HostReply, ModelSpec
from shared.messages.registry import AdapterRecord, PullAdapter
from shared.nats.adapters import read_by_first
from shared.nats.bus import Bus
from shared.registry import other_base, wrong_name

log = structlog.get_logger(__name__)

FINE_TUNED = "ft:"
PULL_TIMEOUT = 300.0  # seconds for a host to fetch, check and store an adapter
AT_ONCE = 8  # adapters that one gateway has read at a time; more are refused for the time being


class AdapterManagement:
    """One per gateway. Methods raise `RouteError`, `InvalidParameter`, `UnknownModel`, `Unavailable`."""

    def __init__(self, bus: Bus, catalog: Catalog, management: Management) -> None:
        self._bus = bus
        self._catalog = catalog
        self._management = management
        self._loading: set[str] = set()

    @property
    def registry(self) -> AdapterRegistry:
        return self._catalog.adapters

    async def load(self, name: str, source: str, base: str | None, *, replace: bool) -> AdapterRecord:
        """Has the adapter at `source` read and checked by a host, and registers it as `name`. `base`: the name of its
        model; None: of the only one there is. `replace`: also where there is one of that name."""
        self._check(name, source)
        if name in self.registry.records and not replace:
            raise already_loaded(name)
        model = self._base(base)
        if (refused := refusal(["adapter"], self._catalog.engine_of(model))) is not None:
            raise InvalidParameter(refused.message, param="model")
        self.registry.check_room(name, model)
        if name in self._loading:
            raise RouteError(
                f"The adapter '{name}' is being loaded already; wait for that.", status=409, reason="adapter_loading"
            )
        if len(self._loading) >= AT_ONCE:
            raise Unavailable(f"This gateway loads {AT_ONCE} adapters already; try again in a moment.", retry_after=2)
        self._loading.add(name)
        try:
            record = await self._pulled(PullAdapter(name, model, source, self._spec(model)))
            return await self.registry.put(record, replace=replace)
        finally:
            self._loading.discard(name)

    async def unload(self, name: str, tenant: str) -> AdapterRecord:
        """What runs with it goes on; nobody can ask for it any more. Raises `RouteError` for another tenant's."""
        return await self.registry.remove(name, tenant)

    def warning(self, record: AdapterRecord) -> str:
        """What may be amiss with it, in a sentence; empty: nothing."""
        wrong = other_base(record.base, record.model, self._catalog.registry.specs.get(record.model))
        return f"Adapter '{record.name}': {wrong}." if wrong else ""

    # --- rules -----------------------------------------------------------------------------------

    def _check(self, name: str, source: str) -> None:
        if wrong := wrong_name(name):
            raise InvalidParameter(f"An adapter cannot be called {name[:64]!r}: {wrong}.", param="lora_name")
        if name.startswith(FINE_TUNED):
            raise InvalidParameter(
                f"Names that begin with '{FINE_TUNED}' are reserved for fine-tuning jobs; choose another.",
                param="lora_name",
            )
        if self._catalog.is_model(name):
            raise RouteError(
                f"A model is called '{name}', or has it as an alias; give the adapter another name.",
                status=409,
                reason="name_taken",
                param="lora_name",
            )
        if wrong := self._management.wrong_source(source):
            raise InvalidParameter(wrong, param="lora_path")

    def _base(self, given: str | None) -> str:
        if given:
            resolved = self._catalog.resolve(given)
            if resolved.adapter:
                raise InvalidParameter(
                    f"'{given[:128]}' is an adapter itself; name its base, '{resolved.model}'.", param="model"
                )
            return resolved.model
        names = self._catalog.names()
        if len(names) != 1:
            raise InvalidParameter(
                f"There are {len(names)} models here; name the adapter's base in 'model'.",
                param="model",
                reason="missing_required_parameter",
            )
        return names[0]

    def _spec(self, model: str) -> ModelSpec:
        """One that is in no registry is its executor's own."""
        return self._catalog.registry.specs.get(model) or ModelSpec(model, "")

    # --- hosts -----------------------------------------------------------------------------------

    async def _pulled(self, command: PullAdapter) -> AdapterRecord:
        """What the first host that answers has read. Raises what it has against it."""
        hosts = self._hosts(command.model)
        try:
            found = await read_by_first(self._bus, hosts, command, timeout=PULL_TIMEOUT)
        except BrokerUnavailable as error:
            raise Unavailable(f"The host that reads the adapter does not answer: {error}", retry_after=2) from error
        if isinstance(found, AdapterRecord):
            return found
        if found is not None:
            raise _refused(command, found)
        raise Unavailable(
            f"No host has the files of the model '{command.model}', against which the adapter is checked; load or pull "
            "that first, or declare the adapter in a models file (`ryzanstein models apply`), which waits for it.",
            retry_after=5,
        )

    def _hosts(self, model: str) -> list[str]:
        """Instances that could read an adapter of `model`: those that serve it first."""
        serving = [
            group.instance
            for group in self._catalog.groups()
            if group.model == model and group.state in ("ready", "busy") and group.instance
        ]
        return list(dict.fromkeys([*sorted(serving), *self._catalog.registry.ready_hosts()]))


def _refused(command: PullAdapter, reply: HostReply) -> Exception:
    error = error_from_code(reply.code, reply.error)
    if isinstance(error, (Unavailable, UnknownModel)):
        return error
    if isinstance(error, InternalError):
        return InternalError(reply.error or "The host that reads the adapter reported nothing about it.")
    missing = "no adapter" in reply.error.lower() or "does not exist" in reply.error
    return RouteError(
        reply.error,
        status=404 if missing else 400,
        reason="adapter_not_found" if missing else "invalid_adapter",
        param="lora_path",
    )
