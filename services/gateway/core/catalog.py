"""Which models there are, and which groups serve them, as NATS KV tells it."""

import asyncio
import difflib
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from services.gateway.core.adapters import AdapterRegistry, not_read
from services.gateway.core.registry import ModelRegistry
from shared.errors import Unavailable, UnknownModel
from shared.messages import EngineTraits, GroupRecord, ModelCard, SparseAttention, SparseKind
from shared.model_status import ModelStatus
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from shared.sparse_attention import chosen


class RingListener(Protocol):
    """Who is told which rings live. `at`: unix seconds, 0 if not known."""

    def on_group_lost(self, group: str, epoch: int, model: str, at: float = 0.0) -> None:
        """That life of the ring, and all before it, are over."""
        ...

    def on_group_alive(self, group: str, epoch: int, at: float = 0.0) -> None:
        """That life of the ring is at work."""
        ...


_SERVING = ("ready", "busy")
_AT_WORK = (*_SERVING, "draining")
# Seconds without a heartbeat after which a record that was there before this gateway is of an earlier start: the
# health monitor, which would say so, may be starting too.
STALE = 15.0
NAMED = 16  # models that a refusal names


class Resolved(msgspec.Struct, frozen=True):
    """What a name that a client gives stands for."""

    model: str
    adapter: str = ""  # digest of a LoRA adapter on it; empty: none
    name: str = ""  # of that adapter
    defaults: Mapping[str, float] = {}  # sampling defaults of that name, which go before the model's own
    # What its requests leave out of their choice, as the model's entry has it.
    sparse: SparseAttention | None = None
    sparse_unasked: bool = False  # whether requests that say nothing attend so; set by `of_request`


class SparseKinds(NamedTuple):
    """Kinds of sparse attention that groups of a model compute."""

    # Some group does, be it that it starts again: requests that ask for these wait for it.
    some: list[SparseKind]
    # All groups at work do: the entry's choice holds for requests that say nothing.
    everywhere: list[SparseKind]


class ModelNotLoaded(Unavailable):
    """A registered model that no executor has loaded so far: nothing is known of its tokens."""

    code = "model_not_loaded"


class Catalog:
    """A live copy of the buckets `models` and `groups`, beside the registry.

    What is accepted: models of the registry, their aliases, and models that executors serve of their own accord, or
    load now. A card stays when its groups go, so that requests for the model can wait until one is back; one of a model
    that is in no registry and of which no group is there any more is of an earlier start, and accepted no longer.

    What is served (`listed`): a model with a group that is not gone and that has been at work since this gateway
    started (one that starts again, hangs or drains counts: it comes back, or others take over). While there is none,
    what was at work; while there is no group either, models of whose groups nothing is known. A model whose ring
    has not come up yet, or is of an earlier start, is not served.
    """

    def __init__(
        self,
        bus: Bus,
        registry: ModelRegistry,
        adapters: AdapterRegistry,
        *,
        on_card: Callable[[ModelCard], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_card` gets the card of each model that is served, and again when it changes. `clock` gives unix
        seconds."""
        self._bus = bus
        self.registry = registry
        self.adapters = adapters
        self._on_card = on_card
        self._clock = clock
        self.cards: dict[str, ModelCard] = {}
        self._worked: set[str] = set()  # models that had a group at work since this gateway started
        # Models that were in the registry: served until their groups are gone, and no longer.
        self._removed: set[str] = set()
        # Models whose card was given to `on_card`: cards stay, and most of them may be of models of the past.
        self._told: set[str] = set()
        self._groups = registry.groups
        # By model, of those that were asked for since their groups changed.
        self._sparse_kinds: dict[str, SparseKinds] = {}
        # Groups of which nothing was heard since long before this gateway started.
        self._stale = registry.stale
        self.changed = asyncio.Event()  # set when other models may be listed than before
        self._caught_up = (asyncio.Event(), asyncio.Event())
        self._statuses: dict[str, ModelStatus] = {}
        self._statuses_at = float("-inf")
        self._on_loaded: list[Callable[[str], None]] = []
        registry.on_change(self._registry_changed)

    def on_loaded(self, told: Callable[[str], None]) -> None:
        """`told` gets the name of each model of which a card or a group has come."""
        self._on_loaded.append(told)

    # --- names -----------------------------------------------------------------------------------

    def resolve(self, name: str, tenant: str | None = None) -> Resolved:
        """What a client's `model` stands for: a model, an alias of one, or a LoRA adapter of one. `tenant`: of the
        client, whose own adapters are there for it alone; None: of nobody in particular. Raises `UnknownModel`, and
        `Unavailable` of an adapter that is declared and was not read yet."""
        model = self.registry.model_of(name)
        if self._accepts(model):
            return Resolved(model, defaults=self._defaults(model, name), sparse=self._sparse(model))
        record = self.adapters.find(name, tenant)
        if record is None and name in self.adapters.wanted:
            raise not_read(self.adapters.wanted[name])
        if record is None or not self._accepts(record.model):
            raise self._unknown(name, tenant)
        defaults, sparse = self._defaults(record.model, name), self._sparse(record.model)
        return Resolved(record.model, record.digest, name, defaults, sparse)

    def of_request(self, name: str, card: ModelCard, tenant: str) -> tuple[ModelCard, Resolved]:
        """What `name` stands for, whose `card` may have been waited for meanwhile; and the card with the sampling
        defaults of that name, and what groups can and cannot now. Raises as `resolve`."""
        resolved = self.resolve(name, tenant)
        if resolved.model != card.model:  # while the model was waited for
            raise Unavailable(f"'{name[:128]}' has just become another model; try again.", retry_after=1)
        if resolved.defaults:
            card = msgspec.structs.replace(card, defaults={**card.defaults, **resolved.defaults})
        kinds = self.sparse_kinds(card.model)
        if kinds.some != card.sparse:
            card = msgspec.structs.replace(card, sparse=kinds.some)
        if card.engine.unsupported:
            card = msgspec.structs.replace(card, engine=self._common_engine(card))
        if resolved.sparse is not None and resolved.sparse.kind in kinds.everywhere:
            resolved = msgspec.structs.replace(resolved, sparse_unasked=True)
        return card, resolved

    async def resolve_or_look_up(self, name: str, tenant: str | None = None) -> Resolved:
        """As `resolve`. Before anybody is told that there is no such model, the registries themselves are asked."""
        try:
            return self.resolve(name, tenant)
        except UnknownModel:
            if not (await self.registry.look_up(name) or await self.adapters.look_up(name)):
                raise
        return self.resolve(name, tenant)

    def _defaults(self, model: str, name: str) -> Mapping[str, float]:
        spec = self.registry.specs.get(model)
        return spec.defaults.get(name, {}) if spec is not None else {}

    def _sparse(self, model: str) -> SparseAttention | None:
        spec = self.registry.specs.get(model)
        return chosen(spec.sparse_attention) if spec is not None else None

    def sparse_kinds(self, model: str) -> SparseKinds:
        """Of a model, by its own name; as its card says where its groups say nothing."""
        known = self._sparse_kinds.get(model)
        if known is None:
            known = self._sparse_kinds[model] = self._sparse_kinds_now(model)
        return known

    def _sparse_kinds_now(self, model: str) -> SparseKinds:
        records = [record for record in self.registry.live() if record.model == model]
        told = [record.traits.sparse for record in records if record.traits is not None]
        if not told:
            of_card = self.cards[model].sparse if model in self.cards else []
            return SparseKinds(of_card, of_card)
        some = sorted({kind for kinds in told for kind in kinds})
        at_work = [
            record.traits.sparse if record.traits is not None else [] for record in records if record.state in _AT_WORK
        ]
        return SparseKinds(some, [kind for kind in some if all(kind in kinds for kinds in at_work)])

    def engine_of(self, model: str) -> EngineTraits:
        """What computes a model, by its own name, and what all of its groups cannot; as far as is known."""
        card = self.cards.get(model)
        return EngineTraits() if card is None else self._common_engine(card)

    def _common_engine(self, card: ModelCard) -> EngineTraits:
        """The card's engine, with what none of the model's groups can, as far as they have told. Where they differ it
        is not known here which will take a request: the leader of the one that does may refuse it."""
        told = [one.traits.engine.unsupported for one in self.registry.groups_of(card.model) if one.traits is not None]
        common = [name for name in card.engine.unsupported if all(name in others for others in told)]
        return msgspec.structs.replace(card.engine, unsupported=common)

    def is_model(self, name: str) -> bool:
        """Whether it names a model, or is an alias of one."""
        return self._accepts(self.registry.model_of(name))

    def card(self, name: str, tenant: str | None = None) -> ModelCard:
        """The card of a model, whether it has a group now or not. `tenant`: as of `resolve`. Raises `UnknownModel`,
        `ModelNotLoaded`."""
        model = self.resolve(name, tenant).model
        card = self.known_card(model)
        if card is None:
            raise ModelNotLoaded(
                f"The model '{model[:128]}' has never been loaded, so its tokenizer is unknown; send it a "
                "request for text, or load it (POST /models/load).",
                param="model",
                retry_after=self.expected_seconds(model) or None,
            )
        return card

    def card_at_hand(self, name: str) -> ModelCard | None:
        """As `card`, of a model or an alias of one; None where that would raise, and of an adapter."""
        model = self.registry.model_of(name)
        return self.known_card(model) if self._accepts(model) else None

    def known_card(self, model: str) -> ModelCard | None:
        """The card of a model by its own name; None: it was never loaded as the registry has it now."""
        card = self.cards.get(model)
        spec = self.registry.specs.get(model)
        if card is None or spec is None or card.created >= spec.created or self._is_present(model):
            return card
        return None

    def card_of_record(self, model: str) -> ModelCard:
        """For a generation that was accepted earlier, whatever is served now. Raises `UnknownModel`."""
        card = self.cards.get(model)
        if card is None:
            raise self._unknown(model)
        return card

    def _accepts(self, model: str) -> bool:
        if model in self.registry.specs:
            return True
        if model not in self.cards:
            return model in self._starting()
        if model in self._worked or self._is_present(model):
            return True
        if self.registry.specs or model in self._removed:
            return False
        # One that an executor was started with may come back; what a host had loaded was in the registry.
        known = any(one.model == model and not _was_told(one) for one in self._groups.values())
        return known or not self._present()

    def _unknown(self, name: str, tenant: str | None = None) -> UnknownModel:
        names = self.names()
        near = difflib.get_close_matches(name[:128], names, NAMED) if len(names) > NAMED else names
        near = [*difflib.get_close_matches(name[:128], self.adapters.near(name, tenant), 3), *near]
        known = ", ".join(near or names[:NAMED])
        if not names:
            known = "none yet; wait until an executor has loaded one"
        elif (left := len(names) + sum(1 for _ in self.adapters.seen_by(tenant)) - len(near or names[:NAMED])) > 0:
            known += f" and {left} more (GET /v1/models)"
        return UnknownModel(f"The model '{name[:128]}' does not exist here; the models are: {known}.", param="model")

    # --- what is there ---------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Models of the registry, and those that are served of their own accord or are being loaded for that, by
        name."""
        served = (card.model for card in self.listed() if self._accepts(card.model))
        return sorted({*self.registry.specs, *served, *self._starting()})

    def listed(self) -> list[ModelCard]:
        """The models that are served, by name; none while the first one starts."""
        worked = self._worked & self.cards.keys()
        present = self._present()
        served = worked & present or worked
        if not served and not present and not self.registry.specs:
            served = self.cards.keys() - {record.model for record in self._groups.values()}
        return [self.cards[name] for name in sorted(served)]

    def status(self, model: str) -> ModelStatus:
        """Of one model, by its own name."""
        return self._planned(model, self.registry.status(model, self._clock()))

    def statuses(self, age: float = 0.0) -> dict[str, ModelStatus]:
        """Of all of `names`; `age`: seconds that they may be old, where many ask at the same time."""
        if self._clock() - self._statuses_at >= age:
            found = self.registry.statuses(self.names(), self._clock())
            self._statuses = {name: self._planned(name, status) for name, status in found.items()}
            self._statuses_at = self._clock()
        return self._statuses

    def expected_seconds(self, model: str) -> float:
        """Seconds until a model that is not loaded could take a request; 0: not known, or it can."""
        return self.status(model).expected_seconds

    def _planned(self, model: str, status: ModelStatus) -> ModelStatus:
        """`status` with what the scheduler that decides says of the model."""
        plan = self.registry.placements.get(model)
        if plan is None or status.ready:
            return status
        if plan.waiting:
            status = msgspec.structs.replace(status, waiting=plan.waiting)
        left = plan.expected_at - self._clock()
        if left > 0:
            state = "loading" if status.state in ("unloaded", "sleeping", "failed") else status.state
            status = msgspec.structs.replace(status, state=state, expected_seconds=left)
        if plan.reason and not status.reason:
            status = msgspec.structs.replace(status, reason=plan.reason)
        return status

    def _present(self) -> set[str]:
        return {record.model for record in self.registry.live() if record.state != "gone"}

    def _starting(self) -> set[str]:
        """Models that some group is loading now: requests wait for them."""
        return {record.model for record in self.registry.live() if record.state == "starting"} - self._removed

    def _is_present(self, model: str) -> bool:
        return bool(self.registry.groups_of(model))

    def groups(self) -> list[GroupRecord]:
        """The groups that are known, those that are gone among them."""
        return list(self._groups.values())

    def has_ready_group(self, model: str) -> bool:
        """Whether some group could take a request for `model` now."""
        return any(record.model == model and record.state in _SERVING for record in self._groups.values())

    def places(self, model: str) -> int:
        """Sequences that the groups of `model` which are at work have room for; 0: none is, or none has said."""
        return sum(
            record.load.slots for record in self._groups.values() if record.model == model and record.state in _SERVING
        )

    def has_waiting(self, group: str, epoch: int) -> bool:
        """Whether requests waited for a place in that ring when it was heard last."""
        record = self._groups.get(group)
        return record is not None and record.epoch == epoch and record.load.waiting > 0

    def idle_at(self, group: str, epoch: int) -> float:
        """Unix seconds at which that ring was at work with nothing to do; 0 when it was not seen so last."""
        record = self._groups.get(group)
        if record is None or record.epoch != epoch or record.state not in _AT_WORK:
            return 0.0
        return 0.0 if record.load.running or record.load.waiting else record.updated_at

    async def wait(self) -> None:
        """Until everything present in the buckets has been read once."""
        for event in self._caught_up:
            await event.wait()
        await self.registry.wait()
        await self.adapters.wait()

    async def watch_models(self) -> None:
        """Runs until it is cancelled."""
        cards = await Bucket.open(self._bus, subjects.MODELS_BUCKET, ModelCard)
        await cards.follow(self._card_changed, self._caught_up[0].set)

    def _card_changed(self, model: str, card: ModelCard | None) -> None:
        self._told.discard(model)
        self._news()
        self._sparse_kinds.pop(model, None)
        if card is None:
            self.cards.pop(model, None)
            return
        self.cards[model] = card
        if self._is_present(model):
            self._tell(card)
        self._loaded(model)

    def _registry_changed(self, model: str) -> None:
        if model in self.registry.specs:
            self._removed.discard(model)
        elif model in self.cards:
            self._removed.add(model)
            self._forget_removed(model)
        self.changed.set()

    def _as_it_was(self, record: GroupRecord, before: GroupRecord | None) -> GroupRecord:
        """`record`, of a group that starts again, with what is known of it."""
        if before is not None and before.model != record.model:
            self._sparse_kinds.pop(before.model, None)
            before = None
        if before is not None and record.traits is None and record.state not in _AT_WORK:
            record = msgspec.structs.replace(record, traits=before.traits)
        is_news = before is None or (before.state, before.traits) != (record.state, record.traits)
        if is_news or record.group in self._stale:
            self._sparse_kinds.pop(record.model, None)
        return record

    def _forget_removed(self, model: str) -> None:
        if model in self._removed and not self._is_present(model):
            self._worked.discard(model)

    def _news(self) -> None:
        self.changed.set()
        self.registry.tell()

    async def watch_groups(self, listener: RingListener) -> None:
        """Runs until it is cancelled."""
        groups = await Bucket.open(self._bus, subjects.GROUPS_BUCKET, GroupRecord)
        await groups.follow(lambda group, record: self._group_changed(group, record, listener), self._caught_up[1].set)

    def _group_changed(self, group: str, record: GroupRecord | None, listener: RingListener) -> None:
        """A loss is seen here too: events on `health.events` can be missed, records cannot."""
        if record is None:
            gone = self._groups.pop(group, None)
            self._stale.discard(group)
            if gone is not None:
                self._sparse_kinds.pop(gone.model, None)
                self._news()
                self._forget_removed(gone.model)
                listener.on_group_lost(group, gone.epoch, gone.model, 0.0)
            return
        before = self._groups.get(group)
        record = self._groups[group] = self._as_it_was(record, before)
        self._stale.discard(group)
        from_before = before is None and not self._caught_up[1].is_set()
        if from_before and 0 < record.heard_at < self._clock() - STALE:
            self._stale.add(group)
        if before is None or _shown(before) != _shown(record):
            self._news()
        if record.state in (*_AT_WORK, "hung") and group not in self._stale:
            self._worked.add(record.model)
        self._forget_removed(record.model)
        over = record.epoch if record.state in ("hung", "gone") else record.epoch - 1
        listener.on_group_lost(group, over, record.model, record.updated_at)
        if record.state in _AT_WORK:
            listener.on_group_alive(group, record.epoch, record.updated_at)
        if record.state != "gone" and record.model not in self._told and record.model in self.cards:
            self._tell(self.cards[record.model])
        if before is None or before.state != record.state:
            self._loaded(record.model)

    def _loaded(self, model: str) -> None:
        for told in self._on_loaded:
            told(model)

    def _tell(self, card: ModelCard) -> None:
        self._told.add(card.model)
        self._on_card(card)


def _was_told(record: GroupRecord) -> bool:
    """Whether its host was told to load it (`hosts.<instance>.control`), by its name."""
    return record.group.startswith(f"{record.instance}/")


def _shown(record: GroupRecord) -> tuple[str, str, float]:
    """What the status of its model depends on."""
    return record.state, record.model, record.loaded
