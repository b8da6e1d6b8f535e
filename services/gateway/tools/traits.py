"""What a chat template can do, found out by rendering small conversations with it. Pure.

Templates do not say what they take: some show tools and some ignore them, most want a call's arguments as an object
and some as text, some fail on a message without content or on two calls at once.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from services.gateway.tools.families import family_of, reasoning_of, variant_of

if TYPE_CHECKING:
    from services.gateway.text.chat_template import ChatTemplate

_TOOL, _ARGUMENT, _VALUE, _RESULT = "probe_tool", "probe_argument", "probe_value", "probe_result"
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


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the template of a model, or of none."""

    tools: bool = False
    """It shows the tools that it is given."""
    calls: bool = False
    """It shows the calls of an assistant's message, and their results."""
    objects: bool = True
    """It wants a call's arguments as an object, not as JSON text."""
    null_content: bool = False
    """It takes an assistant's message whose content is null."""
    several: bool = False
    """It takes several calls in a message."""
    any_id: bool = True
    """It takes any id of a call; otherwise nine letters or digits, as Mistral's."""
    system: bool = True
    """It shows system messages."""
    family: str = ""
    """How the model writes calls, where the template shows it."""
    variant: str = ""
    """Which of the family's notations."""
    reasoning: str = ""
    variables: frozenset[str] = frozenset()
    """What it looks at beyond messages and tools, such as `enable_thinking`."""


def traits_of(template: "ChatTemplate") -> Traits:
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
        family=family,
        variant=variant_of(family, template.source),
        reasoning=reasoning_of(template.source),
        variables=template.variables,
    )


class _Probe:
    """Shows a call and its result to a template, in the ways that templates want it."""

    def __init__(self, template: "ChatTemplate") -> None:
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
        identities = [self.identity, self.identity[:-1] + "x"]
        return bool(self._render(self.content, identities, self._arguments))

    def _render(self, content: str | None, identities: Sequence[str], arguments: Any) -> str | None:
        calls = [
            {"id": identity, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
            for identity in identities
        ]
        messages: list[Mapping[str, Any]] = [
            _USER,
            {"role": "assistant", "content": content, "tool_calls": calls},
            *(
                {"role": "tool", "name": _TOOL, "tool_call_id": identity, "content": _RESULT}
                for identity in identities
            ),
        ]
        return self._template.tries(messages, _TOOLS)
