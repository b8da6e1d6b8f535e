"""Errors, mailbox, sessions, sampling, losses, event streams."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.gateway.core.asgi import EventStream, StreamChunk
from services.gateway.core.errors import (
    ClientGone,
    InvalidParameter,
    RequestTimeout,
    RouteError,
    describe,
    headers_of,
    status_of,
)
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.intake.prompts.kv_cache import cache_key, cache_salt, conversation_key, session_of
from services.gateway.intake.record import max_tokens
from services.gateway.intake.sampling.params import sampling_params
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest, Message
from services.gateway.lifecycle.records import Misses
from services.gateway.lifecycle.recovery import MOST_GROUPS, Losses
from services.gateway.lifecycle.request_state import seed_of_choice
from services.gateway.streams.formats import CompletionFormat, Usage
from services.gateway.streams.output import OutputDelta, ScoredToken
from services.gateway.streams.reading import Presentations
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from shared import errors
from shared.messages import ModelCard, TokenEntry, TokenLogprobs
from tests.unit.gateway.streams.test_resumed_reading import OF_BYTE, TOKENIZER, Alone, answer_of
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

PRESENTATIONS = Presentations()

CARD = ModelCard("m", 100, 256, [0], "", 0)
CHAT = ChatCompletionRequest(model="m", messages=[Message("user", "Hi")])


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.UnknownModel("x"), 404, "invalid_request_error", "model_not_found"),
        (errors.InvalidRequest("x"), 400, "invalid_request_error", "invalid_request"),
        (errors.PayloadTooLarge("x"), 413, "invalid_request_error", "payload_too_large"),
        (errors.QueueFull("x"), 429, "rate_limit_error", "queue_full"),
        (errors.BrokerUnavailable("x"), 503, "server_error", "broker_unavailable"),
        (errors.RingLost("x"), 503, "server_error", "ring_lost"),
        (errors.DeadlineExceeded("x"), 504, "server_error", "deadline_exceeded"),
        (RequestTimeout("x"), 408, "invalid_request_error", "request_timeout"),
        (RouteError("x", status=405, reason="r", allow="GET"), 405, "invalid_request_error", "r"),
    ],
)
def test_errors_as_clients_see_them(error: Exception, status: int, kind: str, code: str) -> None:
    detail = describe(error, "req-1").error
    assert (status_of(error), detail.type, detail.code, detail.message) == (status, kind, code, "x")
    assert ("retry-after" in headers_of(error)) == (status in (429, 503, 504))


@pytest.mark.parametrize("error", [ValueError("secret"), errors.InternalError("secret")])
def test_our_faults_show_nothing_but_the_request_id(error: Exception) -> None:
    detail = describe(error, "req-1").error
    assert status_of(error) == 500
    assert "req-1" in detail.message
    assert "secret" not in detail.message


def test_retry_after_is_whole_seconds() -> None:
    assert headers_of(errors.QueueFull("x", retry_after=0.2)) == {"retry-after": "1"}
    assert headers_of(errors.QueueFull("x", retry_after=7.4)) == {"retry-after": "7"}


async def test_a_slow_reader_takes_everything_at_once() -> None:
    run = PRESENTATIONS.run(answer_of([], 2, -1), TOKENIZER, Alone())
    chunks = run.chunks()
    reader = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0)
    for choice in (0, 1):
        run.put(choice, TokenEntry("g", 0, 0, [OF_BYTE[b"a"]]))
    assert [chunk.position for chunk in await reader][-1] == b"1,1"
    run.put(0, TokenEntry("g", 0, 1, [OF_BYTE[b"a"]]))
    run.end(ClientGone())
    with pytest.raises(ClientGone):
        await anext(chunks)
    with pytest.raises(ClientGone):
        await run.collect()


def test_a_conversation_keeps_its_key_from_turn_to_turn() -> None:
    system, user = Message("system", "s"), Message("user", "u")
    more = [Message("assistant", "a"), Message("user", "v"), Message("system", "t")]
    key = conversation_key([system, user])
    assert conversation_key([system, user, *more]) == key
    assert conversation_key([Message("developer", "s"), user]) == key
    assert conversation_key([user]) != key
    assert conversation_key([Message("system", "su"), Message("user", "")]) != key


@given(st.text(max_size=64), st.text(max_size=64), st.text(min_size=1), st.text(min_size=1))
def test_no_two_tenants_share_a_session_or_a_salt(tenant: str, other: str, name: str, its: str) -> None:
    assert session_of(tenant, "") == ""
    assert (session_of(tenant, name) == session_of(other, its)) == ((tenant, name) == (other, its))
    assert session_of(tenant, session_of(other, its)) != session_of(other, its)
    assert (cache_salt(name, tenant) == cache_salt(its, other)) == ((tenant, name) == (other, its))
    assert (cache_salt(None, tenant) == "") == (tenant == "")
    assert cache_salt(None, tenant) != cache_salt(name, tenant)
    assert len(session_of("t" * 64, "n" * 256)) < 1024


def test_a_cache_key_of_any_length_is_a_session() -> None:
    assert cache_key(None) == cache_key("") == ""
    assert len(cache_key("k" * 100_000)) < 64
    assert cache_key("a") == cache_key("a") != cache_key("b")


def test_seeds() -> None:
    assert seed_of_choice(5, 0) == 5
    assert len({seed_of_choice(seed, choice) for seed in range(50) for choice in range(50)}) == 2500
    assert sampling_params(CHAT, CARD).seed != sampling_params(CHAT, CARD).seed
    replaced = msgspec.structs.replace(CHAT, seed=-2)
    assert sampling_params(replaced, CARD).seed == 2**64 - 2


def test_output_lengths() -> None:
    assert max_tokens(CHAT, CARD, 10, 0) == 90
    assert max_tokens(CHAT, CARD, 10, 50) == 50
    assert max_tokens(CHAT, CARD, 60, 50) == 40
    assert max_tokens(msgspec.structs.replace(CHAT, max_completion_tokens=8), CARD, 1, 0) == 8
    assert max_tokens(msgspec.structs.replace(CHAT, max_tokens=8, max_completion_tokens=8), CARD, 1, 0) == 8
    with pytest.raises(InvalidParameter, match="give one of the two"):
        max_tokens(msgspec.structs.replace(CHAT, max_tokens=9, max_completion_tokens=8), CARD, 1, 0)
    assert max_tokens(CompletionRequest(model="m", prompt="x"), CARD, 99, 0) == 1
    for prompt, asked in ((100, None), (10, 91)):
        with pytest.raises(errors.ContextLengthExceeded, match="100 tokens"):
            max_tokens(msgspec.structs.replace(CHAT, max_tokens=asked), CARD, prompt, 0)


@given(st.integers(1, 120), st.lists(st.floats(0, 60), max_size=200))
def test_a_tenant_may_miss_so_many_ids_a_minute_and_as_many_at_once(per_minute: int, pauses: list[float]) -> None:
    misses, now, missed = Misses(per_minute), 0.0, []
    for pause in pauses:
        now += pause
        if misses.wait("a", now) == 0:
            misses.missed("a", now)
            missed.append(now)
        else:
            assert misses.wait("a", now + misses.wait("a", now) + 1e-6) == 0
    assert all(len([at for at in missed if begin <= at < begin + 60]) <= 2 * per_minute + 1 for begin in missed)
    assert misses.wait("b", now) == 0
    misses.missed("b", now + 1000)
    assert list(misses._left) == ["b"], "who has all of it back is forgotten"


def test_losses_are_remembered_in_bounded_number_the_newest_ones() -> None:
    losses = Losses()
    for number in range(MOST_GROUPS):
        losses.lost(f"g{number}", 1, at=0.0, now=1.0)
    losses.lost("g0", 2, at=0.0, now=2.0)
    for number in range(10):
        losses.lost(f"another{number}", 1, at=0.0, now=3.0)
    assert len(losses._last) == MOST_GROUPS
    assert losses.over_since("g0", 2) == 2.0
    assert losses.over_since("g1", 1) is None


def test_a_loss_is_told_once() -> None:
    losses = Losses()
    news = [losses.lost("a", epoch, at=0.0, now=float(epoch)) for epoch in (3, 3, 2, 4)]
    assert news == [True, False, False, True]
    assert losses.lost("b", 1, at=0.0, now=5.0)
    assert [losses.over_since("a", epoch) for epoch in (3, 4, 5)] == [4.0, 4.0, None]
    assert losses.over_since("c", 1) is None


def test_a_ring_that_is_heard_again_can_be_lost_again() -> None:
    losses = Losses()
    losses.alive("a", 3)
    assert losses.lost("a", 3, at=100.0, now=1.0)
    losses.alive("a", 3, at=99.0)  # a record that was written before and came late
    assert losses.over_since("a", 3) == 1.0
    losses.alive("a", 3, at=101.0)
    assert losses.over_since("a", 3) is None
    assert losses.over_since("a", 2) == 1.0
    assert losses.lost("a", 3, at=102.0, now=2.0)
    losses.alive("a", 4, at=103.0)  # another life: the one before stays over
    assert losses.over_since("a", 3) == 2.0


async def test_an_event_stream_begins_with_its_first_write() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    events = EventStream(send)
    assert not events.started
    await events.write([StreamChunk(b"1", b"6"), StreamChunk(b"2", b"7")])
    await events.write([StreamChunk(b"[DONE]")], end=True)
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * 2
    assert sent[1]["body"] == b"retry: 500\ndata: 1\nid: 6\n\ndata: 2\nid: 7\n\n"
    assert sent[2] == {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


def test_a_part_of_a_character_is_shown_by_its_bytes() -> None:
    tokenizer = ModelTokenizer(tiny_files())
    token = next(token for token in range(258) if tokenizer.token_bytes(token) == b"\xe2")
    shape = CompletionFormat(answer_of([], 1, -1), tokenizer)
    chunk = msgspec.json.decode(shape.delta(0, OutputDelta("", [ScoredToken(token, TokenLogprobs(-1.0), 0)])))
    assert chunk["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xe2"]
    assert shape.first(0) is None
    assert msgspec.json.decode(shape.usage(Usage.of(3, 2, 1)))["usage"]["total_tokens"] == 5


def test_metrics_follow_the_naming_convention() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry).of_model("m").prompt_tokens.inc()
    assert all(metric.name.startswith("ryzanstein_gateway_") for metric in registry.collect())
