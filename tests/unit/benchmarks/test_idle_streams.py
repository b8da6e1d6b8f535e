"""The memory of streams that wait: what is measured, and in which words."""

import resource

import pytest

from benchmarks.errors import BenchError
from benchmarks.gateway.idle_streams import OTHER_FILES, Found, allowed, measured, opened, requests
from tests.unit.benchmarks.fake_server import serving


async def test_streams_of_a_gateway_are_held_and_measured() -> None:
    found = await measured(streams=48, warm_up=8, words=20)
    assert (found.streams, found.warm_up) == (48, 8)
    assert found.prompt_tokens > 20
    assert found.after_kib >= found.before_kib > 10_000, "a gateway's own size"


def test_what_a_stream_costs_is_the_difference() -> None:
    assert Found(110, 20, 10, before_kib=1000, after_kib=1500).bytes_each == 5 * 1024


def test_no_more_than_the_system_opens_files_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert (allowed(10_000), allowed(1000)) == (4096 - OTHER_FILES, 1000)
    assert asked == [(4096, 4096), (1000 + OTHER_FILES, 4096)]


def test_prompts_are_different_and_of_a_length() -> None:
    made = requests(80, 20)
    assert next(made) != next(made)


async def test_a_stream_that_is_refused_is_shown() -> None:
    async with serving(status=503, error_body=b"no place") as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(BenchError, match=r"A stream was refused: HTTP/1\.1 503"):
            await opened(port, next(requests(port, 1)))
