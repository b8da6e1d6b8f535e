"""The response object and its items as JSON values, and the item that is being written: message, reasoning or call.
Pure.

An item says by which events it begins, goes on and is done; numbers and the item's index are its owner's to add.
"""

import base64
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from services.gateway.streams.formats import Usage
from services.gateway.streams.output import ScoredToken
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages.records import GenerationRecord

Item = dict[str, Any]  # as it is listed: JSON


ABBREVIATIONS = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

NAMESPACE = "namespace"  # the type of an entry of `tools` that has tools of its own


def qualified(namespace: str, name: str) -> str:
    """What the model calls a tool of `namespace`; "": it has none."""
    return f"{namespace}__{name}" if namespace else name


def _called_in_namespaces(tools: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """By what the model calls them: namespace and name of tools that have one."""
    return {
        qualified(space["name"], tool["name"]): (space["name"], tool["name"])
        for space in tools
        if space.get("type") == NAMESPACE
        for tool in space["tools"]
    }


# Why a response is incomplete, by the finish reason of its generation.
INCOMPLETE = {"length": "max_output_tokens"}


class ResponseShape:
    """What is the same in every sight of one response."""

    def __init__(self, record: GenerationRecord, tokenizer: Tokenizer) -> None:
        assert record.response is not None, "it is of the endpoint responses"
        self.identity = record.identity
        self.background = record.response.background
        self.compacts = record.response.compacts
        self.prewarm = record.response.prewarm
        self._record = record
        self._shown: dict[str, Any] = msgspec.json.decode(record.response.shown)
        # What the request says of a summary of the reasoning; empty: it wants none.
        self.summary: str = (self._shown.get("reasoning") or {}).get("summary") or ""
        self._namespaces = _called_in_namespaces(self._shown.get("tools") or ())
        self._tokenizer = tokenizer

    def response(
        self,
        status: Status,
        output: Sequence[Item],
        usage: Usage | None = None,
        reasoning_tokens: int = 0,
        *,
        incomplete: str | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """The whole object. It has no `completed_at`: a log has positions and no times."""
        record = self._record
        return {
            "id": f"resp_{record.identity}",
            "object": "response",
            "created_at": int(record.created),
            "status": status,
            "error": error,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "model": record.model_shown,
            "output": list(output),
            "usage": _usage(usage, reasoning_tokens) if usage else None,
            **self._shown,
        }

    def named(self, called: str) -> tuple[str, str]:
        """Namespace ("": none) and name of the tool that the model has called so."""
        return self._namespaces.get(called, ("", called))

    def logprobs(self, scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        return [
            self._token(item.token, item.known.logprob)
            | {"top_logprobs": [self._token(token, logprob) for token, logprob in item.known.top]}
            for item in scored
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    of_input = {"cached_tokens": usage.prompt_tokens_details["cached_tokens"], "cache_write_tokens": 0}
    of_output = {"reasoning_tokens": reasoning_tokens}
    usage.add_sparse(of_input, of_output)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": of_input,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": of_output,
        "total_tokens": usage.total_tokens,
    }


News = tuple[str, dict[str, Any]]  # an event's type and body


class Writing:
    """An item that is not done."""

    kind: ClassVar[str]  # the type of the item

    def __init__(self, shape: ResponseShape, index: int) -> None:
        self._id = f"{ABBREVIATIONS[self.kind]}_{shape.identity}_{index}"
        self._text: list[str] = []

    def item(self, status: ItemStatus) -> Item:
        """As far as it has come."""
        raise NotImplementedError

    def begin(self) -> list[News]:
        return [("response.output_item.added", {"item": self.item("in_progress")})]

    def done(self) -> list[News]:
        """What comes before `response.output_item.done`."""
        raise NotImplementedError


class PartWriting(Writing):
    """An item of one part, which is text."""

    part_kind: ClassVar[str]

    def item(self, status: ItemStatus) -> Item:
        return self._item(status, [self._part()])

    def begin(self) -> list[News]:
        return [
            ("response.output_item.added", {"item": self._item("in_progress", [])}),
            ("response.content_part.added", self._in_part(part=self._part())),
        ]

    def done(self) -> list[News]:
        part = self._part()
        said = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            (f"response.{self.part_kind}.done", self._in_part(**said)),
            ("response.content_part.done", self._in_part(part=part)),
        ]

    def _item(self, status: ItemStatus, parts: Sequence[Item]) -> Item:
        raise NotImplementedError

    def _part(self) -> Item:
        return {"type": self.part_kind, "text": "".join(self._text)}

    def _in_part(self, **body: Any) -> dict[str, Any]:
        return {"item_id": self._id, "content_index": 0, **body}


class ReasoningWriting(PartWriting):
    """What the model thinks before it answers."""

    kind, part_kind = "reasoning", "reasoning_text"

    def __init__(self, shape: ResponseShape, index: int) -> None:
        super().__init__(shape, index)
        self._summary = Summary(concise=shape.summary == "concise") if shape.summary else None

    def add(self, text: str) -> list[News]:
        self._text.append(text)
        news = [("response.reasoning_text.delta", self._in_part(delta=text))]
        return news if self._summary is None else news + self._of_summary(self._summary.feed(text))

    def done(self) -> list[News]:
        rest = [] if self._summary is None else self._of_summary(self._summary.finish())
        return [*rest, *super().done()]

    def _item(self, status: ItemStatus, parts: Sequence[Item]) -> Item:
        summary = [] if self._summary is None else [_summary_part(text) for text in self._summary.texts]
        return {"id": self._id, "type": "reasoning", "status": status, "summary": summary, "content": list(parts)}

    def _of_summary(self, steps: Sequence["SummaryStep"]) -> list[News]:
        news: list[News] = []
        for step in steps:
            where = {"item_id": self._id, "summary_index": step.part}
            if step.kind == "begin":
                body = where | {"part": _summary_part("")}
                news.append(("response.reasoning_summary_part.added", body))
            elif step.kind == "text":
                news.append(("response.reasoning_summary_text.delta", where | {"delta": step.text}))
            else:
                news.append(("response.reasoning_summary_text.done", where | {"text": step.text}))
                body = where | {"part": _summary_part(step.text)}
                news.append(("response.reasoning_summary_part.done", body))
        return news


def _summary_part(text: str) -> Item:
    return {"type": "summary_text", "text": text}


class SummaryStep(NamedTuple):
    kind: Literal["begin", "text", "end"]
    part: int  # its index
    text: str = ""  # more of it, and with its end all of it


class Summary:
    """An extract of the reasoning, for no other model looks at it: a part for each paragraph, the whole or where it is
    to be concise its first sentence. A function of the text, however it is cut into pieces."""

    def __init__(self, *, concise: bool) -> None:
        self.texts: list[str] = []  # of its parts, the last perhaps not done
        self._concise = concise
        self._open = self._cut = False
        self._space = ""  # white space that may end a paragraph
        self._steps: list[SummaryStep] = []

    def feed(self, text: str) -> list[SummaryStep]:
        shown = ""
        for char in text:
            if char.isspace():
                self._space += char
                continue
            if self._open and self._space.count("\n") > 1:
                self._say(shown)
                shown = ""
                self._end()
            if not self._open:
                self._open, self._cut, self._space = True, False, ""
                self.texts.append("")
                self._steps.append(SummaryStep("begin", len(self.texts) - 1))
            said = (self.texts[-1] + shown)[-1:]
            self._cut = self._cut or (self._concise and bool(self._space) and said in ".!?")
            if not self._cut:
                shown += self._space + char
            self._space = ""
        self._say(shown)
        return self._take()

    def finish(self) -> list[SummaryStep]:
        if self._open:
            self._end()
        return self._take()

    def _say(self, text: str) -> None:
        if text:
            self.texts[-1] += text
            self._steps.append(SummaryStep("text", len(self.texts) - 1, text))

    def _end(self) -> None:
        self._open = False
        self._steps.append(SummaryStep("end", len(self.texts) - 1, self.texts[-1]))

    def _take(self) -> list[SummaryStep]:
        steps, self._steps = self._steps, []
        return steps


class MessageWriting(PartWriting):
    """A message, whose text may have log probabilities."""

    kind, part_kind = "message", "output_text"

    def __init__(self, shape: ResponseShape, index: int) -> None:
        super().__init__(shape, index)
        self.logprobs: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: Sequence[dict[str, Any]]) -> list[News]:
        self._text.append(text)
        self.logprobs += logprobs
        return [("response.output_text.delta", self._in_part(delta=text, logprobs=list(logprobs)))]

    def _item(self, status: ItemStatus, parts: Sequence[Item]) -> Item:
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": list(parts)}

    def _part(self) -> Item:
        return super()._part() | {"annotations": [], "logprobs": list(self.logprobs)}


class CompactionContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a summary's `encrypted_content`."""

    summary: str
    version: int = 1


def compaction_item(summary: str, item_id: str) -> Item:
    """A summary as it is listed and sent."""
    content = base64.b64encode(msgspec.json.encode(CompactionContent(summary))).decode()
    return {"id": item_id, "type": "compaction", "encrypted_content": content}


class CompactionWriting(Writing):
    """A summary, which nobody sees before it is done."""

    kind = "compaction"

    def item(self, status: ItemStatus) -> Item:
        item = compaction_item("".join(self._text), self._id)
        return item | {"encrypted_content": ""} if status == "in_progress" else item

    def add(self, text: str) -> list[News]:
        self._text.append(text)
        return [("response.compaction.compacting", {"item_id": self._id})]

    def done(self) -> list[News]:
        return []


class CallWriting(Writing):
    kind = "function_call"

    content: ClassVar[str] = "arguments"
    event: ClassVar[str] = "response.function_call_arguments"

    def __init__(self, shape: ResponseShape, index: int, call_id: str, name: str, namespace: str = "") -> None:
        super().__init__(shape, index)
        self._call_id = call_id
        self._name = name
        self._namespace: Item = {"namespace": namespace} if namespace else {}

    def item(self, status: ItemStatus) -> Item:
        return {
            "id": self._id,
            "type": self.kind,
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            **self._namespace,
            self.content: "".join(self._text),
        }

    def add(self, text: str) -> list[News]:
        self._text.append(text)
        return [(f"{self.event}.delta", {"item_id": self._id, "delta": text})]

    def done(self) -> list[News]:
        body = {"item_id": self._id, "name": self._name, self.content: "".join(self._text)}
        return [(f"{self.event}.done", body)]


class CustomCallWriting(CallWriting):
    kind, content, event = "custom_tool_call", "input", "response.custom_tool_call_input"

    def done(self) -> list[News]:
        return [(kind, {name: body[name] for name in ("item_id", "input")}) for kind, body in super().done()]
