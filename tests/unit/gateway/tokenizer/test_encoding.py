"""Long texts are tokenized beside the event loop, one large one at a time, and what waits is bounded."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from services.gateway.intake.validation import LEAST_TRUNCATED, check_text
from services.gateway.tokenizer import encoding as module
from services.gateway.tokenizer.encoding import INLINE, LARGE, Encoding
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from shared.errors import ContextLengthExceeded, QueueFull
from shared.limits import TRUNCATED_TEXT
from shared.messages import ModelCard
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files


@pytest.fixture
def encoding() -> Iterator[Encoding]:
    made = Encoding(waiting_bytes=4 * LARGE)
    yield made
    made.stop()


class Held:
    """Work that goes on until it is let go; records the thread of each, and how many run together."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.threads: list[str] = []
        self.running = self.most = 0

    def __call__(self) -> str:
        self.running += 1
        self.most = max(self.most, self.running)
        self.threads.append(threading.current_thread().name)
        assert self.go.wait(60)
        self.running -= 1
        return "done"


def thread() -> str:
    return threading.current_thread().name


async def test_short_texts_take_no_detour(encoding: Encoding) -> None:
    assert await encoding.run(INLINE, thread) == thread()


async def test_while_large_ones_go_on_the_loop_and_shorter_ones_do_too(encoding: Encoding) -> None:
    held = Held()
    large = [asyncio.create_task(encoding.run(LARGE + 1, held)) for _ in range(3)]
    for _ in range(10):  # each one a turn of the event loop, and a longer text that passes
        assert (await encoding.run(INLINE + 1, thread)).startswith("tokenize-small")
    assert not any(task.done() for task in large)
    held.go.set()
    assert await asyncio.gather(*large) == ["done"] * 3
    assert held.most == 1
    assert all(name.startswith("tokenize-large") for name in held.threads)


async def test_what_waits_is_bounded_and_counted_to_its_end(encoding: Encoding) -> None:
    held = Held()
    under_way, given_up, waits = (asyncio.create_task(encoding.run(LARGE + 1, held)) for _ in range(3))
    await encoding.run(INLINE + 1, thread)  # by now the first is under way
    with pytest.raises(QueueFull, match="limit text_waiting: 1,048,576 bytes"):
        await encoding.run(2 * LARGE, thread)
    given_up.cancel()
    assert await asyncio.gather(given_up, return_exceptions=True) != ["done"]
    under_way.cancel()  # its thread goes on, and so it counts
    await asyncio.gather(under_way, return_exceptions=True)
    with pytest.raises(QueueFull):
        await encoding.run(3 * LARGE, thread)
    held.go.set()
    await waits
    assert (await encoding.run(4 * LARGE, thread)).startswith("tokenize-large")


async def test_no_tenant_takes_the_room_of_others() -> None:
    encoding, held = Encoding(), Held()
    prompts = [asyncio.create_task(encoding.run(4 << 20, held, "a")) for _ in range(8)]
    _, pending = await asyncio.wait(prompts, return_when=asyncio.FIRST_EXCEPTION)
    assert len(pending) == 4
    with pytest.raises(QueueFull, match=r"your other requests hold 16,777,216; .*text_waiting.*a quarter"):
        await encoding.run(5_000, thread, "a")
    assert (await encoding.run(5_000, thread, "b")).startswith("tokenize-small")
    held.go.set()
    await asyncio.gather(*pending)
    encoding.stop()


async def test_each_tenant_has_its_turn(encoding: Encoding) -> None:
    held, order = Held(), list[str]()

    def named(name: str) -> Callable[[], object]:
        return lambda: (order.append(name), held())

    size = LARGE // 8
    waiting = [asyncio.create_task(encoding.run(size, named(name), name[0])) for name in ("a1", "a2", "a3")]
    await asyncio.sleep(0)  # they wait before the other tenant's comes
    waiting.append(asyncio.create_task(encoding.run(size, named("b1"), "b")))
    await asyncio.sleep(0)
    held.go.set()
    await asyncio.gather(*waiting)
    assert order == ["a1", "a2", "b1", "a3"] or order == ["a1", "b1", "a2", "a3"]


async def test_one_that_is_larger_than_what_may_wait_gets_its_turn_alone(encoding: Encoding) -> None:
    assert (await encoding.run(5 * LARGE, thread)).startswith("tokenize-large")


async def test_memory_is_given_back_after_large_ones_alone(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    again = threading.Event()

    def give_back() -> None:
        given.append(thread())
        if len(given) == 2:
            again.set()

    monkeypatch.setattr(module, "give_back", give_back)
    monkeypatch.setattr(module, "OVER_AFTER", 0.0)
    await encoding.run(LARGE, thread)
    assert given == []
    await encoding.run(LARGE + 1, thread)
    await asyncio.to_thread(again.wait, 60)  # once more when the request is over
    assert [name.partition("_")[0] for name in given] == ["tokenize-large", "tokenize-small"]


async def test_many_texts_are_one_piece_of_work(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    tokenizer = ModelTokenizer(tiny_files(), encoding=encoding)
    run = encoding.run

    async def counted(size: int, work: object, tenant: str) -> object:
        sizes.append(size)
        return await run(size, work, tenant)  # type: ignore[arg-type]

    monkeypatch.setattr(encoding, "run", counted)
    texts = [f"text {number}" for number in range(2048)]
    found = await tokenizer.encode_all(texts)
    assert len(sizes) == 1
    assert sizes[0] > INLINE
    assert found[7] == await tokenizer.encode("text 7")
    assert len(found) == 2048


CARD = ModelCard(model="m", vocab_size=258, context_length=100, eos_token_ids=[1], tokenizer="t", created=0)
LONGEST = len("<|start|>")


@pytest.mark.parametrize(
    ("param", "limit", "words"),
    [
        ("prompt", 0, "maximum context length is 100 tokens, and your prompt resulted"),
        ("messages", 0, "your messages resulted in 101 tokens or more"),
        ("input[1]", 0, r"'input\[1\]' resulted in 101 tokens or more"),
        ("messages", 50, r"at most 50 tokens \(limit prompt_tokens: 50 .*\), and your messages"),
    ],
)
def test_what_cannot_fit_is_refused_untokenized(param: str, limit: int, words: str) -> None:
    tokenizer = ModelTokenizer(tiny_files())
    most = limit or CARD.context_length
    check_text(param, "x" * most * LONGEST, CARD, tokenizer, limit, cut=False)
    with pytest.raises(ContextLengthExceeded, match=words) as caught:
        check_text(param, "x" * (100 * LONGEST + 1), CARD, tokenizer, limit, cut=False)
    assert caught.value.param == param


@pytest.mark.parametrize("context", [100, 8192])
def test_what_is_cut_may_be_longer_up_to_a_limit(context: int) -> None:
    card = msgspec.structs.replace(CARD, context_length=context)
    most = max(LEAST_TRUNCATED, TRUNCATED_TEXT.value * context)
    tokenizer = ModelTokenizer(tiny_files())
    check_text("prompt", "x" * most, card, tokenizer, 0, cut=True)
    with pytest.raises(ContextLengthExceeded, match="limit truncated_text"):
        check_text("prompt", "x" * (most + 1), card, tokenizer, 0, cut=True)
