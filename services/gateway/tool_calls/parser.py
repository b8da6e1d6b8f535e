"""Text of one choice in, events out, and their calls numbered: reasoning first, then ordinary text and calls. Pure.

    text ──▶ reasoning ──▶ tool calls ──▶ events
                  └──────── thoughts ───────▲

Reasoning stands before the answer: `<think>...</think>`, or within other marks of its family (`REASONING`).
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from services.gateway.tool_calls.custom_input import CustomInput
from services.gateway.tool_calls.parsers import harmony, marked
from services.gateway.tool_calls.parsers.scanner import (
    Arguments,
    CallBegin,
    Event,
    Machine,
    Scanner,
    Steps,
    Text,
    Types,
)
from services.gateway.tool_calls.parsers.sections import KIMI
from services.gateway.tool_calls.parsers.tagged import suffix_and_bracket, without_suffix


class ReasoningMarks(NamedTuple):
    """How a family of models marks its reasoning."""

    begin: str
    end: str
    signs: tuple[str, ...] = ()  # a template with all of these is of the family; none: with `end`
    answer: tuple[str, str] = ("", "")  # what the answer stands between, where it stands between anything
    ended_by: str = ""  # what ends the reasoning too, and belongs to the answer
    before_calls: str = ""  # what stands between reasoning and calls
    before_answer: str = ""  # what an answer begins with
    # Further special tokens that the parser must see, and that only the model may write.
    structure: tuple[str, ...] = ()
    # Whether each checkpoint has a suffix of its own in its tags: `<think:opensource>`.
    suffixed: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to `prompt` begins within the reasoning."""
        prompt = prompt.rstrip()
        if self.suffixed:
            _, begin, rest = prompt.rpartition(self.begin[:-1])
            prompt = without_suffix(begin + rest)
        return prompt.endswith(self.begin)


_THINK, _END_OF_THINK = "<think>", "</think>"
# By the parser's name; in the order in which templates are looked at.
REASONING: Mapping[str, ReasoningMarks] = {
    "openai_gptoss": ReasoningMarks(
        harmony.ANALYSIS,
        harmony.END,
        (harmony.ANALYSIS,),
        before_calls=f"{harmony.START}assistant",
        before_answer=harmony.FINAL,
        structure=harmony.TOKENS,
    ),
    "cohere_command4": ReasoningMarks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|END_THINKING|>", "<|END_TEXT|>"),
        answer=("<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "cohere_command3": ReasoningMarks(
        "<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "apertus": ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>", ended_by=marked.APERTUS_CALLS),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>"),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>"),
    "longcat": ReasoningMarks("<longcat_think>", "</longcat_think>"),
    "hy_v3": ReasoningMarks(_THINK, _END_OF_THINK, ("<think", "<tool_calls", "<arg_key"), suffixed=True),
    "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
    "hunyuan_a13b": ReasoningMarks(
        _THINK, _END_OF_THINK, (_END_OF_THINK, "</answer>"), answer=("<answer>", "</answer>")
    ),
    "ernie45": ReasoningMarks(
        _THINK, _END_OF_THINK, (_END_OF_THINK, "</response>"), answer=("<response>", "</response>")
    ),
    "kimi_k2": ReasoningMarks(_THINK, _END_OF_THINK, (_END_OF_THINK, KIMI.begin), ended_by=KIMI.begin),
    "think": ReasoningMarks(_THINK, _END_OF_THINK),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
}


def reasoning(scan: Scanner, name: str, *, opened: bool) -> Steps[None]:
    """The thoughts, then everything else as text; white space between them belongs to neither."""
    marks = REASONING[name]
    if marks.structure:
        yield from harmony.channels(scan, opened=opened)
        return
    scan.mark()
    if marks.suffixed:
        yield from _suffixed(scan, marks, opened=opened)
    elif (yield from scan.optional(marks.begin)) or opened:
        ends = tuple(end for end in (marks.end, marks.ended_by) if end)
        end = yield from scan.until(ends, _Thoughts(scan).feed)
        if not end:
            return
        if end == marks.ended_by:
            scan.text(end)
        else:
            yield from scan.spaces()
    begin, end = marks.answer
    if begin and (yield from scan.optional(begin)):
        yield from scan.spaces()
        while (yield from scan.content(end)):
            pass
    yield from scan.rest()


def _suffixed(scan: Scanner, marks: ReasoningMarks, *, opened: bool) -> Steps[None]:
    """The thoughts of a checkpoint with a suffix of its own, and the white space behind them."""
    begun = bool((yield from scan.optional(marks.begin[:-1])))
    if begun and (yield from suffix_and_bracket(scan)) is None:
        scan.back()
        begun = False
    begun, thoughts = begun or opened, _Thoughts(scan)
    while begun and (yield from scan.until((marks.end[:-1],), thoughts.feed)):
        scan.mark()
        if (yield from suffix_and_bracket(scan)) is not None:
            yield from scan.spaces()
            return
        scan.back()
        thoughts.feed(marks.end[:-1])


class _Thoughts:
    """White space at either end is no thought."""

    def __init__(self, scan: Scanner) -> None:
        self._scan = scan
        self._space = ""
        self._begun = False

    def feed(self, text: str) -> None:
        text = self._space + text
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        self._scan.thought(shown)


class _Stage:
    """One parser at work."""

    def __init__(self, scan: Scanner, steps: Steps[None]) -> None:
        self._scan = scan
        self._steps = steps

    def feed(self, text: str, *, last: bool) -> list[Event]:
        self._scan.add(text)
        if last:
            self._scan.end()
        next(self._steps, None)
        if last:
            self._scan.last_space()
        return self._scan.take()


class Parser:
    """The same text gives the same events, joined, however it is cut into pieces."""

    def __init__(self, machine: Machine | None, types: Types, *, thinking: str = "", opened: bool = False) -> None:
        """`machine` None: calls are not looked for; `thinking` "": reasoning is not. `opened`: it begins within
        its reasoning."""
        self._stages: list[_Stage] = []
        if thinking:
            scan = Scanner()
            self._stages.append(_Stage(scan, reasoning(scan, thinking, opened=opened)))
        if machine is not None:
            scan = Scanner()
            self._stages.append(_Stage(scan, machine(scan, types)))

    def feed(self, text: str) -> list[Event]:
        """What has become clear with `text`."""
        return self._run([Text(text)] if text else [], last=False)

    def finish(self) -> list[Event]:
        """What is left at the end of the text."""
        return self._run([], last=True)

    def _run(self, events: Sequence[Event], *, last: bool) -> list[Event]:
        for stage in self._stages:
            texts = "".join(event.text for event in events if isinstance(event, Text))
            others = [event for event in events if not isinstance(event, Text)]
            events = others + stage.feed(texts, last=last) if texts or last else others
        return list(events)


class CallDelta(msgspec.Struct, frozen=True):
    """What is new of one call: its name, with its id, or more of its arguments, or both."""

    index: int
    id: str  # empty where the call has begun before, as the name is
    name: str
    arguments: str  # JSON, or of a custom tool its input
    custom: bool = False


def call_id(generation_id: str, index: int) -> str:
    """The id of call `index` of a choice. It follows from the generation alone: whoever shows the answer again
    shows the same."""
    digest = hashlib.blake2b(f"{generation_id}#{index}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"


class CallNumbering:
    """Gives the calls of one choice their indices and ids."""

    def __init__(self, generation_id: str, *, single: bool, custom: Collection[str] = ()) -> None:
        """`single`: only the first call counts. `custom`: names of custom tools."""
        self._generation_id = generation_id
        self._single = single
        self._custom = frozenset(custom)
        # Of the call that is being written, where its tool is a custom one.
        self._input: CustomInput | None = None
        self.begun = 0  # calls so far, those left out included

    def deltas(self, events: Sequence[Event]) -> list[CallDelta]:
        """What `events` mean for clients, one delta a call."""
        found: dict[int, CallDelta] = {}
        for event in events:
            if isinstance(event, CallBegin):
                index, self.begun = self.begun, self.begun + 1
                custom = event.name in self._custom
                self._input = CustomInput() if custom else None
                found[index] = CallDelta(index, call_id(self._generation_id, index), event.name, "", custom=custom)
            elif isinstance(event, Arguments):
                index = self.begun - 1
                text = event.text if self._input is None else self._input.feed(event.text)
                delta = found.get(index) or CallDelta(index, "", "", "", custom=self._input is not None)
                found[index] = msgspec.structs.replace(delta, arguments=delta.arguments + text)
        return [delta for delta in found.values() if not (self._single and delta.index)]
