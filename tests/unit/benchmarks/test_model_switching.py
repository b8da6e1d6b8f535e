"""The benchmark of several models: schedules, the order of requests, and what is made of answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.errors import BenchError
from benchmarks.models.__main__ import parse_model
from benchmarks.models.switching import Turns, alternating, figures, mixed
from benchmarks.serve.sse import Answer, Usage


def test_alternating_requests_are_each_of_another_model() -> None:
    asked = alternating(5, 2, seed=1)
    assert [request.model for request in asked] == [0, 1, 0, 1, 0]
    assert not any(request.at for request in asked)
    assert len({request.prompt for request in asked}) == 5, "no answer comes out of a cache"


def test_mixed_requests_come_at_the_rate_and_change_as_often_as_is_said() -> None:
    asked = mixed(4000, 3, rate=2.0, change=0.25, seed=7)
    assert asked == mixed(4000, 3, rate=2.0, change=0.25, seed=7)
    changes = sum(one.model != other.model for one, other in pairwise(asked))
    assert changes / 4000 == pytest.approx(0.25, abs=0.03)
    assert asked[-1].at == pytest.approx(2000, rel=0.1)


def test_turns_are_first_come_first_served_and_a_model_is_loaded_by_one() -> None:
    order: list[str] = []

    @asynccontextmanager
    async def request(turns: Turns, name: str, model: int) -> AsyncIterator[None]:
        async with turns.of(model) as switches:
            if switches:
                order.append(f"load {model}")
                await asyncio.sleep(0)
                turns.loaded()
            order.append(name)
            yield

    both = asyncio.Event()

    async def whole(turns: Turns, name: str, model: int, end: asyncio.Event) -> None:
        async with request(turns, name, model):
            if name == "b":
                both.set()
            await end.wait()

    async def run() -> None:
        turns, end = Turns(), asyncio.Event()
        names = (("a", 0), ("b", 0), ("c", 1), ("d", 0))
        tasks = [asyncio.create_task(whole(turns, name, model, end)) for name, model in names]
        await both.wait()
        assert order == ["load 0", "a", "b"], "the third waits for the first two"
        end.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert order == ["load 0", "a", "b", "load 1", "c", "load 0", "d"]


def test_figures_count_failures_and_take_times_from_what_is_whole() -> None:
    def answer(first: float) -> Answer:
        return Answer(
            started=1.0,
            status=200,
            content_type="text/event-stream",
            arrivals=[1.0 + first],
            deltas=[1],
            usage=Usage(3, 8),
            finish_reason="length",
            done=True,
        )

    made = figures("one", "mixed", [answer(0.5), answer(0.25), answer(4.0), Answer(status=503)], 8.0)
    assert (made.requests, made.failed, made.first_token_p50, made.first_token_p99) == (4, 1, 0.5, 4.0)
    assert made.tokens_per_second == 3.0
    with pytest.raises(BenchError, match="answered no request"):
        figures("one", "mixed", [Answer(status=503)], 1.0)


def test_a_model_is_a_name_and_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    assert parse_model(f"a={file}").name == "a"
    for wrong in ("a", f"={file}", "a=/nowhere.gguf", f"a={tmp_path}"):
        with pytest.raises(BenchError, match="NAME=FILE"):
            parse_model(wrong)
