"""What the API shows of a model: OpenAI's object with llama.cpp's status and more of ours. Pure."""

from typing import Any

import msgspec

from services.gateway.core.catalog import Catalog
from shared.messages import ModelCard, ModelSpec, SparseKind
from shared.messages.registry import AdapterRecord
from shared.model_status import ModelState, ModelStatus
from shared.registry import of_hub

STAGES = ("text_model",)  # of a load, as llama.cpp names them


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`value`, `failed`, `exit_code` and `progress` as llama.cpp's router has them; the rest is ours."""

    value: str  # unloaded, downloading, loading, loaded or sleeping; of a model that has failed: unloaded
    failed: bool | msgspec.UnsetType = msgspec.UNSET
    exit_code: int | msgspec.UnsetType = msgspec.UNSET
    # Of a download: bytes by source; of a load: its stage and the share that is done.
    progress: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    state: ModelState  # as `value`, or failed
    completed: float  # share of the download or the load that is done, 0 to 1
    replicas: int  # groups that take requests
    reason: str | None  # why it has failed, or is not loaded
    expected_at: float | None  # Unix seconds at which it is expected to take requests
    expected_seconds: float | None  # until then
    # Requests that wait until it is loaded, of everybody; rounded up where they are many. A new one is behind them.
    waiting: int

    @classmethod
    def of(cls, status: ModelStatus, spec: ModelSpec | None, now: float) -> "Status":
        failed: Any = {"failed": True, "exit_code": 1} if status.state == "failed" else {}
        coming = status.state in ("downloading", "loading") and status.expected_seconds > 0
        return cls(
            value="unloaded" if failed else status.state,
            state=status.state,
            completed=round(status.progress, 4),
            replicas=status.replicas,
            reason=status.reason or None,
            expected_at=round(now + status.expected_seconds, 1) if coming else None,
            expected_seconds=round(status.expected_seconds, 1) if coming else None,
            waiting=status.waiting,
            progress=progress_of(status, spec),
            **failed,
        )


def progress_of(status: ModelStatus, spec: ModelSpec | None) -> dict[str, Any] | msgspec.UnsetType:
    """llama.cpp's `progress`, where it has one."""
    if status.state == "downloading":
        named = spec.source if spec is not None and of_hub(spec.source) else "model"
        return {named: {"done": status.done, "total": status.total}}
    if status.state == "loading":
        return {"stages": STAGES, "current": STAGES[0], "value": round(status.progress, 4)}
    return msgspec.UNSET


class Model(msgspec.Struct, frozen=True):
    """OpenAI's model object; `root`, `parent` and `max_model_len` as vLLM has them."""

    id: str
    object: str
    created: int
    owned_by: str
    # The model that answers: of an alias the one that it stands for; of an adapter where it was read from.
    root: str
    parent: str | None  # of an adapter: its base
    max_model_len: int | None  # null: not known before it was loaded
    aliases: list[str]
    pinned: bool | None  # whether it is never unloaded to make room for others; null: it is in no registry
    status: Status
    draft_model: str | None = None  # the smaller model that proposes its tokens; null: none does
    draft_model_left_out: str | None = None  # why it is served without that draft model; null: it is not
    # What may be done with it, as vLLM and OpenAI's older API tell it: it may be sampled, by whoever sees it.
    permission: list[dict[str, Any]] = []
    # Kinds of sparse attention that a group of it computes, which requests may ask for.
    sparse_attention: list[SparseKind] = []


class Models:
    """The list, and one of it."""

    def __init__(self, catalog: Catalog, now: float, tenant: str) -> None:
        """`tenant`: who sees them."""
        self._catalog = catalog
        self._now = now
        self._tenant = tenant

    def all(self, *, aliases: bool) -> list[Model]:
        """By name. `aliases`: with an entry for each of them."""
        found: list[Model] = []
        adapters: dict[str, list[AdapterRecord]] = {}
        for record in sorted(self._catalog.adapters.seen_by(self._tenant), key=lambda one: one.name):
            adapters.setdefault(record.model, []).append(record)
        for name, status in self._catalog.statuses().items():
            base = len(found)
            found.append(self._model(name, name, status))
            for alias in found[-1].aliases if aliases else ():
                found.append(self._model(alias, name, status))
            found += [self._adapter(record, found[base]) for record in adapters.get(name, ())]
        return found

    def one(self, name: str) -> Model:
        """By its name or an alias. Raises `UnknownModel`."""
        resolved = self._catalog.resolve(name, self._tenant)
        model = resolved.model
        found = self._model(name if not resolved.adapter else model, model, self._catalog.status(model))
        return self._adapter(self._catalog.adapters.records[name], found) if resolved.adapter else found

    def _adapter(self, record: AdapterRecord, base: Model) -> Model:
        return msgspec.structs.replace(
            base,
            id=record.name,
            created=record.created,
            root=record.source,
            parent=record.model,
            aliases=[],
            permission=_permission(record.name, record.created),
        )

    def _model(self, name: str, model: str, status: ModelStatus) -> Model:
        spec = self._catalog.registry.specs.get(model)
        card = self._catalog.known_card(model)
        created = card.created if card is not None else spec.created if spec is not None else 0
        return Model(
            id=name,
            object="model",
            created=created,
            owned_by="ryzanstein",
            root=model,
            parent=None,
            max_model_len=_length(card, spec),
            aliases=list(spec.aliases) if spec is not None and name == model else [],
            pinned=spec.pinned if spec is not None else None,
            status=Status.of(status, spec, self._now),
            draft_model=(card.draft_model or None) if card is not None else None,
            draft_model_left_out=(card.draft_left_out or None) if card is not None else None,
            permission=_permission(name, created),
            sparse_attention=self._catalog.sparse_kinds(model).some,
        )


def _permission(name: str, created: int) -> list[dict[str, Any]]:
    shown = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return [shown]


def _length(card: ModelCard | None, spec: ModelSpec | None) -> int | None:
    if card is not None:
        return card.context_length
    return spec.settings.context_length or None if spec is not None else None


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[Model]


class Deleted(msgspec.Struct, frozen=True):
    """OpenAI's answer to DELETE."""

    id: str
    object: str
    deleted: bool


class Done(msgspec.Struct, frozen=True):
    """llama.cpp's answer: it has been told so, and goes on in the background."""

    success: bool


class ModelEvent(msgspec.Struct, frozen=True):
    """llama.cpp's event."""

    model: str
    event: str  # model_status, download_progress, download_finished, download_failed or model_remove
    data: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def events_between(
    before: dict[str, ModelStatus], after: dict[str, ModelStatus], specs: dict[str, ModelSpec], now: float
) -> list[ModelEvent]:
    """What has happened to the models from one look to the next."""
    found = [ModelEvent(name, "model_remove") for name in before if name not in after]
    for name, status in after.items():
        old = before.get(name)
        if old != status:
            found += _events_of(name, old, status, specs.get(name), now)
    return found


def _events_of(
    name: str, old: ModelStatus | None, new: ModelStatus, spec: ModelSpec | None, now: float
) -> list[ModelEvent]:
    was = old.state if old is not None else ""
    shown = Status.of(new, spec, now)
    found = []
    if was == "downloading" and new.state != "downloading":
        kind = "download_failed" if new.state == "failed" else "download_finished"
        found.append(ModelEvent(name, kind))
    if was != new.state or new.state != "downloading":
        data = msgspec.to_builtins(shown)
        data["status"] = data.pop("value")
        found.append(ModelEvent(name, "model_status", data))
    if isinstance(shown.progress, dict) and new.state == "downloading":
        found.append(ModelEvent(name, "download_progress", shown.progress))
    return found
