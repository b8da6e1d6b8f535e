"""Chat templates, rendered as transformers renders them: the same sandbox, filters and variables.

Reference: "Chat templates", transformers documentation. The template comes with the model's files; the
sandbox keeps it from reaching anything but the values it is given.

Templates do not say what they take: some show tools and some ignore them, most want a call's arguments as an object and
some as text, some fail on a message without content or on two calls at once. `traits_of` finds out by rendering small
conversations.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from services.gateway.core.errors import InvalidParameter
from services.gateway.tokenizer.templates import Span, TemplateInput, TemplateOptions, Templates, Traits, Turns
from services.gateway.tokenizer.turns import turns_of
from services.gateway.tool_calls.families import family_of, reasoning_of, variant_of
from services.gateway.tool_calls.parser import REASONING

_TOOL, _ARGUMENT, _VALUE, _RESULT = "probe_tool", "probe_argument", "probe_value", "probe_result"
_OTHER = "other_value"
LONG_ID, SHORT_ID = "call_0123456789abcdef01234567", "abcdef123"
_TEXT = "probe text"
_USER = {"role": "user", "content": _TEXT}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {_ARGUMENT: {"type": "string", "description": "d"}},
                "required": [_ARGUMENT],
            },
        },
    }
]
_OURS = frozenset(("messages", "tools", "add_generation_prompt"))
_MOST_OF_REASON = 1000
# What a template can raise: it is a program of others, given values of the client's.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the answer for training: see `ChatTemplate.render_marked`."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.mark = ""  # put before and behind such text; empty: nothing is

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{self.mark}{caller()}{self.mark}"


class ChatTemplate:
    """A compiled template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `jinja2.TemplateError` when `source` is no template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        self._generation: Any = environment.extensions[_GenerationTag.identifier]
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._template = environment.from_string(source)
        self._template.globals = dict(self._template.globals)  # jinja2 copies it for each text: of a chain, slowly
        self._special_tokens = dict(special_tokens)
        self.source = source
        parsed = environment.parse(source)
        undeclared = jinja2.meta.find_undeclared_variables(parsed)
        constants = (node.value for node in parsed.find_all(jinja2.nodes.Const))
        # The texts that it compares and looks up with.
        self.words = frozenset(value for value in constants if isinstance(value, str))
        # What it can be told beyond the conversation and its tools.
        self.variables = frozenset(undeclared - environment.globals.keys() - self._special_tokens.keys() - _OURS)
        marks = REASONING.get(reasoning_of(source))
        self.thought = ("", "") if marks is None else (marks.begin, marks.end)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions | None = None,
    ) -> str:
        """The prompt for the assistant's next message. Raises `InvalidParameter` when the template refuses."""
        options = options or TemplateOptions()
        try:
            text = self._render(TemplateInput(messages, tools, options))
        except _REFUSALS as error:
            raise InvalidParameter(
                f"The chat template of the model rejects these messages: {str(error)[:_MOST_OF_REASON]}.",
                param="messages",
                reason="invalid_messages",
            ) from None
        return _cut_behind(messages[-1].get("content"), text) if options.continue_final else text

    def render_marked(self, conversation: TemplateInput) -> tuple[str, list[Span]]:
        """As `render`, with the spans of the text that the template puts into `{% generation %}` blocks."""
        self._generation.mark = mark = f"\ue000{secrets.token_hex(12)}\ue000"  # nobody can send it
        try:
            parts = self.render(*conversation).split(mark)
        finally:
            self._generation.mark = ""
        ends = list(accumulate(map(len, parts)))
        return "".join(parts), [*zip(ends[0::2], ends[1::2], strict=False)]

    def tries(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """As `render`, and None when the template refuses."""
        try:
            return self._render(TemplateInput(messages, tools))
        except _REFUSALS:
            return None

    def _render(self, conversation: TemplateInput) -> str:
        messages, tools, options = conversation
        return self._template.render(
            {
                **self._special_tokens,
                "documents": None,
                **options.variables,
                "messages": [dict(message) for message in messages],
                "tools": None if tools is None else list(tools),
                "add_generation_prompt": options.add_generation_prompt,
            }
        )


def _cut_behind(last: object, text: str) -> str:
    """`text` up to the end of the conversation's `last` message, as transformers cuts it: a template may strip the
    message. Raises `InvalidParameter`."""
    start = text.rfind(last.strip()) if isinstance(last, str) else -1
    if not isinstance(last, str) or start < 0 or not last.strip():
        raise InvalidParameter(
            "Invalid value for 'continue_final_message': the chat template of the model does not render the last "
            "message verbatim; leave it out.",
            param="continue_final_message",
            reason="invalid_messages",
        )
    whole = last.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else last.strip())]


def compiled(templates: Templates) -> tuple[ChatTemplate, ChatTemplate]:
    """The template, and the one for conversations with tools. Raises ValueError where one is no template."""
    try:
        template = ChatTemplate(templates.source, templates.special_tokens)
        if templates.with_tools == templates.source:
            return template, template
        return template, ChatTemplate(templates.with_tools, templates.special_tokens)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(str(error)) from error


def traits_of(template: ChatTemplate) -> Traits:
    """Renders some ten conversations: milliseconds, once per model."""
    probe = _Probe(template)
    objects = probe.shows_call({_ARGUMENT: _VALUE}) and not probe.looks_like_python()
    calls = objects or probe.shows_call(f'{{"{_ARGUMENT}": "{_VALUE}"}}')
    system = template.tries([{"role": "system", "content": _RESULT}, _USER], None) or ""
    family = family_of(template.source)
    return Traits(
        tools=_TOOL in (template.tries([_USER], _TOOLS) or ""),
        calls=calls,
        objects=objects,
        null_content=probe.content is None,
        several=calls and probe.takes_two(),
        any_id=probe.identity == LONG_ID,
        system=_RESULT in system,
        pairs=_shows_pairs(template),
        family=family,
        variant=variant_of(family, template.source),
        reasoning=reasoning_of(template.source),
        variables=template.variables,
    )


def _shows_pairs(template: ChatTemplate) -> bool:
    """Templates that show whatever role there is do not know these two."""
    if not template.words.issuperset(("query", "document")):
        return False
    pair = [{"role": "query", "content": _TEXT}, {"role": "document", "content": _RESULT}]
    shown = template.tries(pair, None) or ""
    return _TEXT in shown and _RESULT in shown


class _Probe:
    """Shows a call and its result to a template, in the ways that templates want it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.identity = LONG_ID
        self.content: str | None = None
        self._shown = ""
        self._arguments: Any = None

    def shows_call(self, arguments: Any) -> bool:
        """Whether there is a content and an id with which the call and its result are shown; they are kept."""
        for identity in (LONG_ID, SHORT_ID):
            empty = self._render("", [identity], arguments)
            null = self._render(None, [identity], arguments)
            if null and empty and null.count("None") > empty.count("None"):
                null = None  # it shows Python's word for nothing
            shown = null or empty
            if shown and all(word in shown for word in (_TOOL, _ARGUMENT, _VALUE, _RESULT)):
                self.identity, self.content = identity, None if null else ""
                self._shown, self._arguments = shown, arguments
                return True
        return False

    def looks_like_python(self) -> bool:
        """Whether the object was shown in Python's notation: the template expects a text there."""
        return f"'{_ARGUMENT}': " in self._shown

    def takes_two(self) -> bool:
        """Whether two calls in a message are both shown: some templates pass over the second."""
        given = self._arguments
        other = {_ARGUMENT: _OTHER} if isinstance(given, dict) else given.replace(_VALUE, _OTHER)
        shown = self._render(self.content, [self.identity, self.identity[:-1] + "x"], given, other)
        return _OTHER in (shown or "")

    def _render(self, content: str | None, identities: Sequence[str], *arguments: Any) -> str | None:
        calls = [
            {"id": identity, "type": "function", "function": {"name": _TOOL, "arguments": given}}
            for identity, given in zip(identities, arguments, strict=True)
        ]
        messages: list[Mapping[str, Any]] = [
            _USER,
            {"role": "assistant", "content": content, "tool_calls": calls},
            *({"role": "tool", "name": _TOOL, "tool_call_id": identity, "content": _RESULT} for identity in identities),
        ]
        return self._template.tries(messages, _TOOLS)


class InProcess:
    """Renders in this process, without limits: for tests and benchmarks (else `template_process.py`)."""

    def __init__(self, templates: Templates) -> None:
        """Raises ValueError."""
        self._template, self._with_tools = compiled(templates)
        self.traits = traits_of(self._with_tools)

    async def render(self, conversation: TemplateInput, tenant: str = "") -> str:
        """Raises `InvalidParameter`."""
        return self._for(conversation).render(*conversation)

    async def turns(self, conversation: TemplateInput, trained: Sequence[int], tenant: str = "") -> list[Turns]:
        """Raises `InvalidParameter`."""
        return turns_of(self._for(conversation), conversation, trained)

    def _for(self, conversation: TemplateInput) -> ChatTemplate:
        return self._template if conversation.tools is None else self._with_tools


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # the server's local time, as templates expect
