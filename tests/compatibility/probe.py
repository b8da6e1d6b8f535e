"""Tries every parameter out against a running server.

    200 for every value that its type lists    taken
    200 for some, 4xx that names it for others taken in part
    4xx that names it                          refused by name
    404 unknown URL, unknown parameter, else   missing

What is taken is taken to be honoured: the bodies' types know no field that nothing reads, and each field has tests of
its effect. This asks for acceptance alone. A field of a query could be ignored unseen: it is taken only where nonsense
in its place is refused, or a filter finds something else.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import httpx

from tests.compatibility.operations import (
    BATCH_FILE,
    IN_PATH,
    LONG_FILE,
    OPERATIONS,
    REASONS,
    SETUP,
    TRAINING_FILE,
    Operation,
    why_excluded,
)
from tests.compatibility.samples import QUERIES, QUERY_BESIDE, request_for, sample, values_for
from tests.compatibility.walk import Parameter, event_types, parameters, response_fields, seen_in

AT_ONCE = 8
NONSENSE = "\x00 no such thing"
# Codes of errors about what is not there.
NOWHERE = ("unknown_url", "method_not_allowed", "unknown_parameter")
FILES = {"long_file": LONG_FILE, "training_file": TRAINING_FILE}
# By name: the list whose first entry has that id.
FIRST_OF = {
    "input_item": "/responses/{response}/input_items",
    "conversation_item": "/conversations/{conversation}/items",
    "tuning_event": "/fine_tuning/jobs/{tuned}/events",
    "checkpoint": "/fine_tuning/jobs/{tuned}/checkpoints",
}
UNFINISHED = ("validating_files", "queued", "running")
TRAINED_WITHIN = 300.0  # seconds, on a machine that has other work
Verdict = Literal["honoured", "partly", "refused", "missing"]


class Row(NamedTuple):
    """One parameter, response field or event, and what has become of it."""

    path: str
    verdict: Verdict
    excluded: str  # why it has no meaning here; empty where it has
    not_taken: tuple[str, ...] = ()  # values that are refused where others are taken


class Found(NamedTuple):
    """An operation that was tried out."""

    operation: Operation
    there: bool
    parameters: list[Row]
    fields: list[Row]  # of the answer and of its stream's chunks
    events: list[Row]


class Prober:
    """Asks one server."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        reasoning: httpx.AsyncClient,
        failing: httpx.AsyncClient | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        """All with a server's address as their base: that of a model that reasons the second, and the third one whose
        engine fails where it is asked to, and which `end` tells to end. None: there is no such server."""
        self._http = http
        self._reasoning = reasoning
        self._failing = failing
        self._end = end
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._ids: dict[str, str] = {}

    async def probe(self) -> list[Found]:
        """All operations."""
        for step in SETUP:
            await self._set_up(*step)
        await self._trained()
        for name, path in FIRST_OF.items():
            items = Operation(name, "GET", path)
            for item in _json(await self._send(items, {})).get("data", [])[:1]:
                self._ids[name] = item["id"]
        return [await self._operation(operation) for operation in OPERATIONS]

    async def _trained(self) -> None:
        """Waits for the fine-tuning job to be over."""
        job = Operation("tuned", "GET", "/fine_tuning/jobs/{tuned}")
        async with asyncio.timeout(TRAINED_WITHIN):
            while _json(await self._send(job, {})).get("status") in UNFINISHED:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def _set_up(self, name: str, method: str, path: str, body: dict[str, Any]) -> None:
        file = FILES.get(name, BATCH_FILE)
        form = "file" if path == "/files" else "data" if path.endswith("/parts") else ""
        operation = Operation(name, method, path, form=form)
        answer = await self._send(operation, self._filled(body), file=file)
        made = _json(answer) if answer.status_code == 200 else {}
        self._ids[name] = made.get("id", "none")
        for item in made.get("output", [])[:1]:
            self._ids["item"] = item["id"]

    async def _operation(self, operation: Operation) -> Found:
        for step in SETUP:
            if step[0] == operation.anew:
                await self._set_up(*step)
        plain = await self._send(operation, self._filled(operation.base))
        tried = await asyncio.gather(
            *(self._parameter(operation, one) for one in parameters(*operation.kinds) if one.path not in IN_PATH)
        )
        more = [await self._send(operation, self._filled(operation.base | body)) for body in operation.also]
        more += [
            await self._send(operation, operation.base | body, http=self._reasoning) for body in operation.reasoning
        ]
        more += await self._faults(operation)
        answers = [plain, *more, *(answer for several, _ in tried for answer in several)]
        seen = {path for answer in answers if answer.status_code < 400 for path in _paths(answer)}
        names = event_types(operation.events) if operation.events else []
        sent = {str(event.get("type")) for answer in answers for event in _events(answer)}
        events = [Row(name, _seen(name, sent), why_excluded(operation.name, f"type={name}")) for name in names]
        rows = [row for _, row in tried]
        return Found(operation, plain.status_code < 400, rows, _fields(operation, seen), events)

    async def _faults(self, operation: Operation) -> list[httpx.Response]:
        """What a server tells whose engine fails, and one that ends."""
        if self._failing is None:
            return []
        found = [await self._send(operation, operation.base | body, http=self._failing) for body in operation.failing]
        for body in operation.cut:
            sent = operation.base | body
            async with self._failing.stream(operation.method, f"/v1{operation.path}", json=sent) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    if not text and self._end is not None:
                        self._end()
                    text += piece
            found.append(httpx.Response(answer.status_code, headers=answer.headers, text=text))
        return found

    async def _parameter(self, operation: Operation, one: Parameter) -> tuple[list[httpx.Response], Row]:
        excluded = why_excluded(operation.name, one.path)
        if operation.method == "GET" or one.path in operation.in_query:
            answer, verdict = await self._query(operation, one)
            return [answer], Row(one.path, verdict, excluded)
        values = values_for(operation.name, operation.base, one)
        bodies = [self._filled(request_for(operation.name, operation.base, one, value)) for value in values]
        http = self._reasoning if re.search(REASONS, one.path) else None
        answers = [await self._send(operation, body, http=http) for body in bodies]
        tried = [_tried(body, operation, one) for body in bodies]
        verdicts = [verdict_of(answer, names) for answer, names in zip(answers, tried, strict=True)]
        refused = [str(value) for value, verdict in zip(values, verdicts, strict=True) if verdict != "honoured"]
        if "honoured" in verdicts and refused:
            return answers, Row(one.path, "partly", excluded, tuple(refused))
        verdict = "missing" if "missing" in verdicts else verdicts[0]
        return answers, Row(one.path, verdict, excluded)

    async def _query(self, operation: Operation, parameter: Parameter) -> tuple[httpx.Response, Verdict]:
        which = (operation.name, parameter.name)
        value = QUERIES.get(which, sample(parameter.path, parameter.kind))
        beside = QUERY_BESIDE.get(which, {})
        body = self._filled(operation.base) if parameter.name in operation.in_query else {}
        taken = await self._send(operation, body, self._filled({parameter.name: value} | beside))
        senseless = dict.fromkeys(value, NONSENSE) if isinstance(value, dict) else NONSENSE
        nonsense = await self._send(operation, body, {parameter.name: senseless} | beside)
        verdict = verdict_of(taken, (parameter.top,))
        if nonsense.status_code < 400:  # nothing is nonsense to a filter: it must find something else
            return taken, verdict if _json(nonsense) != _json(taken) else "missing"
        return taken, "missing" if verdict_of(nonsense, (parameter.top,)) == "missing" else verdict

    async def _send(
        self,
        operation: Operation,
        body: dict[str, Any],
        query: dict[str, Any] | None = None,
        *,
        file: bytes = BATCH_FILE,
        http: httpx.AsyncClient | None = None,
    ) -> httpx.Response:
        path = f"/v1{operation.path}".format(**self._ids) if self._ids else f"/v1{operation.path}"
        options: dict[str, Any] = {"params": _bracketed(query)} if query else {}
        if operation.form:
            options |= {"data": _form(body), "files": {operation.form: ("lines.jsonl", file)}}
        elif operation.method in ("POST", "PUT") and body:
            options["json"] = body
        async with self._gate:
            answer = await (http or self._http).request(operation.method, path, **options)
        assert answer.status_code != 500, f"{operation.name} {body}: {answer.text}"
        return answer

    def _filled(self, body: dict[str, Any]) -> dict[str, Any]:
        """`body` with the ids that the set-up has made."""
        whole = json.dumps(body)
        for name, identity in self._ids.items():
            whole = whole.replace("{" + name + "}", identity)
        filled: dict[str, Any] = json.loads(whole)
        return filled


def _tried(body: dict[str, Any], operation: Operation, parameter: Parameter) -> tuple[str, ...]:
    """The names of what a request has beside the least: the parameter, and what it is of no use without."""
    return (parameter.top, *(name for name, value in body.items() if operation.base.get(name) != value))


def verdict_of(answer: httpx.Response, names: tuple[str, ...]) -> Verdict:
    """`names`: of the fields that a refusal may be about."""
    if answer.status_code < 400:
        return "honoured"
    error = _json(answer).get("error") or {}
    param = str(error.get("param") or "")
    if error.get("code") in NOWHERE or not param.startswith(names):
        return "missing"
    return "refused"


def _fields(operation: Operation, seen: set[str]) -> list[Row]:
    known = response_fields(operation.answers) if operation.answers else []
    known += [path for path in response_fields(operation.chunks) if path not in known] if operation.chunks else []
    return [Row(path, _seen(path, seen), why_excluded(operation.name, path)) for path in known]


def _seen(name: str, seen: set[str]) -> Verdict:
    return "honoured" if name in seen else "missing"


def _form(body: dict[str, Any]) -> dict[str, Any]:
    """Nested fields as forms have them: `a[b]`."""
    flat: dict[str, Any] = {}
    for name, value in body.items():
        if name == "file":
            continue
        flat |= {f"{name}[{key}]": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _bracketed(query: dict[str, Any]) -> dict[str, Any]:
    """As the package writes an object into a query: `metadata[key]=value`."""
    flat: dict[str, Any] = {}
    for name, value in query.items():
        entries = {f"{name}[{key}]": one for key, one in value.items()} if isinstance(value, dict) else {}
        flat |= entries or {name: value}
    return flat


def _json(answer: httpx.Response) -> dict[str, Any]:
    if not answer.headers.get("content-type", "").startswith("application/json"):
        return {}
    found = answer.json()
    return found if isinstance(found, dict) else {}


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        for line in answer.text.splitlines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def _paths(answer: httpx.Response) -> Iterator[str]:
    yield from seen_in(_json(answer))
    for event in _events(answer):
        yield from seen_in(event)
