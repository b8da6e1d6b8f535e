"""What of a request says how its answer's text must look, as a `Grammar`; and whether that grammar compiles.

    response_format      text | json_object | json_schema        OpenAI; structural_tag: vLLM
    structured_outputs   json | regex | choice | grammar | structural_tag    vLLM
    guided_json, guided_regex, guided_choice, guided_grammar     vLLM, older

At most one of them. What cannot be held to the letter is refused: nothing of a schema is left out silently.

All tenants share one compiler: they take turns (`shared/tasks.py`), at most so many waiting, of a tenant and of all,
each tenant with a share of the compiler's time.
"""

import asyncio
import hashlib
import operator
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from services.gateway.core.errors import InvalidParameter, RateLimited
from services.gateway.core.field_errors import missing
from services.gateway.intake.prompts.chat import ChatPlan
from services.gateway.intake.sampling.structural_tags import grammar_of_tags
from services.gateway.intake.schemas import (
    GUIDED,
    GenerationFields,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from services.gateway.tool_calls.closed_objects import closed
from services.gateway.tool_calls.grammar import (
    Calling,
    behind_reasoning,
    calls_or,
    required_calls,
    strict_calls,
)
from services.gateway.tool_calls.grammar_rules import NO_PARAMETERS
from services.gateway.tool_calls.parser import REASONING
from services.gateway.tool_calls.schemas import (
    CustomFunction,
)
from shared import limits
from shared.errors import QueueFull
from shared.grammars import ANY_OBJECT, CPU_SECONDS, GrammarCheck, GrammarVerdict
from shared.limits import GRAMMAR_SECONDS, GRAMMARS_WAITING, TENANT_GRAMMARS
from shared.messages import Grammar
from shared.messages.records import Parsing
from shared.tasks import RoundRobin

KEPT_VERDICTS = 256


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and what the client calls it."""

    grammar: Grammar
    param: str
    subject: str
    """What is wrong when the grammar is."""


def grammar_of_schema(schema: dict[str, Any]) -> Grammar:
    """Any JSON text that `schema` (JSON Schema) allows, its properties in the order of the schema's."""
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def grammar_of_choices(choices: Sequence[str]) -> Grammar:
    """One of these texts; none is empty."""
    return Grammar("regex", "|".join(map(_literal, dict.fromkeys(choices))))


def _literal(text: str) -> str:
    """The regular expression of `text` alone."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


_FORMS = ("response_format", "structured_outputs", *GUIDED)
_of_forms = operator.attrgetter(*_FORMS)
_NO_FORM = (None,) * len(_FORMS)


def wanted_by(request: GenerationFields, *, closes: bool = True) -> RequestedGrammar | None:
    """What `request` asks for; None: any text. `closes`: whether a schema's objects are closed where `request` does not
    say so. Raises `InvalidParameter`."""
    if _of_forms(request) == _NO_FORM:
        return None
    given = [name for name in _FORMS if _asks(request, name)]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidParameter(
            f"Invalid '{given[1]}': '{given[0]}' already sets the answer's form; send one of the two.",
            param=given[1],
        )
    if request.min_tokens:
        raise InvalidParameter(
            f"Unsupported parameter: 'min_tokens' is not supported with '{given[0]}', which says where the text "
            "may end; leave it out.",
            param="min_tokens",
            reason="unsupported_parameter",
        )
    [name] = given
    value = getattr(request, name)
    closes = closes_objects(request, usual=closes)
    if isinstance(value, ResponseFormat):
        wanted = _of_format(value, name, closes)
    elif isinstance(value, StructuredOutputs):
        wanted = _of_outputs(value, name, closes)
    else:
        wanted = _of_kind(name.removeprefix("guided_"), value, name)
    _check_size(len(wanted.grammar.text.encode()), wanted.param, wanted.subject)
    return _closed(wanted) if closes else wanted


def closes_objects(request: GenerationFields, *, usual: bool) -> bool:
    """Whether objects of schemas have no properties but those that are named; `usual`: where `request` says nothing."""
    return usual if request.close_objects is None else request.close_objects


def _closed(wanted: RequestedGrammar) -> RequestedGrammar:
    """With its objects closed, before it is recorded: whoever goes on with the text follows the same schema."""
    if wanted.grammar.kind != "json_schema" or wanted.grammar is ANY_OBJECT:
        return wanted
    try:
        schema = msgspec.json.decode(wanted.grammar.text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return wanted  # what is wrong with it is told where it is compiled
    if (narrower := closed(schema)) == schema:
        return wanted
    wanted = msgspec.structs.replace(wanted, grammar=grammar_of_schema(narrower))
    _check_size(len(wanted.grammar.text.encode()), wanted.param, wanted.subject)
    return wanted


def _asks(request: GenerationFields, name: str) -> bool:
    value = getattr(request, name, None)
    if isinstance(value, ResponseFormat):
        return value.type != "text"
    return value is not None


def _of_format(value: ResponseFormat, param: str, closes: bool) -> RequestedGrammar:
    if value.type == "structural_tag":
        return _of_tags(msgspec.structs.asdict(value), param, closes)
    if value.type == "json_object":
        return RequestedGrammar(ANY_OBJECT, param, f"Invalid '{param}'")
    if value.json_schema is None:
        raise missing(f"{param}.json_schema")
    return wanted_schema(value.json_schema, param, f"{param}.json_schema")


def wanted_schema(value: JsonSchemaFormat, param: str, path: str) -> RequestedGrammar:
    """A named schema of a client, which stands at `path` in its request. Raises `InvalidParameter`."""
    if value.schema is None:
        raise missing(f"{path}.schema")
    subject = f"Invalid schema for {param} '{value.name}'"
    return RequestedGrammar(grammar_of_schema(value.schema), param, subject)


def _of_outputs(value: StructuredOutputs, param: str, closes: bool) -> RequestedGrammar:
    fields = {name: item for name in value.__struct_fields__ if (item := getattr(value, name)) is not None}
    if fields.get("json_object") is False:
        del fields["json_object"]
    if len(fields) != 1:
        names = ", ".join(f"'{name}'" for name in value.__struct_fields__)
        raise InvalidParameter(
            f"Invalid '{param}': expected exactly one of {names}, but got {len(fields)}.",
            param=param,
        )
    [(kind, item)] = fields.items()
    if kind == "structural_tag":
        param = f"{param}.{kind}"
        return _of_tags(item if isinstance(item, dict) else _object_in(item, param), param, closes)
    return _of_kind(kind, item, f"{param}.{kind}")


def _of_tags(given: dict[str, Any], param: str, closes: bool) -> RequestedGrammar:
    """The grammar's size is bounded too, but one of megabytes takes long to make."""
    subject = f"Invalid '{param}'"
    _check_size(len(msgspec.json.encode(given)), param, subject)
    return RequestedGrammar(grammar_of_tags(given, param, closes=closes), param, subject)


def _object_in(text: str, param: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise InvalidParameter(
            f"Invalid '{param}': it is not a JSON object; send one, or its text.",
            param=param,
            reason="invalid_json",
        ) from None


def _of_kind(kind: str, value: Any, param: str) -> RequestedGrammar:
    """Of one of vLLM's fields, whose type is right."""
    subject = f"Invalid '{param}'"
    if kind == "json_object":
        return RequestedGrammar(ANY_OBJECT, param, subject)
    if kind == "json":
        grammar = Grammar("json_schema", value) if isinstance(value, str) else grammar_of_schema(value)
        return RequestedGrammar(grammar, param, subject)
    if kind == "choice":
        return RequestedGrammar(grammar_of_choices(_checked_choices(value, param)), param, subject)
    if not (value if kind == "regex" else value.strip()):
        raise _empty(param)
    return RequestedGrammar(Grammar("regex" if kind == "regex" else "lark", value), param, subject)


def _checked_choices(choices: list[str], param: str) -> list[str]:
    if (size := sum(map(len, choices))) > limits.GRAMMAR_BYTES.value:  # before a grammar is made of them
        raise InvalidParameter(
            f"Invalid '{param}': the texts have {size} characters together; send fewer or shorter ones "
            f"({limits.GRAMMAR_BYTES.cited()}).",
            param=param,
            reason="string_above_max_length",
        )
    if not all(choices):
        raise _empty(param)
    return choices


def _check_size(size: int, param: str, subject: str) -> None:
    if size > limits.GRAMMAR_BYTES.value:
        raise InvalidParameter(
            f"{subject}: it has {size} bytes; make it smaller ({limits.GRAMMAR_BYTES.cited()}).",
            param=param,
            reason="string_above_max_length",
        )


def _empty(param: str) -> InvalidParameter:
    return InvalidParameter(
        f"Invalid '{param}': empty string. Expected at least one character.",
        param=param,
        reason="empty_string",
    )


# --- whether it compiles -------------------------------------------------------------------------


class _Job(NamedTuple):
    """A grammar that somebody waits for."""

    tenant: str
    grammar: Grammar
    verdict: asyncio.Future[GrammarVerdict]


class Grammars:
    """Grammars of requests, each compiled once to see whether it can be; the verdicts are remembered. Tenants take
    turns."""

    def __init__(self) -> None:
        self._check = GrammarCheck()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._turns: GrammarTurns[_Job] = GrammarTurns()
        self._working: asyncio.Task[None] | None = None

    async def of(self, request: GenerationFields, tenant: str = "", *, closes: bool = True) -> Grammar | None:
        """What the answer to `request` must match; None: nothing. `closes`: as of `wanted_by`. Raises
        `InvalidParameter`, `QueueFull`, `RateLimited`."""
        wanted = wanted_by(request, closes=closes)
        return None if wanted is None else await self.checked(wanted, tenant)

    async def checked(
        self, wanted: RequestedGrammar, tenant: str = "", parts: Iterable[RequestedGrammar] = ()
    ) -> Grammar:
        """The grammar to send to a ring. `tenant`: whose turn and time it is; `parts`: of `wanted`. Raises
        `InvalidParameter` when it does not compile, of the part that does not, `QueueFull`, `RateLimited`."""
        if wanted.grammar is ANY_OBJECT:
            return ANY_OBJECT
        key = hashlib.sha256(msgspec.msgpack.encode(wanted.grammar)).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._ask(wanted.grammar, tenant)
            self._verdicts[key] = verdict
            if len(self._verdicts) > KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict.grammar is None:
            for part in parts:
                await self.checked(part, tenant)
            raise InvalidParameter(
                f"{wanted.subject}: {verdict.problem}.", param=wanted.param, reason="invalid_grammar"
            )
        return verdict.grammar

    async def _ask(self, grammar: Grammar, tenant: str) -> GrammarVerdict:
        job = _Job(tenant, grammar, asyncio.get_running_loop().create_future())
        self._turns.add(tenant, job, time.monotonic())
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await job.verdict

    async def _work(self) -> None:
        """Compiles what waits, one after the other."""
        loop = asyncio.get_running_loop()
        while (job := self._turns.next()) is not None:
            if job.verdict.done():  # whoever waited has gone
                continue
            began = time.monotonic()
            try:
                verdict = await loop.run_in_executor(self._thread, self._check.check, job.grammar)
            except BaseException:
                if not job.verdict.done():
                    job.verdict.cancel()
                raise
            now = time.monotonic()
            self._turns.spent(
                job.tenant, min(now - began, CPU_SECONDS), now
            )  # a busy machine is not its fault
            if not job.verdict.done():
                job.verdict.set_result(verdict)

    async def stop(self) -> None:
        """Ends the process that compiles."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._check.interrupt()
        self._thread.shutdown()
        self._check.close()


MINUTE = 60.0

Job = TypeVar("Job")


class GrammarTurns(Generic[Job]):
    """Jobs of tenants that wait, and the seconds that each tenant's have taken within the last minute."""

    def __init__(self) -> None:
        self._turns: RoundRobin[Job] = RoundRobin()
        self._spent: dict[str, deque[tuple[float, float]]] = {}
        """By tenant: when a job ended, and the seconds that it took."""

    def add(self, tenant: str, job: Job, now: float) -> None:
        """`now`: seconds of any steady clock. Raises `QueueFull` where too many wait, `RateLimited` where the
        tenant's have taken too long."""
        for limit, count in ((GRAMMARS_WAITING, self.waiting), (TENANT_GRAMMARS, self._turns.of(tenant))):
            if count >= limit.value:
                raise QueueFull(
                    f"{count} new schemas and grammars wait to be compiled; try again in a moment ({limit.cited()}).",
                    retry_after=1,
                )
        if wait := self._until_free(tenant, now):
            raise RateLimited(
                "Your schemas and grammars took too long to compile within a minute; use those that were compiled "
                f"before, or try again in {wait:.0f} s ({GRAMMAR_SECONDS.cited()}).",
                kind="requests",
                wait=wait,
            )
        self._turns.add(tenant, job)

    def next(self) -> Job | None:
        """The job whose turn it is; None: none waits."""
        return self._turns.next()

    @property
    def waiting(self) -> int:
        return len(self._turns)

    def spent(self, tenant: str, seconds: float, now: float) -> None:
        """A job of `tenant` took `seconds` and has ended `now`."""
        self._forget(now)
        self._spent.setdefault(tenant, deque()).append((now, seconds))

    def _until_free(self, tenant: str, now: float) -> float:
        """Seconds until it has time left; 0: it has some."""
        self._forget(now)
        spent = self._spent.get(tenant, ())
        over = sum(seconds for _, seconds in spent) - GRAMMAR_SECONDS.value
        for ended, seconds in spent:
            if over < 0:
                break
            over -= seconds
            if over < 0:
                return ended + MINUTE - now
        return 0.0

    def _forget(self, now: float) -> None:
        for tenant in list(self._spent):
            spent = self._spent[tenant]
            while spent and spent[0][0] <= now - MINUTE:
                spent.popleft()
            if not spent:
                del self._spent[tenant]


# --- with tools and reasoning ---------------------------------------------------------------------


def demanded(
    plan: ChatPlan,
    parsing: Parsing | None,
    answer: RequestedGrammar | None,
    specials: Mapping[str, int],
    *,
    closes: bool = True,
) -> RequestedGrammar | None:
    """What is to be checked and sent to the ring; None: any text. `answer`: what the client says of the format.
    `specials`: ids of the special tokens among the markers; `closes`: whether objects among arguments are closed.
    Raises `InvalidParameter`."""
    if parsing is None:
        return answer
    reasoning, opened = parsing.reasoning, parsing.opened
    if not plan.family:
        if answer is None or not (opened or _begins_with_marks(answer, reasoning)):
            return answer
        return _as(answer, behind_reasoning(answer.grammar, reasoning, specials, opened=opened))
    calling = Calling(plan.family, plan.variant, plan.asked.functions, plan.single, specials, closes)
    if plan.asked.required:
        grammar = required_calls(calling, reasoning, opened=opened)
    elif answer is not None:
        return _as(answer, calls_or(calling, answer.grammar, reasoning, opened=opened))
    elif (strict := strict_calls(calling, reasoning, opened=opened)) is not None:
        grammar = strict
    else:
        return None
    name = "functions" if plan.asked.legacy else "tools"
    return _small_enough(RequestedGrammar(grammar, name, f"Invalid '{name}'"))


def _begins_with_marks(answer: RequestedGrammar, reasoning: str) -> bool:
    """Whether the model writes something before `answer`, which a grammar can have before it."""
    return bool(REASONING[reasoning].before_answer) and answer.grammar.kind in ("json_schema", "regex")


def schemas_of(plan: ChatPlan) -> Iterator[RequestedGrammar]:
    """The schema of each function alone: which of them does not compile."""
    if not plan.family:
        return
    path = "functions[{}].parameters" if plan.asked.legacy else "tools[{}].function.parameters"
    for index, function in enumerate(plan.asked.shown):
        schema = {"type": "object", **(function.parameters or NO_PARAMETERS)}
        where, what = path.format(index), f"Invalid schema for function '{function.name}'"
        if isinstance(function, CustomFunction):
            where, what = (
                f"tools[{index}].custom.format",
                f"Invalid format of the custom tool '{function.name}'",
            )
        yield RequestedGrammar(grammar_of_schema(schema), where, what)


def _as(wanted: RequestedGrammar, grammar: Grammar) -> RequestedGrammar:
    return _small_enough(RequestedGrammar(grammar, wanted.param, wanted.subject))


def _small_enough(wanted: RequestedGrammar) -> RequestedGrammar:
    size = len(wanted.grammar.text.encode())
    if size > limits.GRAMMAR_BYTES.value:
        raise InvalidParameter(
            f"{wanted.subject}: as a grammar it has {size} bytes; send fewer or smaller schemas "
            f"({limits.GRAMMAR_BYTES.cited()}).",
            param=wanted.param,
            reason="string_above_max_length",
        )
    return wanted
