"""The cursor over a generation's log: each token once, in order, whatever comes."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.lifecycle.token_stream import TokenStream
from shared.messages import FinishReason, TokenEntry, TokenLogprobs


def entry(position: int, tokens: list[int], finish: FinishReason = "", attempt: int = 0) -> TokenEntry:
    return TokenEntry("g", attempt, position, tokens, finish=finish)


@st.composite
def logs(draw: st.DrawFn) -> list[TokenEntry]:
    """A whole log: entries of 0 to 4 tokens (each token is its position), then the end."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=12))
    log, position = [], 0
    for size in sizes:
        log.append(entry(position, list(range(position, position + size))))
        position += size
    tail = draw(st.integers(0, 3))
    log.append(entry(position, list(range(position, position + tail)), "length"))
    return log


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[TokenEntry], list[TokenEntry]]:
    """A log, and a delivery of it: some entries, repeated and in any order, then a replay of all."""
    log = draw(logs())
    old = [entry(item.position, [-1] * len(item.tokens), item.finish, attempt=0) for item in log]
    live = [
        TokenEntry("g", 1, item.position, item.tokens, finish=item.finish)
        for item in draw(st.lists(st.sampled_from(log), max_size=30))
    ]
    ghosts = draw(st.lists(st.sampled_from(old), max_size=5))
    mixed = draw(st.permutations(live + ghosts))
    replay = [TokenEntry("g", 1, item.position, item.tokens, finish=item.finish) for item in log]
    return log, [*mixed, *replay]


@given(deliveries())
def test_any_delivery_yields_the_log_once_and_in_order(case: tuple[list[TokenEntry], list[TokenEntry]]) -> None:
    log, delivered = case
    stream = TokenStream(attempt=1)
    fresh = [item for given_entry in delivered for item in stream.accept(given_entry)]
    tokens = [token for item in fresh for token in item.tokens]
    assert tokens == list(range(log[-1].position + len(log[-1].tokens)))
    assert [item.position for item in fresh] == sorted(item.position for item in fresh)
    assert [bool(item.finish) for item in fresh].count(True) == 1
    assert fresh[-1].finish == "length"
    assert stream.ended
    assert not stream.ahead
    assert stream.accept(log[-1]) == []


@given(logs(), st.data())
def test_a_restart_continues_behind_what_was_delivered(log: list[TokenEntry], data: st.DataObject) -> None:
    """The second attempt cuts the same tokens otherwise."""
    seen = data.draw(st.integers(0, len(log) - 1))
    stream = TokenStream()
    tokens = [token for item in log[:seen] for fresh in stream.accept(item) for token in fresh.tokens]
    stream.restart(1)
    assert stream.accept(log[-1]) == []  # the dead attempt's end
    total = log[-1].position + len(log[-1].tokens)
    for position in range(stream.position, total):
        tokens += [token for item in stream.accept(entry(position, [position], attempt=1)) for token in item.tokens]
    (end,) = stream.accept(entry(total, [], "stop", attempt=1))
    assert end.finish == "stop"
    assert tokens == list(range(total))


def test_a_gap_is_seen_and_filled() -> None:
    stream = TokenStream()
    assert stream.accept(entry(2, [2])) == []
    assert stream.ahead
    assert [item.tokens for item in stream.accept(entry(0, [0, 1]))] == [[0, 1], [2]]
    assert not stream.ahead


def test_an_overlap_is_trimmed_with_its_logprobs() -> None:
    stream = TokenStream()
    stream.accept(entry(0, [0, 1]))
    scores = [TokenLogprobs(-float(token)) for token in range(4)]
    (item,) = stream.accept(TokenEntry("g", 0, 0, [0, 1, 2, 3], logprobs=scores))
    assert (item.position, item.tokens, item.logprobs) == (2, [2, 3], scores[2:])


def test_of_two_entries_ahead_at_one_place_the_fuller_is_kept() -> None:
    stream = TokenStream()
    for item in (entry(1, [1]), entry(1, [1, 2]), entry(1, [1])):
        stream.accept(item)
    assert [item.tokens for item in stream.accept(entry(0, [0]))] == [[0], [1, 2]]


def test_an_error_may_name_an_old_position() -> None:
    stream = TokenStream()
    stream.accept(entry(0, [0, 1, 2]))
    (item,) = stream.accept(entry(0, [], "error"))
    assert item.finish == "error"
    assert stream.position == 3
