# ruff: noqa: E501  (a line break in a template is part of it)
"""Chat templates in short: what each family's own one does with tools, calls and results, in our words."""

from services.gateway.tool_calls.parsers.deepseek import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)

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
    + CALLS_BEGIN
    + """
{%- for tool in message['tool_calls'] %}"""
    + CALL_BEGIN
    + """{{ tool['type'] + '"""
    + SEPARATOR
    + """' + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```"""
    + CALL_END
    + """' }}
{%- endfor %}"""
    + CALLS_END
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

OF_FAMILY = {
    "hermes": QWEN3,
    "llama3_json": LLAMA31,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK_V3,
    "qwen3_coder": QWEN3_CODER,
    "glm4": GLM45,
    "granite": GRANITE3,
    "pythonic": LLAMA4,
}
