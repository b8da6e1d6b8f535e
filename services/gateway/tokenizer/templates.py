"""Chat templates as they lie among a model's files, and what they can do. Pure, and without jinja2."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from shared.limits import TOKENIZER_INFO


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the template of a model, or of none."""

    tools: bool = False  # it shows the tools that it is given
    calls: bool = False  # it shows the calls of an assistant's message, and their results
    objects: bool = True  # it wants a call's arguments as an object, not as JSON text
    null_content: bool = False  # it takes an assistant's message whose content is null
    several: bool = False  # it takes several calls in a message
    any_id: bool = True  # it takes any id of a call; otherwise nine letters or digits, as Mistral's
    system: bool = True  # it shows system messages
    pairs: bool = False  # it shows a query and a document, as messages of these two roles: it is a reranker's
    family: str = ""  # how the model writes calls, where the template shows it
    variant: str = ""  # which of the family's notations
    reasoning: str = ""
    # What it looks at beyond messages and tools, such as `enable_thinking`.
    variables: frozenset[str] = frozenset()


_TEMPLATE = "chat_template.jinja"
_AROUND = 8  # bytes around a member of a JSON object, at most
_NAMED = 16  # fields that are named where they are left out


class TemplateOptions(msgspec.Struct, frozen=True):
    """How a conversation is rendered."""

    # Whether the prompt ends with the header of the assistant's next message.
    add_generation_prompt: bool = True
    continue_final: bool = False  # whether it ends within the last message, which the answer goes on with
    variables: dict[str, Any] = {}  # further variables of the template


class TemplateInput(NamedTuple):
    """As a template gets it."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    options: TemplateOptions = TemplateOptions()


Span = tuple[int, int]  # of characters: the first one, and the one behind the last


class Turns(msgspec.Struct, frozen=True):
    """A conversation up to its last trained message, as its template shows it."""

    text: str
    spans: list[Span]  # what is trained, in order
    # What a prompt for a trained message ends with, and the text does not show before the message: serving puts it
    # there.
    unlike_prompt: str = ""


class Templates(msgspec.Struct, frozen=True):
    """The chat templates of a model, not compiled yet."""

    source: str
    with_tools: str  # for conversations with tools; the same where there is no other
    special_tokens: dict[str, str] = {}


class Renderer(Protocol):
    """Makes prompts of conversations, with the templates of one model."""

    @property
    def traits(self) -> Traits: ...

    async def render(self, conversation: TemplateInput, tenant: str = "") -> str:
        """The prompt, in the turn of `tenant`. Raises `InvalidParameter`, `QueueFull`."""
        ...

    async def turns(self, conversation: TemplateInput, trained: Sequence[int], tenant: str = "") -> list[Turns]:
        """See `turns_of`. Raises `InvalidParameter`, `QueueFull`."""
        ...


def templates_of(files: Mapping[str, bytes]) -> Templates | None:
    """None: there are none. Raises ValueError where a file is none of its kind."""
    config = _read(files, "tokenizer_config.json")
    source, with_tools = _source(files, config), _source(files, config, "tool_use")
    if not source:
        return None
    # The map is of versions that did not write that, as transformers has it.
    if "added_tokens_decoder" not in config:
        config |= _read(files, "special_tokens_map.json")
    return Templates(source, with_tools or source, _special_tokens(config))


# What tokenizer_config.json says of where the files lay when it was written.
_OF_ITS_PLACE = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "auto_map")


def tokenizer_info(files: Mapping[str, bytes]) -> bytes:
    """A tokenizer's configuration as JSON, as vLLM shows it: tokenizer_config.json, with the chat template where that
    is a file of its own. Of one that is too large its largest fields are left out and named in `omitted_fields`."""
    config = _read(files, "tokenizer_config.json")
    info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    info |= {name: value for name, value in config.items() if name not in _OF_ITS_PLACE and value is not None}
    if (source := _source(files, config)) is not None and _TEMPLATE in files:
        info["chat_template"] = source
    sizes = {name: len(msgspec.json.encode(value)) + len(name) for name, value in info.items()}
    size, omitted = sum(sizes.values()), list[str]()
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        if size <= TOKENIZER_INFO.value - len(info) * _AROUND:
            break
        omitted.append(name)
        size -= sizes[name]
        del info[name]
    return msgspec.json.encode(info | {"omitted_fields": omitted[:_NAMED]} if omitted else info)


def _read(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return msgspec.json.decode(files.get(name, b"{}"), type=dict[str, Any])


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The `..._token` entries of tokenizer_config.json: texts, or objects that hold one as `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _source(files: Mapping[str, bytes], config: Mapping[str, Any], name: str = "default") -> str | None:
    """The template of `name`, or None: in files of their own where chat_template.jinja is there, else in
    tokenizer_config.json.

    Where there are several by `name`, the one for conversations with tools is `tool_use`."""
    if _TEMPLATE in files:
        own = files.get(_TEMPLATE if name == "default" else f"additional_chat_templates/{name}.jinja")
        return None if own is None else own.decode()
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source}.get(name)
    elif name != "default":
        source = None
    return source if isinstance(source, str) else None
