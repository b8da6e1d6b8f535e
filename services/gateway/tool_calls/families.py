"""The families of models: how each writes its calls, and how its template is recognised. Pure.

A family is known by what its chat template has in it; the first that fits is it.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from services.gateway.tool_calls import parser
from services.gateway.tool_calls.parsers import gemma, harmony, marked, sections, tagged
from services.gateway.tool_calls.parsers import pythonic as pythonic_
from services.gateway.tool_calls.parsers.marked import ARGS, CALL_ID, END_OF_TOOL_CALL, TOOL_CALL, TOOL_CALLS
from services.gateway.tool_calls.parsers.pythonic import pythonic
from services.gateway.tool_calls.parsers.scanner import Machine
from shared.messages.records import Parsing

NONE = "none"


class ToolCallFormat(NamedTuple):
    """One way to write calls."""

    machine: Machine
    # A template with one of these is of the family; with `&` between them, of several at once.
    signs: tuple[str, ...]
    markers: tuple[str, ...]  # text that may be a special token, and must be shown to the parser even so
    form: str  # how a call is written, for a model whose template does not say it
    models: str  # for the documentation
    names: tuple[str, ...] = ()  # what else it is called: vLLM's names of parsers that read the same
    # Further special tokens that the parser must see, and that only the model may write.
    structure: tuple[str, ...] = ()


_CODER_CALL = "<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>"
_PAIRS = "<arg_key>ARGUMENT</arg_key>\n<arg_value>VALUE</arg_value>"
_JSON = '{"name": "NAME", "arguments": ARGUMENTS}'


def _invoked(tags: tagged.CallTags, value: str = ">") -> str:
    return (
        f'{tags.outer}\n{tags.call}NAME">\n{tags.parameter}ARGUMENT"{value}VALUE{tags.end_of_parameter}\n'
        f"{tags.end_of_call}\n{tags.end_of_outer}"
    )


def _in_section(marks: sections.Section, name: str) -> str:
    return f"{marks.begin}{marks.call}{name}{marks.separator}ARGUMENTS{marks.end_of_call}{marks.end}"


# In the order in which templates are looked at.
FAMILIES: Mapping[str, ToolCallFormat] = {
    "openai": ToolCallFormat(
        harmony.harmony,
        (harmony.ANALYSIS, f"{harmony.CHANNEL}commentary"),
        (),
        f"{harmony.CHANNEL}commentary to=functions.NAME {harmony.CONSTRAIN}json{harmony.MESSAGE}ARGUMENTS",
        "gpt-oss",
        structure=harmony.TOKENS,
    ),
    "kimi_k2": ToolCallFormat(
        sections.kimi_k2,
        (sections.KIMI.begin,),
        sections.KIMI,
        _in_section(sections.KIMI, "functions.NAME:0"),
        "Kimi K2, K2.5, Linear",
    ),
    "deepseek_v32": ToolCallFormat(
        tagged.deepseek_v32,
        (tagged.DSML,),
        (tagged.DSML,),
        _invoked(tagged.DEEPSEEK_V32, ' string="true">'),
        "DeepSeek V3.2, V4",
        names=("deepseek_v4",),
    ),
    "step3": ToolCallFormat(
        tagged.step3,
        (tagged.STEP3.call,),
        (
            tagged.STEP3.outer,
            tagged.STEP3.end_of_outer,
            "<\uff5ctool_call_begin\uff5c>",
            "<\uff5ctool_sep\uff5c>",
            *tagged.STEP3.behind,
        ),
        _invoked(tagged.STEP3),
        "Step3",
    ),
    "deepseek": ToolCallFormat(
        sections.deepseek,
        (sections.DEEPSEEK.begin,),
        sections.DEEPSEEK,
        _in_section(sections.DEEPSEEK, "NAME"),
        "DeepSeek V3, V3.1, R1",
        names=("deepseek_v3", "deepseek_v31"),
    ),
    "mistral": ToolCallFormat(
        marked.mistral,
        (TOOL_CALLS,),
        (TOOL_CALLS, CALL_ID, ARGS),
        f"[TOOL_CALLS][{_JSON}]",
        "Mistral, Mixtral, Ministral, Devstral",
    ),
    "minimax_m2": ToolCallFormat(
        tagged.minimax_m2,
        (tagged.MINIMAX.outer,),
        (tagged.MINIMAX.outer, tagged.MINIMAX.end_of_outer),
        _invoked(tagged.MINIMAX),
        "MiniMax M2",
    ),
    "seed_oss": ToolCallFormat(
        tagged.seed_oss,
        (tagged.SEED.outer,),
        (tagged.SEED.outer, tagged.SEED.end_of_outer),
        f"<seed:tool_call>\n{_CODER_CALL}\n</seed:tool_call>",
        "Seed-OSS",
    ),
    "qwen3_coder": ToolCallFormat(
        tagged.qwen3_coder,
        (tagged.CODER.parameter,),
        (TOOL_CALL, END_OF_TOOL_CALL),
        f"<tool_call>\n{_CODER_CALL}\n</tool_call>",
        "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5, MiMo V2",
        names=("qwen3_xml", "nemotron_v3", "step3p5", "mimo"),
    ),
    "longcat": ToolCallFormat(
        tagged.longcat,
        (tagged.LONGCAT.call,),
        tagged.LONGCAT[:6],
        f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>",
        "LongCat-Flash",
    ),
    "hy_v3": ToolCallFormat(
        tagged.hy_v3,
        ("<tool_sep", "<tool_calls&<arg_key"),
        tagged.HUNYUAN,
        f"<tool_calls>\n<tool_call>NAME<tool_sep>\n{_PAIRS}\n</tool_call>\n</tool_calls>",
        "Hunyuan 3, 4",
    ),
    "glm4": ToolCallFormat(
        tagged.glm4,
        (tagged.GLM.key,),
        tagged.GLM[:6],
        f"<tool_call>NAME\n{_PAIRS}\n</tool_call>",
        "GLM-4.5 and later",
        names=("glm45", "glm47"),
    ),
    "gemma4": ToolCallFormat(
        gemma.gemma4,
        (gemma.GEMMA4.begin,),
        gemma.GEMMA4,
        '<|tool_call>call:NAME{ARGUMENT:<|"|>VALUE<|"|>}<tool_call|>',
        "Gemma 4",
    ),
    "functiongemma": ToolCallFormat(
        gemma.function_gemma,
        (gemma.FUNCTION_GEMMA.begin,),
        gemma.FUNCTION_GEMMA,
        "<start_function_call>call:NAME{ARGUMENT:<escape>VALUE<escape>}<end_function_call>",
        "FunctionGemma",
    ),
    "jamba": ToolCallFormat(
        marked.jamba,
        (marked.CALLS,),
        (marked.CALLS, marked.END_OF_CALLS),
        f"<tool_calls>[{_JSON}]</tool_calls>",
        "Jamba, Hunyuan A13B, MiniMax M1",
        names=("hunyuan_a13b", "minimax"),
    ),
    "nemotron_json": ToolCallFormat(
        marked.nemotron_json,
        (marked.NEMOTRON_CALL,),
        (marked.NEMOTRON_CALL, marked.END_OF_NEMOTRON_CALL),
        f"<TOOLCALL>[{_JSON}]</TOOLCALL>",
        "Nemotron Nano 2, Nemotron-H, Llama Nemotron",
    ),
    "internlm": ToolCallFormat(
        marked.internlm,
        (marked.PLUGIN,),
        (marked.ACTION, marked.PLUGIN, marked.END_OF_ACTION),
        '<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ARGUMENTS}<|action_end|>',
        "InternLM 2 and later",
    ),
    "cohere_command3": ToolCallFormat(
        marked.cohere,
        (marked.COHERE_CALLS,),
        (marked.COHERE_CALLS, marked.END_OF_COHERE_CALLS),
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}]<|END_ACTION|>',
        "Command A, R7B and later",
        names=("cohere_command4",),
    ),
    "apertus": ToolCallFormat(
        marked.apertus,
        (marked.APERTUS_CALLS,),
        (marked.APERTUS_CALLS, marked.END_OF_APERTUS_CALLS),
        '<|tools_prefix|>[{"NAME": ARGUMENTS}]<|tools_suffix|>',
        "Apertus",
    ),
    "granite": ToolCallFormat(
        marked.granite,
        (marked.GRANITE_CALL,),
        (marked.GRANITE_CALL, marked.END_OF_GRANITE_CALL, TOOL_CALL, END_OF_TOOL_CALL),
        f"<|tool_call|>[{_JSON}]",
        "Granite 3",
    ),
    "granite-20b-fc": ToolCallFormat(
        marked.granite_20b_fc,
        (marked.FUNCTION_CALL,),
        (marked.FUNCTION_CALL,),
        f"<function_call> {_JSON}",
        "Granite 20B FunctionCalling",
    ),
    "phi4_mini_json": ToolCallFormat(
        marked.phi4_mini_json,
        (f"{marked.FUNCTOOLS}[",),
        (marked.GRANITE_CALL, marked.END_OF_GRANITE_CALL),
        f"functools[{_JSON}]",
        "Phi-4-mini",
    ),
    "hermes": ToolCallFormat(
        marked.hermes,
        (TOOL_CALL,),
        (TOOL_CALL, END_OF_TOOL_CALL),
        f"<tool_call>\n{_JSON}\n</tool_call>",
        "Hermes 2 and 3, Qwen2.5, Qwen3, QwQ, Granite 4, Falcon-H1, ERNIE 4.5, SmolLM3; every template without tools "
        "of its own",
        names=("granite4", "ernie45"),
    ),
    "pythonic": ToolCallFormat(
        pythonic,
        (
            "<|python_start|>",
            "<|tool_call_start|>",
            "<|tool_list_start|>",
            "List of tools: [",
            "<function_calls>",
            "func_name1(",
        ),
        (*pythonic_.MARKERS, *pythonic_.MARKERS.values()),
        "[NAME(ARGUMENT=VALUE, ...)]",
        "Llama 4, Llama 3.2 with calls in Python, LFM2, OLMo 3",
        names=("llama4_pythonic", "lfm2", "olmo3"),
    ),
    "llama3_json": ToolCallFormat(
        marked.llama3_json,
        (marked.PYTHON_TAG, '"parameters": dictionary', "Environment: ipython"),
        (marked.PYTHON_TAG,),
        '{"name": "NAME", "parameters": ARGUMENTS}',
        "Llama 3.1, 3.2, 3.3",
        names=("llama4_json",),
    ),
    "xlam": ToolCallFormat(
        marked.xlam, (), (TOOL_CALLS, TOOL_CALL, END_OF_TOOL_CALL), f"[{_JSON}]", "xLAM 2; chosen by the setting"
    ),
}


_NAMED = {name: family for family, entry in FAMILIES.items() for name in (family, *entry.names)}
# vLLM's names of what `think` reads.
_REASONING_NAMES = (
    "deepseek_r1", "deepseek_v3", "deepseek_v4", "glm45", "glm47", "holo2", "mimo", "minimax_m2", "nemotron_v3",
    "olmo3", "qwen3", "step3", "step3p5"
)  # fmt: skip
_REASONING_NAMED = {
    **{name: name for name in parser.REASONING},
    **dict.fromkeys(_REASONING_NAMES, "think"),
    "identity": "",
}


def parser_named(name: str) -> str:
    """The family that an operator's choice of a tool parser means, "" where it means none (`auto`)."""
    return _NAMED.get(name, "")


def reasoning_named(name: str) -> str:
    """The reasoning parser that an operator's choice means, "" where it means none."""
    return _REASONING_NAMED.get(name, "")


PARSER_NAMES = frozenset(_NAMED)
REASONING_NAMES = frozenset(_REASONING_NAMED)


def family_of(template: str) -> str:
    """The family whose notation `template` has, "" when it has none of them."""
    for name, family in FAMILIES.items():
        if any(all(part in template for part in sign.split("&")) for sign in family.signs):
            return name
    return ""


def reasoning_of(template: str) -> str:
    """The reasoning parser for `template`, "" when there is nothing to find."""
    for name, marks in parser.REASONING.items():
        if all(sign in template for sign in marks.signs or (marks.end,)):
            return name
    return ""


def markers_of(parsing: Parsing | None) -> frozenset[str]:
    """What the parsers of `parsing` must see, though it is a special token perhaps."""
    if parsing is None:
        return frozenset()
    found: list[str] = []
    if (family := FAMILIES.get(parsing.tools)) is not None:
        found += (*family.markers, *family.structure)
    if (marks := parser.REASONING.get(parsing.reasoning)) is not None:
        found += (marks.begin, marks.end, *marks.answer, *marks.structure)
    return frozenset(found) - {""}


# (family, variant, what its templates have in them).
_VARIANT_SIGNS: tuple[tuple[str, str, str], ...] = (
    ("mistral", "named", ARGS),
    ("deepseek", "fenced", "```json"),
    ("deepseek_v32", "v4", "tool_calls>"),
    ("glm4", "inline", "}<arg_key>"),
    ("jamba", "lines", "<tool_calls>\n{"),
    ("jamba", "lines", "<tool_calls>\\n{"),
    ("longcat", "pairs", tagged.LONGCAT.key),
)


_SUFFIX = re.compile(r"""(?:<tool_calls|["'])(:\w+)[>"']""")  # in the tags of a Hunyuan's template


def variant_of(family: str, template: str) -> str:
    """Which of a family's notations `template` has, where there are several."""
    if family == "hy_v3":
        suffix = _SUFFIX.search(template)
        return suffix[1] if suffix else ""
    found = (variant for name, variant, sign in _VARIANT_SIGNS if name == family and sign in template)
    return next(found, "")
