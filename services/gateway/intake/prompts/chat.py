"""What becomes of a chat request: the prompt for its template, how the answer is read, and which grammar it must match.

The same for answers, for counting and for tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from services.gateway.core.errors import InvalidField, InvalidParameter, missing, too_deep, unsupported
from services.gateway.intake.prompts.conversation import (
    DEFAULT_FAMILY,
    functions_for_template,
    ignored_by_template,
    instructions,
    messages_for_template,
    template_options,
    with_instructions,
)
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.intake.validation import LEAST_TRUNCATED, check_characters, check_text, check_type
from services.gateway.tokenizer.templates import TemplateOptions, Traits
from services.gateway.tokenizer.tokenizer import Rendered, Tokenizer
from services.gateway.tool_calls.families import FAMILIES, NONE, parser_named, reasoning_named
from services.gateway.tool_calls.parser import REASONING
from services.gateway.tool_calls.schemas import (
    CustomFunction,
    CustomTool,
    FunctionDefinition,
    FunctionName,
    Tool,
    ToolChoice,
    ToolName,
    types_of,
)
from shared import limits
from shared.grammars import inexact
from shared.messages import ModelCard
from shared.messages.records import Parsing

AUTO = "auto"


class NamesModel(Protocol):
    @property
    def model(self) -> str: ...


# --- tools ----------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What a request wants of tools."""

    functions: tuple[FunctionDefinition, ...] = ()  # those that may be called now
    shown: tuple[FunctionDefinition, ...] = ()  # those that the model is told of
    required: bool = False  # at least one call, and nothing else
    named: bool = False  # the one function was demanded by its name
    single: bool = False
    legacy: bool = False


_NOTHING = Asked()


def asked_of(request: ChatCompletionRequest) -> Asked:
    """Raises `InvalidParameter` for the first thing wrong with tools, `tool_choice` or their older names."""
    if request.functions is not None or request.function_call is not None:
        return _asked_of_functions(request)
    functions = _functions_of(request.tools) if request.tools else ()
    choice = request.tool_choice
    if isinstance(choice, ToolChoice):
        return _asked_by_choice(functions, choice, single=request.parallel_tool_calls is False)
    if choice == "required" and not functions:
        raise _only_with("tool_choice", "tools")
    if choice == "none" or not functions:
        return _NOTHING
    single = request.parallel_tool_calls is False
    return Asked(functions, functions, required=choice == "required", single=single)


def _functions_of(tools: Sequence[Tool]) -> tuple[FunctionDefinition, ...]:
    functions = [_function_of(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    _check_functions(functions, "tools[{}].function")
    return tuple(functions)


def _function_of(tool: Tool, path: str) -> FunctionDefinition:
    check_type(path, tool, "tool")
    if tool.custom is not None:
        return _custom_function(tool.custom, f"{path}.custom")
    assert tool.function is not None, "it was checked"
    return tool.function


def _custom_function(tool: CustomTool, path: str) -> CustomFunction:
    form = tool.format
    if form is not None and form.type == "grammar":
        if form.grammar is None:
            raise missing(f"{path}.format.grammar")
        if form.grammar.syntax != "regex":
            raise InvalidParameter(
                f"Unsupported value: '{path}.format' is a grammar in Lark's notation, and models write the input of a "
                "tool as a JSON text, which such a grammar does not describe; give it as a 'regex', or as text.",
                param=f"{path}.format.grammar.syntax",
                reason="unsupported_parameter",
            )
    elif form is not None and form.grammar is not None:
        raise unsupported(f"{path}.format.grammar", "its format is of type 'text'")
    return CustomFunction.of(tool)


def _check_functions(functions: Sequence[FunctionDefinition], path: str) -> None:
    """`path`: of one of them, with `{}` where its index belongs."""
    seen: dict[str, int] = {}
    for index, function in enumerate(functions):
        place = f"tools[{index}].custom" if isinstance(function, CustomFunction) else path.format(index)
        if function.name in seen:
            first = path.format(seen[function.name])
            raise InvalidField(
                f"{place}.name",
                f"'{function.name}' is the name of '{first}' already; use a different name for each function.",
            )
        seen[function.name] = index
        _check_parameters(f"{place}.parameters", function)
        if function.output_schema is not None and too_deep(function.output_schema):
            what = f"it is nested too deeply ({limits.NESTING.cited()})"
            raise _wrong_schema(f"{place}.output_schema", function, what)


def _check_parameters(path: str, function: FunctionDefinition) -> None:
    schema = function.parameters
    if not schema:
        return
    if too_deep(schema):
        raise _wrong_schema(path, function, f"it is nested too deeply ({limits.NESTING.cited()})")
    if (number := inexact(schema)) is not None:
        raise _wrong_schema(path, function, f"{number} is a whole number beyond 2^53, which cannot be held exactly")
    kind = schema.get("type", "object")
    if kind != "object":
        raise _wrong_schema(path, function, f"schema must be a JSON Schema of 'type: \"object\"', got {kind!r}")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(value, dict | bool) for value in properties.values()):
        raise _wrong_schema(path, function, "'properties' must be an object with a schema for each name")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _wrong_schema(path, function, "'required' must be an array of names")


def _wrong_schema(path: str, function: FunctionDefinition, what: str) -> InvalidParameter:
    return InvalidParameter(
        f"Invalid schema for function '{function.name}': {what}.", param=path, reason="invalid_function_parameters"
    )


def _asked_by_choice(functions: tuple[FunctionDefinition, ...], choice: ToolChoice, *, single: bool) -> Asked:
    if not functions:
        raise _only_with("tool_choice", "tools")
    if choice.type in ("function", "custom"):
        one = choice.custom if choice.type == "custom" else choice.function
        if one is None:
            raise missing(f"tool_choice.{choice.type}")
        picked = _picked(functions, [(choice.type, one.name)], f"tool_choice.{choice.type}.name")
        return Asked(picked, functions, required=True, named=True, single=True)
    allowed = choice.allowed_tools
    if allowed is None:
        raise missing("tool_choice.allowed_tools")
    names = [_allowed_name(index, tool) for index, tool in enumerate(allowed.tools)]
    picked = _picked(functions, names, "tool_choice.allowed_tools.tools")
    return Asked(picked, functions, required=allowed.mode == "required", single=single)


def _allowed_name(index: int, tool: ToolName) -> tuple[str, str]:
    path = f"tool_choice.allowed_tools.tools[{index}]"
    if tool.named is None:
        raise missing(f"{path}.{tool.type}")
    return tool.type, tool.named.name


def _picked(
    functions: tuple[FunctionDefinition, ...], wanted: Sequence[tuple[str, str]], path: str
) -> tuple[FunctionDefinition, ...]:
    """`wanted`: by kind and name."""
    known = {(_kind(function), function.name) for function in functions}
    for kind, name in wanted:
        if (kind, name) not in known:
            raise InvalidParameter(f"Tool choice '{name[:64]}' not found in 'tools' parameter.", param=path)
    return tuple(function for function in functions if (_kind(function), function.name) in wanted)


def _kind(function: FunctionDefinition) -> str:
    return "custom" if isinstance(function, CustomFunction) else "function"


def _asked_of_functions(request: ChatCompletionRequest) -> Asked:
    """`functions` and `function_call`, which OpenAI had before tools."""
    for name in ("tools", "tool_choice"):
        if getattr(request, name):
            raise InvalidParameter(
                f"Invalid value for '{name}': it cannot be combined with 'functions' or 'function_call'; "
                "use 'tools' and 'tool_choice' alone.",
                param=name,
            )
    functions = tuple(request.functions or ())
    _check_functions(functions, "functions[{}]")
    choice = request.function_call
    if not isinstance(choice, FunctionName):
        if choice == "none" or not functions:
            return Asked()
        return Asked(functions, functions, single=True, legacy=True)
    if not functions:
        raise _only_with("function_call", "functions")
    picked = _picked(functions, [("function", choice.name)], "function_call.name")
    return Asked(picked, functions, required=True, named=True, single=True, legacy=True)


def _only_with(name: str, other: str) -> InvalidParameter:
    return InvalidParameter(
        f"Invalid value for '{name}': '{name}' is only allowed when '{other}' are specified.", param=name
    )


# --- the plan ------------------------------------------------------------------------------------


class ChatPlan(msgspec.Struct, frozen=True):
    """A chat request, ready to be rendered."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: TemplateOptions
    asked: Asked
    family: str  # whose parser and grammar it is; "" without tools
    variant: str
    single: bool  # one call at most: the client wants no more, or the template takes no more
    reasoning: str
    ignored: tuple[str, ...] = ()  # fields of the request that the template does not look at

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
        raise unsupported(name, "its tool parser is turned off", where="with this model")
    if asked.required and request.min_tokens:
        raise unsupported("min_tokens", where="where a tool call is demanded")
    known = bool(traits.family or parser_named(card.tool_parser))
    native_calls = traits.calls and known
    native_tools = traits.tools and known
    messages = messages_for_template(
        request.messages, traits, native=native_calls, family=traits.family if native_tools else ""
    )
    family = ""
    if asked.functions:
        own = traits.family if native_calls or native_tools else DEFAULT_FAMILY
        family = parser_named(card.tool_parser) or own
    if family and not native_tools:
        messages = with_instructions(messages, instructions(asked.shown, FAMILIES[family].form), traits)
    return ChatPlan(
        messages=messages,
        tools=functions_for_template(asked.shown) if family and native_tools else None,
        options=template_options(request, traits),
        asked=asked,
        family=family,
        variant=traits.variant if family == traits.family else "",
        single=asked.single or (native_calls and not traits.several),
        reasoning=reasoning_of(card, traits),
        ignored=ignored_by_template(request, traits),
    )


def reasoning_of(card: ModelCard, traits: Traits) -> str:
    """How the model writes its reasoning; empty: it does not reason."""
    return traits.reasoning if card.reasoning_parser == AUTO else reasoning_named(card.reasoning_parser)


class Planned(NamedTuple):
    plan: ChatPlan
    prompt: Rendered


async def rendered(
    request: ChatCompletionRequest, card: ModelCard, tokenizer: Tokenizer, prompt_limit: int | None = None
) -> Planned:
    """A request that was checked, in the model's own form. `prompt_limit`: tokens that it may have at most, 0: what the
    context has; None: it is not generated from. Raises `InvalidParameter`, `ContextLengthExceeded`, `QueueFull`."""
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
    prompt = await tokenizer.render_chat(plan.messages, plan.tools, plan.options)
    if prompt_limit is not None:
        cut = request.truncate_prompt_tokens is not None
        check_text("messages", prompt.text, card, tokenizer, prompt_limit, cut=cut)
    return Planned(plan, prompt)
