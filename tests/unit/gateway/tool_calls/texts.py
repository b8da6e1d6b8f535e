"""How each family writes calls, and what they are: for parsers, grammars and templates alike."""

from typing import NamedTuple

from services.gateway.tool_calls.parsers import tagged
from services.gateway.tool_calls.parsers.scanner import Arguments, CallBegin, Event, Text, Thought
from services.gateway.tool_calls.parsers.sections import DEEPSEEK, KIMI

TYPES = {
    "get_weather": {"city": "string", "days": "integer"},
    "f": {"a": "integer|null", "b": "string|null", "c": "object"},
    "now": {},
}
WEATHER = ("get_weather", '{"city": "New \\"York\\"", "days": 3}')
NOW = ("now", "{}")


class Case(NamedTuple):
    """A text of a family with the content and the calls (name, arguments) in it."""

    family: str
    text: str
    content: str  # "@": the text itself
    calls: tuple[tuple[str, str], ...]


_HERMES = '<tool_call>\n{"name": "get_weather", "arguments": ' + WEATHER[1] + "}\n</tool_call>"
_CODER = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nNew "York"\n</parameter>\n<parameter=days>\n3\n'
    "</parameter>\n</function>\n</tool_call>"
)
_GLM = (
    '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>New "York"</arg_value>\n<arg_key>days</arg_key>\n'
    "<arg_value>3</arg_value>\n</tool_call>"
)
_JSON = '{"name": "get_weather", "arguments": ' + WEATHER[1] + "}"
_LLAMA = '{"name": "get_weather", "parameters": ' + WEATHER[1] + "}"
_PYTHON = """get_weather(city='New "York"', days=3)"""
_SEED = _CODER.replace("tool_call>", "seed:tool_call>")
_INVOKE = (
    '<invoke name="get_weather">\n<parameter name="city">New "York"</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>'
)
_STEP3 = "<\uff5ctool_call_begin\uff5c>function<\uff5ctool_sep\uff5c>{}<\uff5ctool_call_end\uff5c>".format(
    _INVOKE.replace("<", "<steptml:").replace("<steptml:/", "</steptml:")
)
_DSML = (
    '<|DSML|invoke name="get_weather">\n<|DSML|parameter name="city" string="true">New "York"</|DSML|parameter>\n'
    '<|DSML|parameter name="days" string="false">3</|DSML|parameter>\n</|DSML|invoke>'
).replace("|", "\uff5c")
_DSML_BEGIN, _DSML_END = tagged.DEEPSEEK_V32.outer, tagged.DEEPSEEK_V32.end_of_outer
_LONGCAT = _GLM.replace("<", "<longcat_").replace("<longcat_/", "</longcat_")
_HUNYUAN = _GLM.replace("get_weather\n", "get_weather<tool_sep>\n")
_HUNYUAN_OPEN = _HUNYUAN.replace(">", ":opensource>")
_KIMI = (
    f"{KIMI.call}functions.get_weather:0{KIMI.separator}{WEATHER[1]}{KIMI.end_of_call}"
    f"{KIMI.call}functions.now:1{KIMI.separator}{{}}{KIMI.end_of_call}"
)
_TO_WEATHER = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER[1]}"
_TO_NOW = "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"
_GEMMA = """call:get_weather{city:<|"|>New "York"<|"|>,days:3}"""
_PARAMETERS = _JSON.replace("arguments", "parameters")

CASES = [
    Case("openai", f"{_TO_WEATHER}<|call|>", "", (WEATHER,)),
    Case("openai", f"I look.{_TO_WEATHER}<|call|>{_TO_NOW}", "I look.", (WEATHER, NOW)),
    Case("openai", "<|channel|>commentary to=functions.f<|message|>Hi", "@", ()),
    Case("openai", "<|channel|>commentary to=f", "@", ()),
    Case("kimi_k2", f"Well.{KIMI.begin}{_KIMI}{KIMI.end}", "Well.", (WEATHER, NOW)),
    Case("kimi_k2", f"{KIMI.call}now{KIMI.separator} {{}}", "", (NOW,)),
    Case("kimi_k2", f"{KIMI.begin}{KIMI.call}functions.now:0", "@", ()),
    Case("kimi_k2", f'{KIMI.call}functions.f:0{KIMI.separator}{{"a": ', "", (("f", '{"a": '),)),
    Case("deepseek_v32", f"So.\n\n{_DSML_BEGIN}\n{_DSML}\n{_DSML_END}", "So.", (WEATHER,)),
    Case(
        "deepseek_v32",
        f"{tagged.DEEPSEEK_V4.outer}\n{_DSML}\n{_DSML}\n{tagged.DEEPSEEK_V4.end_of_outer}",
        "",
        (WEATHER, WEATHER),
    ),
    Case(
        "deepseek_v32",
        _DSML.replace('"city" string="true"', '"city" string="false"').replace('New "York"', "[1]"),
        "",
        (("get_weather", '{"city": [1], "days": 3}'),),
    ),
    Case("deepseek_v32", f"{_DSML_BEGIN}\nNo call.", "@", ()),
    Case("step3", f"{tagged.STEP3.outer}\n{_STEP3}\n{_STEP3}\n{tagged.STEP3.end_of_outer}", "", (WEATHER, WEATHER)),
    Case("step3", f"{tagged.STEP3.outer}\nfunction", "@", ()),
    Case("minimax_m2", f"<minimax:tool_call>\n{_INVOKE}\n{_INVOKE}\n</minimax:tool_call>", "", (WEATHER, WEATHER)),
    Case("minimax_m2", '<invoke name="now"></invoke>', "", (NOW,)),
    Case("minimax_m2", '<minimax:tool_call><invoke name="f', "@", ()),
    Case("minimax_m2", '<invoke name="get_weather"><parameter name="city">lo', "", (("get_weather", '{"city": "lo'),)),
    Case("seed_oss", f"Yes.{_SEED}", "Yes.", (WEATHER,)),
    Case("longcat", f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>", "", (WEATHER,)),
    Case("longcat", f"{_LONGCAT}\n{_LONGCAT}", "", (WEATHER, WEATHER)),
    Case("longcat", "<longcat_tool_call>[] none", "@", ()),
    Case("hy_v3", f"<tool_calls>\n{_HUNYUAN}\n{_HUNYUAN}\n</tool_calls>", "", (WEATHER, WEATHER)),
    Case("hy_v3", f"Hm.<tool_calls:opensource>\n{_HUNYUAN_OPEN}\n</tool_calls:opensource>", "Hm.", (WEATHER,)),
    Case("hy_v3", "<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", "", (NOW,)),
    Case("hy_v3", "<tool_calls>none", "@", ()),
    Case("gemma4", f"<|tool_call>{_GEMMA}<tool_call|><|tool_call>call:now{{}}<tool_call|>", "", (WEATHER, NOW)),
    Case(
        "gemma4",
        '<|tool_call>call:f{b:raw text,a:null,c:{x:[1,<|"|>y<|"|>,{"z":true}]}}<tool_call|>',
        "",
        (("f", '{"b": "raw text", "a": null, "c": {"x": [1, "y", {"z": true}]}}'),),
    ),
    Case("gemma4", '<|tool_call>call:f{b:<|"|>lo', "", (("f", '{"b": "lo'),)),
    Case("gemma4", "<|tool_call>call:f", "@", ()),
    Case(
        "functiongemma",
        f"<start_function_call>{_GEMMA}<end_function_call>".replace('<|"|>', "<escape>"),
        "",
        (WEATHER,),
    ),
    Case("jamba", f"<tool_calls>[{_JSON}, {_JSON}]</tool_calls>", "", (WEATHER, WEATHER)),
    Case("jamba", f"So.\n<tool_calls>\n{_JSON}\n{_JSON}\n</tool_calls>", "So.", (WEATHER, WEATHER)),
    Case("nemotron_json", f"<TOOLCALL>[{_JSON}]</TOOLCALL>", "", (WEATHER,)),
    Case(
        "cohere_command3",
        '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        + WEATHER[1]
        + "}\n]<|END_ACTION|>",
        "",
        (WEATHER,),
    ),
    Case(
        "apertus",
        f'So.<|tools_prefix|>[{{"get_weather": {WEATHER[1]}}}, {{"now": {{}}}}]<|tools_suffix|>',
        "So.",
        (WEATHER, NOW),
    ),
    Case("apertus", '<|tools_prefix|>[{"x', "@", ()),
    Case("apertus", '<|tools_prefix|>[{"now": {}}, {1}]', ", {1}]", (NOW,)),
    Case(
        "step3",
        f"{tagged.STEP3.outer}{_STEP3}<\uff5ctool_call_begin\uff5c>no",
        "<\uff5ctool_call_begin\uff5c>no",
        (WEATHER,),
    ),
    Case("internlm", f"I.<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>", "I.", (WEATHER,)),
    Case("granite-20b-fc", f"<function_call> {_JSON} <function_call> {_JSON}", "", (WEATHER, WEATHER)),
    Case("granite-20b-fc", "A <function_call> is", "@", ()),
    Case("phi4_mini_json", f"functools[{_JSON}, {_JSON}]", "", (WEATHER, WEATHER)),
    Case("phi4_mini_json", "functools is a module", "@", ()),
    Case("xlam", f"[{_JSON}, {_JSON}]", "", (WEATHER, WEATHER)),
    Case("xlam", f"Sure.\n```json\n[{_JSON}]\n```", "Sure.", (WEATHER,)),
    Case("xlam", '[{"name": "Bob"}]', "@", ()),
    Case("hermes", _HERMES, "", (WEATHER,)),
    Case("hermes", f"Let me see.\n\n{_HERMES}\n{_HERMES}\n", "Let me see.", (WEATHER, WEATHER)),
    Case("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call> Done.', " Done.", (NOW,)),
    Case("hermes", '<tool_call>{"name": "now", "id": [1, "}"]}', "", (NOW,)),
    Case("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", (NOW,)),
    Case("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", (NOW,)),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"a": [', "", (("f", '{"a": ['),)),
    Case("hermes", '<tool_call>{"name": "f", "argu', "", (("f", ""),)),
    Case("hermes", "<tool_call>No call.</tool_call> ", "<tool_call>No call.</tool_call> ", ()),
    Case("hermes", f"<tool_call><tool_call>{_JSON}", "<tool_call>", (WEATHER,)),
    Case("hermes", '<tool_call>{"arguments": {"a": 1}}', '<tool_call>{"arguments": {"a": 1}}', ()),
    Case("hermes", f'<tool_call>{_JSON} {{"a": 1}} Done.', ' {"a": 1} Done.', (WEATHER,)),
    Case("hermes", " a <b> </b> <tool", " a <b> </b> <tool", ()),
    Case("granite", f"<|tool_call|>[{_JSON}, {_JSON}]", "", (WEATHER, WEATHER)),
    Case("granite", f"<tool_call>[{_JSON}]", "", (WEATHER,)),
    Case("granite", "<|tool_call|>[]", "<|tool_call|>[]", ()),
    Case("mistral", f"[TOOL_CALLS] [{_JSON}, {_JSON}]", "", (WEATHER, WEATHER)),
    Case("mistral", "Yes.[TOOL_CALLS]now{}[TOOL_CALLS]get_weather" + WEATHER[1], "Yes.", (NOW, WEATHER)),
    Case("mistral", "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}", "", (NOW,)),
    Case("mistral", "[TOOL_CALLS]what now?", "[TOOL_CALLS]what now?", ()),
    Case("llama3_json", _LLAMA, "", (WEATHER,)),
    Case("llama3_json", f"<|python_tag|>{_LLAMA}; {_LLAMA}", "", (WEATHER, WEATHER)),
    Case("llama3_json", '{"type": "function", "name": "now"}', "", (NOW,)),
    Case("llama3_json", '{"answer": 42}', '{"answer": 42}', ()),
    Case("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', ()),
    Case("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", ()),
    Case(
        "deepseek",
        f"Sure.{DEEPSEEK.begin}{DEEPSEEK.call}function{DEEPSEEK.separator}get_weather\n```json\n{WEATHER[1]}\n```{DEEPSEEK.end_of_call}\n"
        f"{DEEPSEEK.call}function{DEEPSEEK.separator}now\n```json\n{{}}\n```{DEEPSEEK.end_of_call}{DEEPSEEK.end}",
        "Sure.",
        (WEATHER, NOW),
    ),
    Case(
        "deepseek",
        f"{DEEPSEEK.begin}{DEEPSEEK.call}get_weather{DEEPSEEK.separator}{WEATHER[1]}{DEEPSEEK.end_of_call}"
        f"{DEEPSEEK.call}now{DEEPSEEK.separator}{{}}{DEEPSEEK.end_of_call}{DEEPSEEK.end}",
        "",
        (WEATHER, NOW),
    ),
    Case("deepseek", f"{DEEPSEEK.begin}{DEEPSEEK.call}no call", f"{DEEPSEEK.begin}{DEEPSEEK.call}no call", ()),
    Case("qwen3_coder", _CODER, "", (WEATHER,)),
    Case(
        "qwen3_coder",
        f"Well:\n{_CODER}\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Well:",
        (WEATHER, NOW),
    ),
    Case(
        "qwen3_coder",
        "<function=f><parameter=b>null</parameter><parameter=a>5</parameter></function>",
        "",
        (("f", '{"b": null, "a": 5}'),),
    ),
    Case(
        "qwen3_coder",
        "<function=f><parameter=b>\nnil\n\n</parameter><parameter=c>\n{'x': True}\n</parameter></function>",
        "",
        (("f", '{"b": "nil", "c": {"x": true}}'),),
    ),
    Case("qwen3_coder", "<function=f><parameter=a>\n1", "", (("f", '{"a": '),)),
    Case("qwen3_coder", "<tool_call>\nnone", "<tool_call>\nnone", ()),
    Case("glm4", f"Well. {_GLM}\n<tool_call>now\n</tool_call>", "Well.", (WEATHER, NOW)),
    Case("glm4", "<tool_call>what is that", "<tool_call>what is that", ()),
    Case("pythonic", f"[{_PYTHON}, now()]", "", (WEATHER, NOW)),
    Case("pythonic", f"<|python_start|>[{_PYTHON}]<|python_end|> Done.", " Done.", (WEATHER,)),
    Case("pythonic", f"<function_calls>\n{_PYTHON}\nnow()\n</function_calls>", "", (WEATHER, NOW)),
    Case(
        "pythonic",
        "[f(a=None, b=\"x\\u00e9\\'\", c={'k': (1, true)})]",
        "",
        (("f", '{"a": null, "b": "x\u00e9\'", "c": "{\'k\': (1, true)}"}'),),
    ),
    Case("pythonic", "[1, 2] is no call", "[1, 2] is no call", ()),
    Case("pythonic", "[f(a=1", "", (("f", ""),)),
]


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def thoughts_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Thought))


def calls_of(events: list[Event]) -> tuple[tuple[str, str], ...]:
    """Name and arguments of every call."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return tuple(calls)
