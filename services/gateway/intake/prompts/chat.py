"""What becomes of a chat request: the prompt for its template, how the answer is read, and which grammar it must match.

The same for answers, for counting and for tokens.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from services.gateway.core.errors import InvalidParameter
from services.gateway.core.field_errors import too_deep
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.prompts.conversation import (
    DEFAULT_FAMILY,
    functions_for_template,
    instructions,
    messages_for_template,
    with_instructions,
)
from services.gateway.intake.prompts.tools import Asked, asked_of
from services.gateway.intake.sampling.structured_output import (
    RequestedGrammar,
    closes_objects,
    grammar_of_schema,
    wanted_by,
)
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.intake.validation import LEAST_TRUNCATED, check_characters, check_text
from services.gateway.tokenizer.templates import TemplateOptions, Traits
from services.gateway.tokenizer.tokenizer import Rendered, Tokenizer
from services.gateway.tool_calls.families import FAMILIES, NONE, markers_of, parser_named, reasoning_named
from services.gateway.tool_calls.grammar import (
    Calling,
    behind_reasoning,
    calls_or,
    required_calls,
    strict_calls,
)
from services.gateway.tool_calls.grammar_rules import NO_PARAMETERS
from services.gateway.tool_calls.parser import REASONING
from services.gateway.tool_calls.schemas import CustomFunction, types_of
from shared import limits
from shared.messages import Grammar, ModelCard
from shared.messages.records import Parsing

T = TypeVar("T")
AUTO = "auto"
SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates turn reasoning on and off."""
_RESERVED = ("messages", "tools", "add_generation_prompt")


class NamesModel(Protocol):
    @property
    def model(self) -> str: ...


class ChatPlan(msgspec.Struct, frozen=True):
    """A chat request, ready to be rendered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: TemplateOptions
    asked: Asked
    family: str
    """Whose parser and grammar it is; "" without tools."""
    variant: str
    single: bool
    """One call at most: the client wants no more, or the template takes no more."""
    reasoning: str
    ignored: tuple[str, ...] = ()
    """Fields of the request that the template does not look at."""

    def parsing(self, prompt: str) -> Parsing | None:
        """For the record; `prompt` is the rendered one. None: the text is the answer as it stands."""
        if not self.family and not self.reasoning:
            return None
        opened = bool(self.reasoning) and REASONING[self.reasoning].opened_by(prompt)
        asked = self.asked
        return Parsing(
            tools=self.family,
            types={function.name: types_of(function.parameters or {}) for function in asked.functions}
            if self.family
            else {},
            single=asked.single,
            named=asked.named,
            legacy=asked.legacy,
            reasoning=self.reasoning,
            opened=opened,
            custom=[function.name for function in asked.functions if isinstance(function, CustomFunction)],
        )


def plan_of(request: ChatCompletionRequest, card: ModelCard, traits: Traits) -> ChatPlan:
    """Raises `InvalidParameter`."""
    asked = asked_of(request)
    if asked.functions and card.tool_parser == NONE:
        name = "functions" if asked.legacy else "tools"
        raise InvalidParameter(
            f"Unsupported parameter: '{name}' is not supported with this model; its tool parser is turned off.",
            param=name,
            reason="unsupported_parameter",
        )
    if asked.required and request.min_tokens:
        raise InvalidParameter(
            "Unsupported parameter: 'min_tokens' is not supported where a tool call is demanded; leave it out.",
            param="min_tokens",
            reason="unsupported_parameter",
        )
    known = bool(traits.family or parser_named(card.tool_parser))
    native_calls = traits.calls and known
    native_tools = traits.tools and known
    messages = messages_for_template(
        request.messages, traits, native=native_calls, family=traits.family if native_tools else ""
    )
    family = _family(card, traits, native_calls or native_tools) if asked.functions else ""
    if family and not native_tools:
        messages = with_instructions(messages, instructions(asked.shown, FAMILIES[family].form), traits)
    return ChatPlan(
        messages=messages,
        tools=functions_for_template(asked.shown) if family and native_tools else None,
        options=_options(request, traits),
        asked=asked,
        family=family,
        variant=traits.variant if family == traits.family else "",
        single=asked.single or (native_calls and not traits.several),
        reasoning=reasoning_of(card, traits),
        ignored=_ignored(request, traits),
    )


def _ignored(request: ChatCompletionRequest, traits: Traits) -> tuple[str, ...]:
    if request.chat_template_kwargs is None and request.reasoning_effort is None:
        return ()
    given = request.chat_template_kwargs or {}
    ignored = tuple(f"chat_template_kwargs.{name}" for name in given if name not in traits.variables)
    without_effort = request.reasoning_effort and not _effort(request.reasoning_effort, traits)
    return (*ignored, "reasoning_effort") if without_effort else ignored


def _family(card: ModelCard, traits: Traits, native: bool) -> str:
    return parser_named(card.tool_parser) or (traits.family if native else DEFAULT_FAMILY)


def reasoning_of(card: ModelCard, traits: Traits) -> str:
    """How the model writes its reasoning; empty: it does not reason."""
    return traits.reasoning if card.reasoning_parser == AUTO else reasoning_named(card.reasoning_parser)


def switched(traits: Traits, *, on: bool) -> dict[str, Any]:
    """The field of a request with which the model's template turns its reasoning on or off; none: it has no switch."""
    switches = {name: on for name in SWITCHES if name in traits.variables}
    return {"chat_template_kwargs": switches} if switches else {}


_OPTIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "verbosity",
)
_of_options = operator.attrgetter(*_OPTIONS)
_NO_OPTIONS = (None,) * len(_OPTIONS)
_USUAL = TemplateOptions()


def _options(request: ChatCompletionRequest, traits: Traits) -> TemplateOptions:
    if _of_options(request) == _NO_OPTIONS:
        return _USUAL
    continues = bool(request.continue_final_message)
    asked = request.add_generation_prompt
    return TemplateOptions(
        add_generation_prompt=not continues if asked is None else asked,
        continue_final=continues,
        variables=_variables(request, traits),
    )


def _variables(request: ChatCompletionRequest, traits: Traits) -> dict[str, Any]:
    """`chat_template_kwargs`, and what `reasoning_effort` and `verbosity` mean for the template. What it does not look
    at is in `ChatPlan.ignored`."""
    given = request.chat_template_kwargs or {}
    for name in given:
        if name in _RESERVED:
            raise InvalidParameter(
                f"Unsupported parameter: 'chat_template_kwargs.{name}' is set by other fields of the request; leave "
                "it out.",
                param="chat_template_kwargs",
                reason="unsupported_parameter",
            )
        if too_deep(given[name]):
            raise InvalidParameter(
                f"Invalid 'chat_template_kwargs.{name}': it is nested too deeply ({limits.NESTING.cited()}).",
                param="chat_template_kwargs",
            )
    looked_at = {name: value for name, value in given.items() if name in traits.variables}
    return _effort(request.reasoning_effort, traits) | _verbosity(request.verbosity, traits) | looked_at


def _effort(effort: str | None, traits: Traits) -> dict[str, Any]:
    """None where the template does not look at it: it is in `ChatPlan.ignored` then."""
    if effort is None:
        return {}
    if "reasoning_effort" in traits.variables:
        return {"reasoning_effort": effort}
    return next(({name: effort != "none"} for name in SWITCHES if name in traits.variables), {})


def _verbosity(verbosity: str | None, traits: Traits) -> dict[str, Any]:
    if verbosity is not None and "verbosity" in traits.variables:
        return {"verbosity": verbosity}
    if verbosity in (None, "medium"):
        return {}
    raise InvalidParameter(
        "Unsupported parameter: 'verbosity' is not supported by this server; this model's chat template has none; "
        "leave it out.",
        param="verbosity",
        reason="unsupported_parameter",
    )


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


class PreparedChat(NamedTuple):
    """A chat in the model's own form, and what its answer must be."""

    prompt: Rendered
    parsing: Parsing | None
    """How the answer is read; None: it is the text as it stands."""
    wanted: RequestedGrammar | None
    """What the answer must match; None: nothing."""
    schemas: Iterator[RequestedGrammar]
    """The parts of `wanted` that came from functions, each alone."""
    ignored: tuple[str, ...]


async def prepared(
    request: ChatCompletionRequest, card: ModelCard, tokenizer: Tokenizer, settings: GatewaySettings
) -> PreparedChat:
    """Raises as `rendered`."""
    closes = closes_objects(request, usual=settings.close_objects)
    answer = wanted_by(request, closes=closes)
    plan, prompt = await rendered(request, card, tokenizer)
    cut = request.truncate_prompt_tokens is not None
    check_text("messages", prompt.text, card, tokenizer, settings.prompt_limit, cut=cut)
    parsing = plan.parsing(prompt.text)
    if parsing is not None:
        specials = tokenizer.specials(markers_of(parsing))
        answer = demanded(plan, parsing, answer, specials, closes=closes)
    return PreparedChat(prompt, parsing, answer, schemas_of(plan), plan.ignored)


class Planned(NamedTuple):
    plan: ChatPlan
    prompt: Rendered


async def rendered(request: ChatCompletionRequest, card: ModelCard, tokenizer: Tokenizer) -> Planned:
    """A request that was checked, in the model's own form. Raises `InvalidParameter`, `ContextLengthExceeded`,
    `QueueFull`."""
    plan = plan_of(request, card, tokenizer.traits)
    characters = 0
    for message in plan.messages:
        content = message.get("content") or ""
        if isinstance(content, str):
            characters += len(content)
        else:
            characters += sum([len(part.get("text") or "") for part in content])
    if characters > LEAST_TRUNCATED:
        check_characters(characters, card)
    return Planned(plan, await tokenizer.render_chat(plan.messages, plan.tools, plan.options))
