"""Tokens of a choice to its text."""

from services.gateway.text_output import TextOutput
from services.gateway.tokenization import StubTokenizer
from shared.messages import FinishReason, TokenEntry, TokenLogprobs


def output(*stops: str, logprobs: bool = False) -> TextOutput:
    detokenizer = StubTokenizer().detokenizer([], skip_special_tokens=True)
    return TextOutput(detokenizer, stops, [0], logprobs=logprobs)


def feed(target: TextOutput, text: str, finish: FinishReason = "", tail: list[int] | None = None) -> None:
    tokens = [*text.encode(), *(tail or [])]
    scores = [TokenLogprobs(-1.0) for _ in tokens]
    target.feed(TokenEntry("g", 0, 0, tokens, finish=finish, logprobs=scores))


def test_held_text_is_shown_at_the_end() -> None:
    target = output("lost")
    feed(target, "all is lo")
    assert target.take().text == "all is "
    assert target.position == 0  # the text of the tokens so far has not been shown whole
    feed(target, "", "length")
    assert target.take().text == "lo"
    assert (target.finish, target.position, target.tokens) == ("length", 9, 9)


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
    assert (first.text, [item.offset for item in first.scored]) == ("ab", [0, 1, 2])
    feed(target, "x")
    feed(target, "cde")
    second = target.take()
    assert (second.text, [item.offset for item in second.scored]) == ("cx", [3])
    assert target.finish == "stop"
