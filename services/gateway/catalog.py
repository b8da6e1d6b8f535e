"""Which models there are, and which groups serve them, as NATS KV tells it."""

import asyncio
from collections.abc import Callable

import structlog

from shared import subjects
from shared.bus import Bus
from shared.errors import UnknownModel
from shared.messages import GroupRecord, ModelCard
from shared.stores import Bucket

log = structlog.get_logger(__name__)

OnLost = Callable[[str, int, str], None]
"""Called with (group, epoch, model): that life of the ring, and all before it, are over."""


class Catalog:
    """A live copy of the buckets `models` and `groups`."""

    def __init__(self, bus: Bus, *, on_card: Callable[[ModelCard], None], on_lost: OnLost) -> None:
        self._bus = bus
        self._on_card = on_card
        self._on_lost = on_lost
        self.cards: dict[str, ModelCard] = {}
        self._groups: dict[str, GroupRecord] = {}
        self._caught_up = (asyncio.Event(), asyncio.Event())
        self._stopping = False

    def card(self, model: str) -> ModelCard:
        """Raises `UnknownModel`."""
        card = self.cards.get(model)
        if card is None:
            known = ", ".join(sorted(self.cards)) or "none yet; wait until an executor has loaded one"
            raise UnknownModel(
                f"The model '{model[:128]}' does not exist here; the models are: {known}.", param="model"
            )
        return card

    def has_ready_group(self, model: str) -> bool:
        """Whether some group could take a request for `model` now."""
        return any(
            record.model == model and record.state in ("ready", "busy") for record in self._groups.values()
        )

    async def wait(self) -> None:
        """Until everything present in the buckets has been read once."""
        for event in self._caught_up:
            await event.wait()

    def stop(self) -> None:
        """Lets the watchers end with the next change.

        Before Python 3.12 `asyncio.wait_for`, which nats-py uses, swallows a cancellation that meets its
        result; without this such a watcher would never end.
        """
        self._stopping = True

    async def watch_models(self) -> None:
        """Runs until it is cancelled."""
        cards = await Bucket.open(self._bus, subjects.MODELS_BUCKET, ModelCard)
        async for update in cards.watch():
            if self._stopping:
                return
            if update is None:
                self._caught_up[0].set()
                continue
            model, card = update
            if card is None:
                self.cards.pop(model, None)
                continue
            self.cards[model] = card
            self._on_card(card)

    async def watch_groups(self) -> None:
        """Runs until it is cancelled."""
        groups = await Bucket.open(self._bus, subjects.GROUPS_BUCKET, GroupRecord)
        async for update in groups.watch():
            if self._stopping:
                return
            if update is None:
                self._caught_up[1].set()
                continue
            self._group_changed(*update)

    def _group_changed(self, group: str, record: GroupRecord | None) -> None:
        """A loss is seen here too: events on `health.events` can be missed, records cannot."""
        if record is None:
            gone = self._groups.pop(group, None)
            if gone is not None:
                self._on_lost(group, gone.epoch, gone.model)
            return
        self._groups[group] = record
        over = record.epoch if record.state in ("hung", "gone") else record.epoch - 1
        self._on_lost(group, over, record.model)


class Losses:
    """Tells each loss of a ring's life once, however often it is reported. Pure."""

    def __init__(self) -> None:
        self._over: dict[str, int] = {}

    def is_new(self, group: str, epoch: int) -> bool:
        """Whether `epoch` of `group` was not known to be over."""
        known = self._over.get(group)
        if known is not None and epoch <= known:
            return False
        self._over[group] = epoch
        return True
