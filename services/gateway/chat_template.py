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
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for the assistant's next message. Raises `InvalidParameter` when the template refuses."""
        try:
            return self._render(messages, tools, variables or {})
        except _REFUSALS as error:
            raise InvalidParameter(
                f"The chat template of the model does not take these messages: {error}.",
                param="messages",
                reason="invalid_messages",
            ) from None

    def tries(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> str | None:
        """As `render`, and None when the template refuses."""
        try:
            return self._render(messages, tools, {})
        except _REFUSALS:
            return None

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        return self._template.render(
            {
                **self._special_tokens,
                "documents": None,
                **variables,
                "messages": [dict(message) for message in messages],
                "tools": None if tools is None else list(tools),
                "add_generation_prompt": True,
            }
        )


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
