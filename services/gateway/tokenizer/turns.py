"""Which parts of a rendered conversation the assistant says: the ones that training takes a loss of.

No template says what it makes of one message alone. So the conversation is rendered up to each message that is trained,
and once more as the prompt that the message answers, which is the text that serving sends to the model:

    prompt    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    through   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                                     └─ a span ──────┘

What a template shows earlier messages without (thoughts, tools) it may show the last one with. There a message is
learned in a text of its own, which ends with it; elsewhere one text has all of them.

Templates of models that think may end the prompt within a thought, `<think>\n`, which they do not show of a message
without one. Served, such a model would never see what it has learned; so there the answer is put behind the prompt, and
what it thought, which may be nothing, before the end of the thought.

Where neither helps, a template that marks the assistant's text itself, by `{% generation %}`, is believed.

Pure.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from services.gateway.core.errors import InvalidParameter
from services.gateway.tokenizer.special_tokens import piece_spans
from services.gateway.tokenizer.templates import Span, TemplateInput, Turns


class MarkedTemplate(Protocol):
    @property
    def thought(self) -> tuple[str, str]:
        """What the model's thoughts stand between; empty: it does not think."""
        ...

    def render_marked(self, conversation: TemplateInput) -> tuple[str, list[Span]]:
        """The text, and what lies in its `{% generation %}` blocks. Raises `InvalidParameter`."""
        ...


def turns_of(template: MarkedTemplate, conversation: TemplateInput, trained: Sequence[int]) -> list[Turns]:
    """Texts in which each of the messages `trained` is learned once; in most templates it is one text. Raises
    `InvalidParameter` where the template refuses, or does not show what it makes of a message."""
    found: list[Turns] = []
    for index in sorted(trained, reverse=True):
        turn = _turn(template, conversation, index)
        for number, longer in enumerate(found):
            if longer.text.startswith(turn.text):
                found[number] = Turns(
                    longer.text, sorted({*turn.spans, *longer.spans}), longer.unlike_prompt or turn.unlike_prompt
                )
                break
        else:
            found.append(turn)
    return found[::-1]


def _turn(template: MarkedTemplate, conversation: TemplateInput, index: int) -> Turns:
    messages, before = conversation.messages, conversation.messages[:index]
    options = msgspec.structs.replace(conversation.options, continue_final=False)
    asked, plain = (
        conversation._replace(options=msgspec.structs.replace(options, add_generation_prompt=asked))
        for asked in (True, False)
    )
    prompt, marked_before = template.render_marked(asked._replace(messages=before))
    text, marked = template.render_marked(plain._replace(messages=messages[: index + 1]))
    thoughts = str(messages[index].get("reasoning_content") or "")
    text = _behind_prompt(prompt, text, thoughts, *template.thought)
    if text.startswith(prompt):
        return Turns(text, [(len(prompt), len(text))])
    begin = _common(prompt, text)
    if len(marked) > len(marked_before):
        return Turns(text, [(marked[len(marked_before)][0], len(text))], prompt[begin:])
    history, _ = template.render_marked(plain._replace(messages=before))
    if not text.startswith(history) or not len(history) <= begin < len(text):
        raise InvalidParameter(
            "The chat template of the model shows the messages before an answer in another way when the answer stands "
            "behind them, so it cannot be told which text is the answer: leave out the messages before it that have "
            "tool calls or reasoning, or take a model with another template.",
            param="messages",
            reason="invalid_messages",
        )
    return Turns(text, [(begin, len(text))], prompt[begin:])


def _behind_prompt(prompt: str, text: str, thoughts: str, begin: str, end: str) -> str:
    """`text` as serving would have it, where `prompt` ends with a thought that has begun, or is over, and the template
    does not show it in `text`."""
    head, opening, tail = prompt.rpartition(begin) if begin else ("", "", "")
    if not opening or text.startswith(prompt) or not text.startswith(head):
        return text
    said = text[len(head) :]
    if said.startswith(begin):
        return text
    if end in tail or end in said:
        return prompt + said
    space = "\n" if prompt.endswith("\n") else ""
    return f"{prompt}{thoughts}{space}{end}{space}{space}{said}"


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# --- from characters to tokens -------------------------------------------------------------------


class TextSegment(NamedTuple):
    """Of a text: what is encoded apart, and the characters of it that are trained."""

    text: str
    spans: list[Span]


class TrainedText(NamedTuple):
    """A text to learn from."""

    pieces: list[TextSegment]
    special: bool = False  # whether the tokens that the model wants around a plain text are put there
    unlike_prompt: str = ""  # see `Turns`

    @property
    def ends_trained(self) -> bool:
        """Whether its last character is."""
        last = self.pieces[-1]
        return any(end == len(last.text) for _, end in last.spans)


class TrainedTokens(NamedTuple):
    """An example, or one text of a pair."""

    tokens: list[int]
    weights: bytes  # one byte a token, 0 or 1


def pieces_of(turns: Turns, mark: str, ends: Collection[str]) -> list[TextSegment]:
    """The text, cut where the text of a special token is none (`special_tokens.py`). `ends`: texts of special tokens;
    white space behind one at the end of a span is not trained: generations end before it."""
    ends = tuple(ends)
    spans = [_without_space(turns.text, span, ends) for span in turns.spans]
    return [_piece(turns.text, *where, spans) for where in piece_spans(turns.text, mark)]


def _piece(text: str, first: int, last: int, spans: Sequence[Span]) -> TextSegment:
    inside = ((max(begin, first) - first, min(end, last) - first) for begin, end in spans)
    return TextSegment(text[first:last], [span for span in inside if span[0] < span[1]])


def _without_space(text: str, span: Span, ends: tuple[str, ...]) -> Span:
    begin, end = span
    last = len(text[begin:end].rstrip()) + begin
    return (begin, last) if text.endswith(ends, begin, last) else span


def weights_of(count: int, end_of: Callable[[int], int], spans: Iterable[Span]) -> bytearray:
    """One byte for each of `count` tokens. `end_of` gives the character behind a token, which no later one is before. A
    token counts to the span that it ends in: how a tokenizer counts white space at a token's begin does not matter
    then."""
    weights, tokens = bytearray(count), range(count)
    for begin, end in spans:
        first, last = (bisect_right(tokens, place, key=end_of) for place in (begin, end))
        weights[first:last] = b"\1" * (last - first)
    return weights
