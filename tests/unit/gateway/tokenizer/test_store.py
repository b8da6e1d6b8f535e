"""Tokenizers by name: loaded once, some of them kept, and what cannot be loaded is tried again."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.gateway.tokenizer.store import TokenizerStore
from shared.errors import InternalError, Unavailable
from shared.limits import TOKENIZERS
from shared.messages import ModelCard, TokenizerBundle
from shared.nats.bus import encode
from shared.nats.objects import MissingObject
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files


class Objects:
    """Stands where the object store does."""

    def __init__(self) -> None:
        self.known: dict[str, bytes] = {}
        self.read: list[str] = []

    async def get(self, name: str) -> bytes:
        self.read.append(name)
        if name not in self.known:
            raise MissingObject(name)
        return self.known[name]


@pytest.fixture
async def store() -> AsyncIterator[TokenizerStore]:
    made = TokenizerStore(cast(Any, None))
    made._objects = cast(Any, Objects())
    yield made
    await made.stop()


def put(store: TokenizerStore, name: str, **changes: Any) -> ModelCard:
    files = tiny_files(template=None) | changes
    cast(Any, store._objects).known[name] = encode(TokenizerBundle(files))
    return ModelCard("m", 100, 258, [1], tokenizer=name, created=0)


async def test_so_many_are_kept_and_the_one_not_asked_for_makes_room(store: TokenizerStore) -> None:
    cards = [put(store, f"t{number}") for number in range(TOKENIZERS.value + 1)]
    first = await store.get(cards[0])
    for card in cards[1:-1]:
        await store.get(card)
    assert await store.get(cards[0]) is first
    await store.get(cards[-1])
    assert await store.get(cards[0]) is first
    objects = cast(Any, store._objects)
    objects.read.clear()
    await store.get(cards[1])
    assert objects.read == ["t1"]
    assert len(store._loading) == TOKENIZERS.value


async def test_what_is_not_there_or_broken_is_tried_again(store: TokenizerStore) -> None:
    card = put(store, "t", **{"chat_template.jinja": b"{% if %}"})
    with pytest.raises(InternalError, match="cannot be used"):
        await store.get(card)
    cast(Any, store._objects).known.clear()
    with pytest.raises(Unavailable, match="not stored"):
        await store.get(card)
    put(store, "t")
    assert await (await store.get(card)).encode("a", special=False)


async def test_its_end_ends_the_processes_that_render(store: TokenizerStore) -> None:
    tokenizer = await store.get(put(store, "t", **tiny_files()))
    assert tokenizer.traits.system
    process = store._renderers["t"]._process
    await store.stop()
    assert process.returncode is not None
