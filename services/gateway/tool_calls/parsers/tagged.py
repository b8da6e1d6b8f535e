"""Calls whose arguments stand in tags. Pure.

    <tool_call>                                     <tool_call>NAME
    <function=NAME>                                 <arg_key>KEY</arg_key>
    <parameter=KEY>                                 <arg_value>VALUE</arg_value>
    VALUE                                           </tool_call>
    </parameter>
    </function>                                     GLM-4.5 and later (`PairTags`)
    </tool_call>

    Qwen3-Coder, and others with `name="KEY"` (`CallTags`)

A value has no quotation marks: the type of the parameter, or what the tag says, tells whether `5` is a number or a
text. Texts are passed on as they come; other values when they are complete.
"""

import re
from typing import NamedTuple

from services.gateway.tool_calls.parsers.json_calls import call_list
from services.gateway.tool_calls.parsers.marked import END_OF_TOOL_CALL, TOOL_CALL
from services.gateway.tool_calls.parsers.scanner import Machine, Scanner, Steps, Types
from services.gateway.tool_calls.parsers.values import TextValue, of_literal, of_type, quoted

_TAG_END = re.compile(r"[>\n]")
_QUOTE_END = re.compile(r'[">\n]')
_NAME_END = re.compile(r"[<\s]")
_SUFFIX = re.compile(r":\w+>$")
_SUFFIX_END = re.compile(r"[<>\s]")
_NO_STRING = 'string="false"'
_STRING = 'string="true"'  # what DeepSeek's tags say of a value


class CallTags(NamedTuple):
    """Tags that name a function and its parameters."""

    outer: str  # around calls
    end_of_outer: str
    call: str  # before the function's name; with a quotation mark at its end the name has another behind it
    end_of_call: str
    parameter: str  # before the parameter's name, likewise
    end_of_parameter: str
    before: tuple[str, ...] = ()  # what else stands before a call
    behind: tuple[str, ...] = ()
    lines: bool = False  # whether a value stands on lines of its own
    says_type: bool = False  # whether a parameter's tag says that its value is a text, or not

    @property
    def named(self) -> str:
        """What stands behind a name."""
        return '">' if self.call.endswith('"') else ">"


CODER = CallTags(TOOL_CALL, END_OF_TOOL_CALL, "<function=", "</function>", "<parameter=", "</parameter>", lines=True)
SEED = CODER._replace(outer="<seed:tool_call>", end_of_outer="</seed:tool_call>")
MINIMAX = CallTags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', "</parameter>"
)
DSML = "\uff5cDSML\uff5c"
DEEPSEEK_V32 = CallTags(
    f"<{DSML}function_calls>",
    f"</{DSML}function_calls>",
    f'<{DSML}invoke name="',
    f"</{DSML}invoke>",
    f'<{DSML}parameter name="',
    f"</{DSML}parameter>",
    says_type=True,
)
DEEPSEEK_V4 = DEEPSEEK_V32._replace(outer=f"<{DSML}tool_calls>", end_of_outer=f"</{DSML}tool_calls>")
STEP3 = CallTags(
    "<\uff5ctool_calls_begin\uff5c>",
    "<\uff5ctool_calls_end\uff5c>",
    '<steptml:invoke name="',
    "</steptml:invoke>",
    '<steptml:parameter name="',
    "</steptml:parameter>",
    before=("<\uff5ctool_call_begin\uff5c>", "function<\uff5ctool_sep\uff5c>"),
    behind=("<\uff5ctool_call_end\uff5c>",),
)


class PairTags(NamedTuple):
    """Tags around a call, its keys and its values."""

    call: str
    end_of_call: str
    key: str
    end_of_key: str
    value: str
    end_of_value: str
    separator: str = ""  # may stand behind the function's name
    outer: str = ""  # around all calls; "" where nothing is
    end_of_outer: str = ""


GLM = PairTags(TOOL_CALL, END_OF_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HUNYUAN = GLM._replace(separator="<tool_sep>", outer="<tool_calls>", end_of_outer="</tool_calls>")
LONGCAT = PairTags(
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    "<longcat_arg_key>",
    "</longcat_arg_key>",
    "<longcat_arg_value>",
    "</longcat_arg_value>",
)


class _Object:
    """The arguments' JSON as they come."""

    def __init__(self, scan: Scanner, types: Types, name: str) -> None:
        self._scan = scan
        self._types = types.get(name, {})
        self._empty = True
        scan.begin(name)

    def value(self, key: str, ends: tuple[str, ...], *, trimmed: bool, said: str = "") -> Steps[str]:
        """Reads the value of `key`; returns which of `ends` ended it. `said`: what its tag has beside the name."""
        scan, types = self._scan, self._types.get(key, "string") or "string"
        scan.arguments(("{" if self._empty else ", ") + quoted(key) + ": ")
        self._empty = False
        if _STRING in said or (types == "string" and _NO_STRING not in said):
            text = TextValue(scan.arguments, trimmed=trimmed)
            end = yield from scan.until(ends, text.feed)
            text.end(whole=bool(end))
            return end
        parts: list[str] = []
        end = yield from scan.until(ends, parts.append)
        if end:
            text_of_value = "".join(parts).strip()
            scan.arguments(of_literal(text_of_value) if types == "string" else of_type(text_of_value, types))
        return end

    def close(self) -> None:
        self._scan.arguments("{}" if self._empty else "}")


def with_tags(*kinds: CallTags) -> Machine:
    """Reads calls in any of `kinds`."""
    begins = tuple(dict.fromkeys(begin for tags in kinds for begin in (tags.outer, tags.call)))
    ends = tuple(tags.end_of_outer for tags in kinds)

    def machine(scan: Scanner, types: Types) -> Steps[None]:
        while marker := (yield from scan.content(*begins)):
            tags = next(tags for tags in kinds if marker in (tags.outer, tags.call))
            for before in tags.before:
                yield from scan.optional(before)
            inside = marker == tags.call or (yield from scan.optional(tags.call))
            name = (yield from _named(scan, tags.call))[0] if inside else ""
            if not name:
                scan.fall_back()
                continue
            yield from _parameters(scan, _Object(scan, types, name), tags)
            for behind in tags.behind:
                yield from scan.optional(behind)
            yield from scan.optional(*ends)
            if tags.before:
                scan.mark()
                for before in tags.before:
                    yield from scan.optional(before)
                if not (yield from scan.starts(tags.call)):
                    scan.back()

    return machine


def _named(scan: Scanner, begin: str) -> Steps[tuple[str, str]]:
    """(a tag's name, what it says else), behind the tag; "" where there is none."""
    quote = begin.endswith('"')
    name = yield from scan.name(_QUOTE_END if quote else _TAG_END)
    said = ""
    if quote and (yield from scan.peek()) == '"':
        scan.skip()
        said = yield from scan.name(_TAG_END)
    if (yield from scan.peek()) != ">":
        return "", ""
    scan.skip()
    return name.strip(), said


def _parameters(scan: Scanner, found: _Object, tags: CallTags) -> Steps[None]:
    """Up to the end of the function, or to what is no parameter."""
    while (yield from scan.optional(tags.parameter)):
        key, said = yield from _named(scan, tags.parameter)
        if not key:
            break
        ends = (tags.end_of_parameter, tags.end_of_call)
        end = yield from found.value(key, ends, trimmed=tags.lines, said=said)
        if end != tags.end_of_parameter:
            if end:
                found.close()
            return
    if (yield from scan.spaces()):
        yield from scan.optional(tags.end_of_call)
        found.close()


def with_pairs(*kinds: PairTags) -> Machine:
    """Reads calls in any of `kinds`."""
    begins = tuple(dict.fromkeys(begin for tags in kinds for begin in (tags.outer, tags.call) if begin))

    def machine(scan: Scanner, types: Types) -> Steps[None]:
        while marker := (yield from scan.content(*begins)):
            tags = next(tags for tags in kinds if marker in (tags.outer, tags.call))
            if not (yield from _pairs_call(scan, types, tags, inside=marker == tags.call)):
                scan.fall_back()

    return machine


def _pairs_call(scan: Scanner, types: Types, tags: PairTags, *, inside: bool) -> Steps[bool]:
    """False: there is none, with nothing found."""
    if not (inside or (yield from scan.optional(tags.call))):
        return False
    yield from scan.spaces()
    name = yield from scan.name(_NAME_END)
    separated = bool(tags.separator and (yield from scan.optional(tags.separator)))
    yield from scan.spaces()
    if not name or not (separated or (yield from scan.starts(tags.key, tags.end_of_call))):
        return False
    found = _Object(scan, types, name)
    while (yield from scan.optional(tags.key)):
        key: list[str] = []
        yield from scan.until((tags.end_of_key,), key.append)
        if not (yield from scan.optional(tags.value)):
            break
        if not (yield from found.value("".join(key).strip(), (tags.end_of_value,), trimmed=False)):
            return True
    if (yield from scan.spaces()):
        found.close()
    yield from scan.optional(tags.end_of_call)
    if tags.end_of_outer:
        yield from scan.optional(tags.end_of_outer)
    return True


qwen3_coder = with_tags(CODER)
seed_oss = with_tags(SEED)
minimax_m2 = with_tags(MINIMAX)
deepseek_v32 = with_tags(DEEPSEEK_V32, DEEPSEEK_V4)
step3 = with_tags(STEP3)
glm4 = with_pairs(GLM)


def hunyuan_tags(suffix: str) -> PairTags:
    """Of a checkpoint whose tags end with `suffix`: `<tool_calls:opensource>`."""
    return PairTags(*(f"{tag[:-1]}{suffix}>" for tag in HUNYUAN))


def without_suffix(token: str) -> str:
    """A special token as it is called in all checkpoints."""
    return _SUFFIX.sub(">", token)


def suffix_and_bracket(scan: Scanner) -> Steps[str | None]:
    """The rest of a tag behind its name, read; None where that is something else."""
    suffix = yield from scan.name(_SUFFIX_END)
    if (yield from scan.peek()) != ">" or (suffix and not suffix.startswith(":")):
        return None
    scan.skip()
    return suffix


def hy_v3(scan: Scanner, types: Types) -> Steps[None]:
    """Hunyuan's; each checkpoint has a suffix of its own in its tags, or none."""
    outer, call = HUNYUAN.outer[:-1], HUNYUAN.call[:-1]
    while marker := (yield from scan.content(outer, call)):
        suffix = yield from suffix_and_bracket(scan)
        tags = hunyuan_tags(suffix or "")
        if suffix is None or not (yield from _pairs_call(scan, types, tags, inside=marker == call)):
            scan.fall_back()


def longcat(scan: Scanner, types: Types) -> Steps[None]:
    """LongCat-Flash writes JSON between its tags, later versions keys and values."""
    while (yield from scan.content(LONGCAT.call)):
        if (yield from scan.spaces()) in ("{", "["):
            found = yield from call_list(scan)
            if found:
                yield from scan.optional(LONGCAT.end_of_call)
        else:
            found = yield from _pairs_call(scan, types, LONGCAT, inside=True)
        if not found:
            scan.fall_back()
