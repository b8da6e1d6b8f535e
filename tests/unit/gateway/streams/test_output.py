"""Tokens of a choice to its text."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.streams.output import TextOutput
from services.gateway.tokenizer.tokenizer import ModelTokenizer, StubTokenizer, Tokenizer
from shared.messages import FinishReason, GenerationRequest, SamplingParams, TokenEntry, TokenLogprobs
from shared.messages.records import GenerationRecord
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

TINY = ModelTokenizer(tiny_files())
TOKEN_OF = {TINY.token_bytes(token): token for token in range(2, 258)}


def bytewise(text: bytes) -> list[int]:
    """Tokens of a model whose every token is a byte."""
    return [TOKEN_OF[bytes([byte])] for byte in text]


def made(
    tokenizer: Tokenizer, stops: Sequence[str], ends: list[int], *, logprobs: bool = False, **recorded: Any
) -> TextOutput:
    request = GenerationRequest("i-0", "r", "m", "g", [5], 64, SamplingParams(logprobs=0 if logprobs else -1), ends)
    record = GenerationRecord("i", "chat.completions", 0.0, [request], stop=list(stops), **recorded)
    return TextOutput(record, request, tokenizer)


def of_bytes(*stops: str) -> TextOutput:
    return made(TINY, stops, [1])


def output(*stops: str, logprobs: bool = False) -> TextOutput:
    return made(StubTokenizer(), stops, [0], logprobs=logprobs)


def test_what_ended_the_text_is_told() -> None:
    for stops, tokens, finish, reason in (
        (["lo", "o"], b"hello", "", "lo"),
        ([], b"ab!", "stop", ord("!")),
        ([], b"ab\0", "stop", None),  # the model's own end of sequence
        ([], b"a!b", "stop", None),
        ([], b"ab!", "length", None),
        (["!"], b"ab!", "stop", "!"),
    ):
        target = made(StubTokenizer(), stops, [0, 33], include_stop=True, token_ids=True, stop_token_ids=[33])
        for half in ([*tokens[:2]], [*tokens[2:]]):
            last = finish if half == [*tokens[2:]] else ""
            target.feed(TokenEntry("g", 0, 0, half, last))  # type: ignore[arg-type]
        assert target.stop_reason == reason
        assert [*target.take().ids] == [*tokens]


def feed(target: TextOutput, text: str, finish: FinishReason = "", tail: list[int] | None = None) -> None:
    tokens = [*text.encode(), *(tail or [])]
    scores = [TokenLogprobs(-1.0) for _ in tokens]
    target.feed(TokenEntry("g", 0, 0, tokens, finish=finish, logprobs=scores))


def test_held_text_is_shown_at_the_end() -> None:
    target = output("lost")
    feed(target, "all is lo")
    assert target.take().text == "all is "
    feed(target, "", "length")
    assert target.take().text == "lo"
    assert (target.finish, target.tokens) == ("length", 9)


def test_a_stop_token_is_counted_and_not_shown() -> None:
    target = output()
    feed(target, "ab", "stop", tail=[0])
    assert target.take().text == "ab"
    assert target.tokens == 3


def test_after_a_stop_string_nothing_is_counted() -> None:
    target = output("b")
    feed(target, "ab")
    feed(target, "cd")
    assert (target.take().text, target.finish, target.tokens) == ("a", "stop", 2)


def test_logprobs_come_with_their_text_and_not_for_what_was_cut() -> None:
    target = output("cd", logprobs=True)
    feed(target, "abc")
    first = target.take()
    assert (first.text, [item.offset for item in first.scored]) == ("ab", [0, 1])
    feed(target, "x")
    feed(target, "cde")
    second = target.take()
    assert (second.text, [item.offset for item in second.scored]) == ("cx", [2, 3])
    assert target.finish == "stop"


def test_logprobs_of_held_text_wait_with_it() -> None:
    target = output("lo", logprobs=True)
    shown = []
    for character in "Hello":
        feed(target, character)
        shown += [chr(item.token) for item in target.take().scored]
    assert (shown, target.finish) == (list("Hel"), "stop")


def test_an_output_that_ends_within_a_character_keeps_its_text() -> None:
    target = of_bytes()
    target.feed(TokenEntry("g", 0, 0, bytewise(b"a\xc3"), finish="length"))
    assert (target.take().text, target.finish, target.tokens) == ("a\ufffd", "length", 2)


def test_what_was_pending_at_the_end_goes_through_the_stop_strings() -> None:
    target = of_bytes("a\ufffd")
    target.feed(TokenEntry("g", 0, 0, bytewise(b"xa\xe2\x98")))
    assert target.take().text == "x"
    target.feed(TokenEntry("g", 0, 4, [], finish="length"))
    assert (target.take().text, target.finish) == ("", "stop")


def test_tokens_after_a_stop_string_in_its_entry_are_not_counted() -> None:
    target = of_bytes("b")
    target.feed(TokenEntry("g", 0, 0, bytewise(b"abcd")))
    assert (target.take().text, target.finish, target.tokens) == ("a", "stop", 2)


@given(st.text("a\u00e9\u2603\U0001f600", max_size=8), st.data())
def test_the_text_does_not_depend_on_how_the_log_was_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    tokens = bytewise(raw)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    target, shown = of_bytes(), ""
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        target.feed(TokenEntry("g", 0, start, tokens[start:end]))
        shown += target.take().text
        assert raw[: target.tokens].decode(errors="ignore") == shown
    target.feed(TokenEntry("g", 0, len(tokens), [], finish="length"))
    shown += target.take().text
    assert shown == raw.decode(errors="replace")
    assert target.tokens == len(tokens)
