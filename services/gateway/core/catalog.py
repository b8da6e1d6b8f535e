"""Which models there are, and which groups serve them, as NATS KV tells it."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from shared.errors import UnknownModel
from shared.messages import GroupRecord, ModelCard
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket


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


class Catalog:
    """A live copy of the buckets `models` and `groups`.

    A card stays when its groups go, so that requests for the model can wait until one is back. What is
    listed is what is served: a model with a group that is not gone and that has been at work since this gateway
    started (one that starts again, hangs or drains counts: it comes back, or others take over). While there is none,
    what was at work; while there is no group either, models of whose groups nothing is known. A model whose ring
    has not come up yet, or is of an earlier start, is not listed.
    """

    def __init__(self, bus: Bus, *, on_card: Callable[[ModelCard], None]) -> None:
        """`on_card` gets the card of each model that is served, and again when it changes."""
        self._bus = bus
        self._on_card = on_card
        self.cards: dict[str, ModelCard] = {}
        self._worked: set[str] = set()
        """Models that had a group at work since this gateway started."""
        self._told: set[str] = set()
        """Models whose card was given to `on_card`: cards stay, and most of them may be of models of the past."""
        self._groups: dict[str, GroupRecord] = {}
        self.changed = asyncio.Event()
        """Set when other models may be listed than before."""
        self._caught_up = (asyncio.Event(), asyncio.Event())

    def card(self, model: str) -> ModelCard:
        """The card of a model, whether it has a group now or not. Raises `UnknownModel`."""
        card = self.cards.get(model)
        if card is None:
            names = ", ".join(card.model for card in self.listed())
            known = names or "none yet; wait until an executor has loaded one"
            raise UnknownModel(
                f"The model '{model[:128]}' does not exist here; the models are: {known}.", param="model"
            )
        return card

    def listed(self) -> list[ModelCard]:
        """The models that are served, by name; none while the first one starts."""
        worked = self._worked & self.cards.keys()
        present = {record.model for record in self._groups.values() if record.state != "gone"}
        served = worked & present or worked
        if not served and not present:
            served = self.cards.keys() - {record.model for record in self._groups.values()}
        return [self.cards[name] for name in sorted(served)]

    def groups(self) -> list[GroupRecord]:
        """The groups that are known, those that are gone among them."""
        return list(self._groups.values())

    def has_ready_group(self, model: str) -> bool:
        """Whether some group could take a request for `model` now."""
        return any(record.model == model and record.state in _SERVING for record in self._groups.values())

    def places(self, model: str) -> int:
        """Sequences that the groups of `model` which are at work have room for; 0: none is, or none has said."""
        return sum(
            record.load.slots
            for record in self._groups.values()
            if record.model == model and record.state in _SERVING
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

    async def watch_models(self) -> None:
        """Runs until it is cancelled."""
        cards = await Bucket.open(self._bus, subjects.MODELS_BUCKET, ModelCard)
        async for update in cards.watch():
            if update is None:
                self._caught_up[0].set()
                continue
            self._card_changed(*update)

    def _card_changed(self, model: str, card: ModelCard | None) -> None:
        self._told.discard(model)
        self.changed.set()
        if card is None:
            self.cards.pop(model, None)
            return
        self.cards[model] = card
        if any(record.model == model and record.state != "gone" for record in self._groups.values()):
            self._tell(card)

    async def watch_groups(self, listener: RingListener) -> None:
        """Runs until it is cancelled."""
        groups = await Bucket.open(self._bus, subjects.GROUPS_BUCKET, GroupRecord)
        async for update in groups.watch():
            if update is None:
                self._caught_up[1].set()
                continue
            self._group_changed(*update, listener)

    def _group_changed(self, group: str, record: GroupRecord | None, listener: RingListener) -> None:
        """A loss is seen here too: events on `health.events` can be missed, records cannot."""
        if record is None:
            gone = self._groups.pop(group, None)
            if gone is not None:
                self.changed.set()
                listener.on_group_lost(group, gone.epoch, gone.model, 0.0)
            return
        before = self._groups.get(group)
        self._groups[group] = record
        if before is None or (before.state, before.model) != (record.state, record.model):
            self.changed.set()
        if record.state in (*_AT_WORK, "hung"):
            self._worked.add(record.model)
        over = record.epoch if record.state in ("hung", "gone") else record.epoch - 1
        listener.on_group_lost(group, over, record.model, record.updated_at)
        if record.state in _AT_WORK:
            listener.on_group_alive(group, record.epoch, record.updated_at)
        if record.state != "gone" and record.model not in self._told and record.model in self.cards:
            self._tell(self.cards[record.model])

    def _tell(self, card: ModelCard) -> None:
        self._told.add(card.model)
        self._on_card(card)
