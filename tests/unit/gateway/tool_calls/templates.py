# ruff: noqa: E501  (a line break in a template is part of it)
"""Chat templates in short: what each family's own one does with tools, calls and results, in our words."""

from services.gateway.tool_calls.parsers.sections import DEEPSEEK

QWEN3 = """
{%- if tools %}<|im_start|>system
{{ messages[0].content + '\n' if messages[0].role == 'system' }}<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools> Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}
{{- message.content if message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA31 = """{{ bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}<|start_header_id|>system<|end_header_id|>

{{ 'Environment: ipython\n' if tools is not none }}{{ system }}
{%- for tool in tools or [] %}
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{{ tool | tojson(indent=4) }}
{%- endfor %}<|eot_id|>
{%- for message in rest %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == 'tool' or message.role == 'ipython' %}<|start_header_id|>ipython<|end_header_id|>

{{ {'output': message.content} | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% for part in message.content %}{{ part }}{% endfor %}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """{{ bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- for message in (messages[1:] if system else messages) %}
{%- if message.role == 'user' %}
{%- if tools is not none %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ system + '\n\n' if system and loop.first }}{{ message.content }}[/INST]
{%- elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ ', ' if not loop.last }}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'assistant' %} {{ message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""

DEEPSEEK_V3 = (
    """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ message['content'] }}{% endif %}
{%- if message['role'] == 'user' %}<User>{{ message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] %}<Assistant>{{ message['content'] or '' }}"""
    + DEEPSEEK.begin
    + """
{%- for tool in message['tool_calls'] %}"""
    + DEEPSEEK.call
    + """{{ tool['type'] + '"""
    + DEEPSEEK.separator
    + """' + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```"""
    + DEEPSEEK.end_of_call
    + """' }}
{%- endfor %}"""
    + DEEPSEEK.end
    + """{% elif message['role'] == 'assistant' %}<Assistant>{{ message['content'] }}{% endif %}
{%- if message['role'] == 'tool' %}<output>{{ message['content'] }}</output>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<Assistant><think>
{% endif %}{# it ends </think> #}"""
)

QWEN3_CODER = """{% for message in messages %}
{%- if loop.first and tools %}<|im_start|>system
{{ message.content + '\n' if message.role == 'system' }}
{%- for tool in tools %}<function><name>{{ tool.function.name }}</name>
{%- for name, field in tool.function.parameters.properties|items %}<parameter><name>{{ name }}</name><type>{{ field.type | string }}</type></parameter>{% endfor %}</function>
{% endfor %}Write <function=example><parameter=key>value</parameter></function><|im_end|>
{% elif message.role == 'system' %}<|im_start|>system
{{ message.content }}<|im_end|>
{% endif %}
{%- if message.role == 'assistant' and message.tool_calls is defined and message.tool_calls is iterable %}<|im_start|>assistant
{{- '\n' + message.content | trim if message.content is string }}
{%- for call in message.tool_calls %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments|items %}<parameter={{ name }}>
{{ value | string }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content + '<|im_end|>' }}
{% endif %}
{%- endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""

GLM45 = """[gMASK]<sop>
{%- for tool in tools or [] %}<|system|>
<tools>{{ tool | tojson }}</tools> Write <tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
<think></think>{{ '\n' + m.content.strip() if m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{%- set args = call.function.arguments or {} %}
{%- for k, v in args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson if v is not string else v }}</arg_value>
{%- endfor %}
</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>
{%- else %}<|{{ m.role }}|>
{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}"""

GRANITE3 = """
{%- for tool in tools or [] %}{{ '<|start_of_role|>tools<|end_of_role|>' + tool | tojson }}<|end_of_text|>
{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}<|start_of_role|>assistant<|end_of_role|><|tool_call|>
{%- for call in message.tool_calls %}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{% endfor %}<|end_of_text|>
{% else %}{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

GRANITE_20B_FC = """{%- if tools %}SYSTEM: You have access to the following function calls:
{%- for tool in tools %} <|function|>{{ tool.function | tojson }}{% endfor %}
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}SYSTEM: {{ message.content }}
{% elif message.role == 'user' %}USER: {{ message.content }}
{% elif message.role == 'assistant' and message.tool_calls %}ASSISTANT:
{%- for call in message.tool_calls %} <function_call> {"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}
{% elif message.role == 'assistant' %}ASSISTANT: {{ message.content }}
{% elif message.role == 'tool' %}FUNCTION RESPONSE: {{ message.content }}
{% endif %}
{%- endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""

LLAMA4 = """{%- for message in messages %}
{%- if loop.first and tools %}<|header_start|>system<|header_end|>
{{ message.content if message.role == 'system' }} Write [func_name1(params_name1=params_value1)].
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|eot|>
{%- elif message.role == 'system' %}<|header_start|>system<|header_end|>
{{ message.content }}<|eot|>
{%- endif %}
{%- if message.role == 'assistant' and message.tool_calls %}<|header_start|>assistant<|header_end|>

<|python_start|>[
{%- for call in message.tool_calls %}{{ call.function.name }}(
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}
{%- endfor %}]<|python_end|><|eot|>
{%- elif message.role != 'system' %}<|header_start|>{{ message.role }}<|header_end|>

{{ message.content }}<|eot|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "Be helpful.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

GEMMA2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}<start_of_turn>
{{- 'model' if message['role'] == 'assistant' else message['role'] }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

KIMI_K2 = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{% endif %}
{%- for message in messages %}<|im_{{ message.role }}|>{{ message.get('name') or message.role }}<|im_middle|>
{%- if message.role == 'tool' %}## Return of {{ message.tool_call_id }}
{% elif message.role == 'assistant' %}<think>{{ message.get('reasoning_content', '') }}</think>{% endif %}
{{- message.content or '' }}
{%- if message.get('tool_calls') %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls %}<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

HARMONY = """{%- macro type_of(spec) -%}{% if spec.enum %}{{ spec.enum | map('tojson') | join(' | ') }}{% else %}{{ spec.type | default('any') }}{% endif %}{%- endmacro -%}
{%- set effort = reasoning_effort | default('medium') -%}
<|start|>system<|message|>Reasoning: {{ effort }} in {{ strftime_now('%Y') }}<|end|>
{%- set rest = messages[1:] if messages[0].role in ['developer', 'system'] else messages %}
{%- if tools or rest | length < messages | length %}<|start|>developer<|message|>{{ messages[0].content if rest | length < messages | length }}
{%- for tool in tools or [] %}
type {{ tool.function.name }} = (_: { {%- for name, spec in tool.function.parameters.properties.items() %}{{ name }}: {{ type_of(spec) }}, {% endfor %}}) => any;
{%- endfor %}<|end|>{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- if message.content and message.thinking %}{{ raise_exception('Cannot pass both content and thinking!') }}{% endif %}
{%- if message.content or message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- set last.name = call.name %}
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

LFM2 = """{{- bos_token -}}{%- set ns = namespace(system='') -%}
{%- if messages[0]['role'] == 'system' -%}{%- set ns.system = messages[0]['content'] -%}{%- set messages = messages[1:] -%}{%- endif -%}
{%- if tools -%}{%- set ns.system = ns.system + '\nList of tools: <|tool_list_start|>[' -%}
{%- for tool in tools -%}{%- set ns.system = ns.system + (tool | tojson) + (', ' if not loop.last else '') -%}{%- endfor -%}
{%- set ns.system = ns.system + ']<|tool_list_end|>' -%}{%- endif -%}
{%- if ns.system -%}{{ '<|im_start|>system\n' + ns.system + '<|im_end|>\n' }}{%- endif -%}
{%- for message in messages -%}{%- set content = message['content'] -%}
{%- if message['role'] == 'tool' -%}{%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' -%}{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}
{%- endfor -%}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""

GEMMA4 = """{%- macro argument(value) -%}
{%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is mapping -%}{ {%- for key, inner in value | dictsort -%}{{ ',' if not loop.first }}{{ key }}:{{ argument(inner) }}{%- endfor -%} }
{%- elif value is sequence -%}[{%- for inner in value -%}{{ ',' if not loop.first }}{{ argument(inner) }}{%- endfor -%}]
{%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{{ bos_token }}{% if tools or enable_thinking or messages[0].role in ['system', 'developer'] %}<|turn>system
{{ '<|think|>' if enable_thinking is defined and enable_thinking }}{{ messages[0].content | trim if messages[0].role == 'system' }}
{%- for tool in tools or [] %}<|tool>declaration:{{ tool.function.name }}{{ argument(tool.function.parameters) }}<tool|>{% endfor %}<turn|>
{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}<|tool_response>response:{{ message.name | default('unknown') }}{value:{{ argument(message.content) }}}<tool_response|>
{%- continue %}{% endif %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{{ argument(call.function.arguments) }}<tool_call|>{% endfor %}
{{- (message.content or '').split('<channel|>')[-1] | trim }}<turn|>
{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{{ '<|channel>thought\n<channel|>' if not enable_thinking | default(false) }}{% endif %}"""

MINIMAX_M2 = """{%- macro shown(value) -%}{{ value if value is string else value | tojson(ensure_ascii=False) }}{%- endmacro -%}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}]~!b[]~b]system
{{ messages[0].content if messages[0].role == 'system' else 'Be helpful.' }}
{%- for tool in tools or [] %}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>
{%- endfor %}[e~[
{% for message in messages %}
{%- if message.role == 'assistant' %}]~b]ai
{% if message.reasoning_content and loop.index0 > ns.last_user %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{ '\n<minimax:tool_call>' if loop.first }}
<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">{{ shown(value) }}</parameter>
{% endfor %}</invoke>{{ '\n</minimax:tool_call>' if loop.last }}
{%- endfor %}[e~[
{% elif message.role == 'tool' %}{{ ']~b]tool' if loop.previtem.role != 'tool' }}
<response>{{ message.content }}</response>{{ '[e~[\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif message.role == 'user' %}]~b]user
{{ message.content }}[e~[
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""

DEEPSEEK_V32 = """{%- set mark = '\uff5cDSML\uff5c' %}{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}<User>{{ message.content }}
{%- elif message.role == 'tool' %}<result>{{ message.content }}</result>
{%- else %}<Assistant>{{ message.get('reasoning_content', '') }}</think>{{ message.content or '' }}
{%- if message.tool_calls %}
<{{ mark }}function_calls>
{%- for call in message.tool_calls %}
<{{ mark }}invoke name="{{ call.function.name }}">
{%- for key, value in call.function.arguments.items() %}
<{{ mark }}parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">{{ value if value is string else value | tojson }}</{{ mark }}parameter>
{%- endfor %}
</{{ mark }}invoke>
{%- endfor %}
</{{ mark }}function_calls>{% endif %}
{%- endif %}
{%- if loop.first %}{% for tool in tools or [] %}
{{ tool.function | tojson }}{% endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<Assistant>{{ '<think>' if thinking is not defined or thinking else '</think>' }}{% endif %}"""

SEED_OSS = """{%- for message in messages %}
{%- if loop.first and tools %}<seed:bos>system
{% for tool in tools %}Function {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }}){% endfor %} Write <seed:tool_call><function=f><parameter=k>v</parameter></function></seed:tool_call><seed:eos>{% endif %}<seed:bos>{{ message.role }}
{% if message.role == 'assistant' and message.reasoning_content %}<seed:think>{{ message.reasoning_content }}</seed:think>{% endif %}
{%- generation %}{{ message.content or '' }}{% endgeneration %}
{%- for call in message.tool_calls or [] %}
<seed:tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</function>
</seed:tool_call>{% endfor %}<seed:eos>
{%- endfor %}
{%- if add_generation_prompt %}<seed:bos>assistant
{% if thinking_budget is defined and thinking_budget == 0 %}<seed:think></seed:think>{% endif %}{% endif %}"""

# What templates use of jinja2.
FEATURES = """{% macro caller_of() %}{{ caller('in') }}{% endmacro %}{%- set ns = namespace(found=none, count=0) %}
{%- for message in messages[::-1] %}{% if message.role == 'user' and not ns.found %}{% set ns.found = message.content %}{% break %}{% endif %}{% endfor %}
{%- for index in range(messages | length - 1, -1, -1) %}{% set ns.count = ns.count + index %}{% endfor %}
{{- ns.found ~ '|' ~ ns.count ~ strftime_now('|%Y') }}
{{ tools | tojson(indent=2, sort_keys=True) }}
{{ {'b': '<é>', 'a': [1.5, none, true]} | tojson(ensure_ascii=True, separators=(',', ':')) }}
{{ dict(a=1) | items | list }} {{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('/') }}
{% set block %}  set {{ messages[0].content[3:-1] | upper }} {% endset %}{{ block.strip().title() }}
{% filter replace('a', 'o') %}a{% call(x) caller_of() %}{{ x }}{% endcall %}{% endfilter %}
{% generation %}{{ (messages | last).content.split(' ')[0].lstrip('M') }}{% endgeneration %}
{{ documents is none }} {{ enable_thinking is defined and enable_thinking }}{{ add_generation_prompt }}"""

HUNYUAN = """{%- set T = ':6124c78e' %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<assistant><think{{ T }}>{{ message.reasoning_content or '' }}</think{{ T }}>{{ message.content or '' }}
{%- if message.tool_calls %}{{ '<tool_calls' + T + '>' }}
{%- for call in message.tool_calls %}
<tool_call{{ T }}>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{ '<arg_key' + T + '>' + key + '</arg_key' + T + '>' }}<arg_value{{ T }}>{{ value if value is string else value | tojson }}</arg_value{{ T }}>{% endfor %}</tool_call{{ T }}>
{%- endfor %}</tool_calls{{ T }}>{% endif %}
{%- else %}<{{ message.role }}>{{ message.content }}{% endif %}
{%- if loop.first %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<assistant><think{{ T }}>{% endif %}"""

OF_FAMILY = {
    "hy_v3": HUNYUAN,
    "deepseek_v32": DEEPSEEK_V32,
    "gemma4": GEMMA4,
    "kimi_k2": KIMI_K2,
    "minimax_m2": MINIMAX_M2,
    "openai": HARMONY,
    "seed_oss": SEED_OSS,
    "hermes": QWEN3,
    "llama3_json": LLAMA31,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK_V3,
    "qwen3_coder": QWEN3_CODER,
    "glm4": GLM45,
    "granite": GRANITE3,
    "granite-20b-fc": GRANITE_20B_FC,
    "pythonic": LLAMA4,
}
