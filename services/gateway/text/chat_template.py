"""Chat templates, rendered as transformers renders them: the same sandbox, filters and variables.

Reference: "Chat templates", transformers documentation. The template comes with the model's files; the
sandbox keeps it from reaching anything but the values it is given.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from services.gateway.errors import InvalidParameter

_OURS = frozenset(("messages", "tools", "add_generation_prompt"))
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template can raise: it is a program of others, given values of the client's."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the answer for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateOptions(msgspec.Struct, frozen=True):
    """How a conversation is rendered."""

    add_generation_prompt: bool = True
    """Whether the prompt ends with the header of the assistant's next message."""
    continue_final: bool = False
    """Whether it ends within the last message, which the answer goes on with."""
    variables: dict[str, Any] = {}
    """Further variables of the template."""


class ChatTemplate:
    """A compiled template with the model's special tokens."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `jinja2.TemplateError` when `source` is no template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self.source = source
        undeclared = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.variables = frozenset(
            undeclared - environment.globals.keys() - self._special_tokens.keys() - _OURS
        )
        """What it can be told beyond the conversation and its tools."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions | None = None,
    ) -> str:
        """The prompt for the assistant's next message. Raises `InvalidParameter` when the template refuses."""
        options = options or TemplateOptions()
        try:
            text = self._render(messages, tools, options)
        except _REFUSALS as error:
            raise InvalidParameter(
                f"The chat template of the model does not take these messages: {error}.",
                param="messages",
                reason="invalid_messages",
            ) from None
        return _cut_behind(messages[-1].get("content"), text) if options.continue_final else text

    def tries(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str | None:
        """As `render`, and None when the template refuses."""
        try:
            return self._render(messages, tools, TemplateOptions())
        except _REFUSALS:
            return None

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: TemplateOptions,
    ) -> str:
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
            "Invalid value for 'continue_final_message': the chat template of the model does not show the last message "
            "as it is; leave it out.",
            param="continue_final_message",
            reason="invalid_messages",
        )
    whole = last.lstrip()
    return text[: start + len(whole if text.startswith(whole, start) else last.strip())]


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The `..._token` entries of tokenizer_config.json: texts, or objects that hold one as `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def template_source(
    files: Mapping[str, bytes], config: Mapping[str, Any], name: str = "default"
) -> str | None:
    """The template among a model's files, or None: chat_template.jinja, else in tokenizer_config.json.

    Where there are several by `name`, the one for conversations with tools is `tool_use`."""
    if name == "default" and "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get(name)
    elif name != "default":
        source = None
    return source if isinstance(source, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter it does not escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # the server's local time, as templates expect
