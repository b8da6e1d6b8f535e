"""What of a request says how its answer's text must look, as a `Grammar`. Pure.

    response_format      text | json_object | json_schema        OpenAI; structural_tag: vLLM
    structured_outputs   json | regex | choice | grammar | structural_tag    vLLM
    guided_json, guided_regex, guided_choice, guided_grammar     vLLM, older

At most one of them. What cannot be held to the letter is refused: nothing of a schema is left out silently. Of a chat
it is a part of the grammar that its tools and its reasoning demand (`demanded`).

`structural_tag` is xgrammar's and vLLM's: tags in a text and what stands in them, as a grammar in Lark's notation.

    {"type": "triggered_tags", "triggers": ["<f="], "tags": [{"begin": "<f=now>", "content": ..., "end": "</f>"}]}

      ( text up to <f=   now> content </f> )*   text without <f=

Source: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import count
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.gateway.core.errors import InvalidField, InvalidParameter, convert, missing, too_deep, unsupported
from services.gateway.intake.prompts.chat import ChatPlan
from services.gateway.intake.schemas import (
    GUIDED,
    GenerationFields,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from services.gateway.tool_calls.closed_objects import closed
from services.gateway.tool_calls.grammar import (
    NO_PARAMETERS,
    Calling,
    Rules,
    behind_reasoning,
    calls_or,
    joined,
    literal,
    regex_of,
    required_calls,
    strict_calls,
    up_to,
)
from services.gateway.tool_calls.parser import REASONING
from services.gateway.tool_calls.schemas import CustomFunction
from shared import limits
from shared.grammars import ANY_OBJECT, embedded, inexact
from shared.messages import Grammar
from shared.messages.records import Parsing


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and what the client calls it."""

    grammar: Grammar
    param: str
    subject: str  # what is wrong when the grammar is


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
        raise InvalidField(given[1], f"'{given[0]}' already sets the answer's form; send one of the two.")
    if request.min_tokens:
        raise unsupported("min_tokens", where=f"with '{given[0]}', which says where the text may end")
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
        raise InvalidField(param, f"expected exactly one of {names}, but got {len(fields)}.")
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
        wrong = "it is not a JSON object; send one, or its text."
        raise InvalidField(param, wrong, reason="invalid_json") from None


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
        wrong = (
            f"the texts have {size} characters together; send fewer or shorter ones ({limits.GRAMMAR_BYTES.cited()})."
        )
        raise InvalidField(param, wrong, reason="string_above_max_length")
    if not all(choices):
        raise _empty(param)
    return choices


def _check_size(size: int, param: str, subject: str, told: str = "it has {} bytes; make it smaller") -> None:
    if size > limits.GRAMMAR_BYTES.value:
        raise InvalidParameter(
            f"{subject}: {told.format(size)} ({limits.GRAMMAR_BYTES.cited()}).",
            param=param,
            reason="string_above_max_length",
        )


def _empty(param: str) -> InvalidParameter:
    return InvalidField(param, "empty string. Expected at least one character.", reason="empty_string")


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
        grammar = behind_reasoning(answer.grammar, reasoning, specials, opened=opened)
        return _made(grammar, answer.param, answer.subject)
    calling = Calling(plan.family, plan.variant, plan.asked.functions, plan.single, specials, closes)
    if plan.asked.required:
        grammar = required_calls(calling, reasoning, opened=opened)
    elif answer is not None:
        grammar = calls_or(calling, answer.grammar, reasoning, opened=opened)
        return _made(grammar, answer.param, answer.subject)
    elif (strict := strict_calls(calling, reasoning, opened=opened)) is not None:
        grammar = strict
    else:
        return None
    name = "functions" if plan.asked.legacy else "tools"
    return _made(grammar, name, f"Invalid '{name}'")


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
            where, what = (f"tools[{index}].custom.format", f"Invalid format of the custom tool '{function.name}'")
        yield RequestedGrammar(grammar_of_schema(schema), where, what)


def _made(grammar: Grammar, param: str, subject: str) -> RequestedGrammar:
    """`grammar`, which was made of what stands at `param` in a request."""
    told = "as a grammar it has {} bytes; send fewer or smaller schemas"
    _check_size(len(grammar.text.encode()), param, subject, told)
    return RequestedGrammar(grammar, param, subject)


# --- structural tags ------------------------------------------------------------------------------


Text = Annotated[str, Meta(min_length=1)]
_ANY = "/(?s:.*)/"


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class ConstString(_Format, frozen=True, tag="const_string"):
    value: str


class JsonSchema(_Format, frozen=True, tag="json_schema"):
    json_schema: dict[str, Any]


class Regex(_Format, frozen=True, tag="regex"):
    pattern: Text


class AnyText(_Format, frozen=True, tag="any_text"):
    """Up to the end of the tag that it stands in, or of the answer."""


class InOrder(_Format, frozen=True, tag="sequence"):
    elements: Annotated[list["Format"], Meta(min_length=1)]


class Or(_Format, frozen=True, tag="or"):
    elements: Annotated[list["Format"], Meta(min_length=1)]


class Tag(_Format, frozen=True, tag="tag"):
    begin: str
    content: "Format"
    end: str


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    """Any text; behind each trigger one of the tags that begin so."""

    triggers: Annotated[list[Text], limits.STRUCTURAL_TRIGGERS.length(min_length=1)]
    tags: Annotated[list[Tag], Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    """Tags, and nothing else."""

    tags: Annotated[list[Tag], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = ConstString | JsonSchema | Regex | AnyText | InOrder | Or | Tag | TriggeredTags | TagsWithSeparator


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The older form of a tag."""

    begin: str
    end: str
    schema: dict[str, Any] = {}


class _Older(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    triggers: Annotated[list[Text], limits.STRUCTURAL_TRIGGERS.length(min_length=1)]
    structures: Annotated[list[Structure], Meta(min_length=1)]


def grammar_of_tags(given: Mapping[str, Any], param: str, *, closes: bool) -> Grammar:
    """Of what stands at `param` in a request: a `format`, or the older `structures` and `triggers`. `closes`: whether
    the objects of schemas are closed. Raises `InvalidParameter`."""
    maker = _Maker(param, closes=closes)
    maker.rules.add("start", maker.of(_read(given, param)))
    text = maker.rules.text().replace("::=", "\\u003a:=")  # else it would look like GBNF (`shared.grammars`)
    return Grammar("lark", text)


class Tags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Format


def _read(given: Mapping[str, Any], param: str) -> Format:
    """What is wrong is told by its place in the request."""
    if too_deep(given):
        raise InvalidField(param, f"it is nested too deeply ({limits.NESTING.cited()}).")
    fields = {name: value for name, value in given.items() if name != "type" and value is not None}
    kind, names = _Older if "structures" in fields else Tags, param.split(".")
    for name in reversed(names):
        fields = {name: fields}
    found: Any = convert(fields, _at(param, kind))
    for name in names:
        found = getattr(found, name)
    if isinstance(found, Tags):
        return found.format
    tags = [Tag(one.begin, JsonSchema(one.schema), one.end) for one in found.structures]
    return TriggeredTags(found.triggers, tags)


@cache
def _at(param: str, kind: Any) -> Any:
    for name in reversed(param.split(".")):
        kind = msgspec.defstruct("At", [(name, kind)])
    return kind


class _Maker:
    """Expressions of formats, each with the text that stands behind it: any text goes up to that."""

    def __init__(self, param: str, *, closes: bool) -> None:
        self.rules = Rules()
        self._wrong = partial(InvalidField, param)
        self._closes = closes
        self._numbers = count()

    def of(self, given: Format, end: str = "") -> str:
        """Raises `InvalidParameter`."""
        behind = literal(end, {})
        match given:
            case ConstString():
                return literal(given.value + end, {})
            case JsonSchema():
                return joined(self._schema(given.json_schema), behind)
            case Regex():
                return joined(f"/{given.pattern.replace('/', chr(92) + '/')}/", behind)
            case AnyText():
                return self._any_text(end)
            case InOrder():
                return self._sequence(given.elements, end)
            case Or():
                return self._one_of([self.of(element, end) for element in given.elements])
            case Tag():
                return joined(self._tag(given, ""), behind)
            case TriggeredTags():
                return self._triggered(given, end)
        return joined(self._separated(given), behind)

    def _add(self, word: str, body: str, attributes: str = "") -> str:
        return self.rules.add(f"{word}_{next(self._numbers)}", body, attributes)

    def _one_of(self, bodies: Sequence[str]) -> str:
        return f"({' | '.join(bodies)})"

    def _schema(self, schema: dict[str, Any]) -> str:
        if (number := inexact(schema)) is not None:
            raise self._wrong(f"{number} in it is a whole number beyond 2^53, which cannot be held exactly.")
        return self._add("schema", embedded(closed(schema) if self._closes else schema))

    def _any_text(self, end: str) -> str:
        if not end:
            return _ANY
        attributes, body = up_to(end, {})
        return self._add("text", body, attributes)

    def _sequence(self, elements: Sequence[Format], end: str) -> str:
        *before, last = elements
        if any(map(_is_open, before)):
            raise self._wrong("any text that more follows in a sequence has no end; put it last, or in a tag.")
        return joined(*(self.of(element) for element in before), self.of(last, end))

    def _tag(self, tag: Tag, said: str) -> str:
        """The tag behind `said`, with which it begins."""
        return joined(literal(tag.begin.removeprefix(said), {}), self.of(tag.content, tag.end))

    def _triggered(self, given: TriggeredTags, end: str) -> str:
        tags: dict[str, list[str]] = {}
        for tag in given.tags:
            triggers = [trigger for trigger in given.triggers if tag.begin.startswith(trigger)]
            if len(triggers) != 1:
                raise self._wrong(
                    f"{len(triggers)} of the triggers begin the tag {tag.begin[:64]!r}; give it one alone."
                )
            tags.setdefault(triggers[0], []).append(self._tag(tag, triggers[0]))
        up_to_one_of = self._up_to_one_of([*given.triggers, end] if end else given.triggers)
        one = self._one_of([joined(up_to_one_of(trigger), self._one_of(bodies)) for trigger, bodies in tags.items()])
        rest = up_to_one_of(end)
        if given.stop_after_first:
            last = joined(one, literal(end, {}))
            return last if given.at_least_one else self._one_of([last, rest])
        return f"{one}{'+' if given.at_least_one else '*'} {rest}"

    def _up_to_one_of(self, ends: Sequence[str]) -> Callable[[str], str]:
        """Makes expressions for any text up to the first of `ends`, where that is the one given; "": for any text
        without them."""
        number = next(self._numbers)
        some = f"(?s:.*)({'|'.join(map(regex_of, ends))})"
        self.rules.add(f"SOME_{number}", f"/{some}(?s:.*)/")
        self.rules.add(f"BEFORE_{number}", f"/{some}(?s:.+)/")

        def make(end: str) -> str:
            if not end:
                return self._add("FREE", f"{_ANY} & ~SOME_{number}")
            return self._add("UPTO", f"/(?s:.*){regex_of(end)}/ & ~BEFORE_{number}")

        return make

    def _separated(self, given: TagsWithSeparator) -> str:
        tag = self._add("tag", self._one_of([self._tag(one, "") for one in given.tags]))
        more = "" if given.stop_after_first else f"({joined(literal(given.separator, {}), tag)})*"
        tags = joined(tag, more)
        return tags if given.at_least_one else f"({tags})?"


def _is_open(given: Format) -> bool:
    """Whether it ends with any text."""
    match given:
        case AnyText():
            return True
        case TriggeredTags():
            return not (given.stop_after_first and given.at_least_one)
        case InOrder():
            return _is_open(given.elements[-1])
        case Or():
            return any(map(_is_open, given.elements))
    return False
