"""The families of models: how each writes its calls, and how its template is recognised. Pure.

A family is known by what its chat template has in it; the first that fits is it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from services.gateway.tool_calls import parser
from services.gateway.tool_calls.parsers import deepseek as deepseek_
from services.gateway.tool_calls.parsers import pythonic as pythonic_
from services.gateway.tool_calls.parsers import tagged
from services.gateway.tool_calls.parsers.deepseek import deepseek
from services.gateway.tool_calls.parsers.marked import (
    ARGS,
    CALL_ID,
    END_OF_TOOL_CALL,
    GRANITE_CALL,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALLS,
    granite,
    hermes,
    llama3_json,
    mistral,
)
from services.gateway.tool_calls.parsers.pythonic import pythonic
from services.gateway.tool_calls.parsers.scanner import Machine
from services.gateway.tool_calls.parsers.tagged import glm4, qwen3_coder
from shared.messages.records import Parsing

NONE = "none"


class Family(NamedTuple):
    """One way to write calls."""

    machine: Machine
    signs: tuple[str, ...]
    """A template with one of these is of the family."""
    markers: tuple[str, ...]
    """Text that may be a special token, and must be shown to the parser even so."""
    form: str
    """How a call is written, for a model whose template does not say it."""
    models: str
    """For the documentation."""


FAMILIES: Mapping[str, Family] = {
    "deepseek": Family(
        deepseek,
        (deepseek_.CALLS_BEGIN,),
        (
            deepseek_.CALLS_BEGIN,
            deepseek_.CALL_BEGIN,
            deepseek_.SEPARATOR,
            deepseek_.CALL_END,
            deepseek_.CALLS_END,
        ),
        f"{deepseek_.CALLS_BEGIN}{deepseek_.CALL_BEGIN}NAME{deepseek_.SEPARATOR}ARGUMENTS{deepseek_.CALL_END}"
        f"{deepseek_.CALLS_END}",
        "DeepSeek V3, V3.1, R1",
    ),
    "mistral": Family(
        mistral,
        (TOOL_CALLS,),
        (TOOL_CALLS, CALL_ID, ARGS),
        '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
        "Mistral, Mixtral, Ministral, Devstral",
    ),
    "qwen3_coder": Family(
        qwen3_coder,
        (tagged.PARAMETER,),
        (TOOL_CALL, END_OF_TOOL_CALL),
        "<tool_call>\n<function=NAME>\n<parameter=ARGUMENT>\nVALUE\n</parameter>\n</function>\n</tool_call>",
        "Qwen3-Coder, Qwen3.5",
    ),
    "glm4": Family(
        glm4,
        (tagged.ARG_KEY,),
        (
            TOOL_CALL,
            END_OF_TOOL_CALL,
            tagged.ARG_KEY,
            tagged.END_OF_ARG_KEY,
            tagged.ARG_VALUE,
            tagged.END_OF_ARG_VALUE,
        ),
        "<tool_call>NAME\n<arg_key>ARGUMENT</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        "GLM-4.5, GLM-4.6, GLM-4.7",
    ),
    "granite": Family(
        granite,
        (GRANITE_CALL,),
        (GRANITE_CALL, "<|/tool_call|>", TOOL_CALL, END_OF_TOOL_CALL),
        '<|tool_call|>[{"name": "NAME", "arguments": ARGUMENTS}]',
        "Granite 3, Phi-4-mini",
    ),
    "hermes": Family(
        hermes,
        (TOOL_CALL,),
        (TOOL_CALL, END_OF_TOOL_CALL),
        '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
        "Hermes 2 and 3, Qwen2.5, Qwen3, QwQ, Granite 4, SmolLM3; every template without tools of its own",
    ),
    "pythonic": Family(
        pythonic,
        ("<|python_start|>", "<|tool_call_start|>", "<function_calls>", "func_name1("),
        (*pythonic_.MARKERS, *pythonic_.MARKERS.values()),
        "[NAME(ARGUMENT=VALUE, ...)]",
        "Llama 4, Llama 3.2 with calls in Python, LFM2, OLMo 3",
    ),
    "llama3_json": Family(
        llama3_json,
        (PYTHON_TAG, '"parameters": dictionary', "Environment: ipython"),
        (PYTHON_TAG,),
        '{"name": "NAME", "parameters": ARGUMENTS}',
        "Llama 3.1, 3.2, 3.3",
    ),
}
"""In the order in which templates are looked at."""


def family_of(template: str) -> str:
    """The family whose notation `template` has, "" when it has none of them."""
    for name, family in FAMILIES.items():
        if any(sign in template for sign in family.signs):
            return name
    return ""


def reasoning_of(template: str) -> str:
    """The reasoning parser for `template`, "" when there is nothing to find."""
    for name, (_, end) in parser.MARKERS.items():
        if end in template:
            return name
    return ""


def markers_of(parsing: Parsing | None) -> frozenset[str]:
    """What the parsers of `parsing` must see, though it is a special token perhaps."""
    if parsing is None:
        return frozenset()
    family = FAMILIES.get(parsing.tools)
    return frozenset((*(family.markers if family else ()), *parser.MARKERS.get(parsing.reasoning, ())))


def variant_of(family: str, template: str) -> str:
    """Which of a family's notations `template` has, where there are several."""
    if family == "mistral" and ARGS in template:
        return "named"
    return "fenced" if family == "deepseek" and "```json" in template else ""
