"""Chat templates that write tools and calls as well-known models do, without what does not matter here."""

from cocoa_integrations.tool_calling.call_format import CallFormat

LLAMA_CALLS = CallFormat(before='{"name": "', between='", "parameters": ', after="}", several=False)
"""The calls of Llama 3.1 to 3.3: the answer is a single one."""
MISTRAL_CALLS = CallFormat("[TOOL_CALLS] [", '{"name": "', '", "arguments": ', "}", ", ", "]")
"""Those of Mistral's models up to 2024."""

PARAMETERS = {
    "type": "object",
    "properties": {"up": {"type": "boolean"}, "unit": {"enum": ["m", "km"]}},
    "required": ["up", "unit"],
}
MOVE = {"type": "function", "function": {"name": "move", "description": "Move.", "parameters": PARAMETERS}}

HERMES = """{% if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Call with <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Of Qwen 2.5."""

LLAMA = """{% if tools %}<|system|>
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|ipython|>
{{ message.content | tojson }}
{% elif message.tool_calls %}{% if message.tool_calls | length != 1 %}
{{ raise_exception("This model only supports single tool-calls at once!") }}{% endif %}
{% set call = message.tool_calls[0].function %}<|assistant|>
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{% else %}<|{{ message.role }}|>
{{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
"""Of Llama 3.1."""

MISTRAL = """{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]{% elif
message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}{% if call.id | length != 9 %}
{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{% endfor %}]{% elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id":
"{{ message.tool_call_id }}"}[/TOOL_RESULTS]{% elif message.role == 'assistant' %}{{ message.content }}{% else %}
{{ raise_exception("Only user and assistant roles are supported!") }}{% endif %}{% endfor %}"""
"""Of Mistral 7B v0.3."""


def _template(calls: str, *, before: str = "", thought: str = "") -> str:
    """A template whose assistant writes a thought, ``message.content`` and then calls; ``before`` opens an answer."""
    return (
        "{% for tool in tools or [] %}<|tool|>{{ tool | tojson }}\n{% endfor %}"
        "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
        f"{thought}{{{{ message.content }}}}{calls}{{% else %}}{{{{ message.content }}}}{{% endif %}}<|end|>\n"
        f"{{% endfor %}}{{% if add_generation_prompt %}}<|assistant|>{before}{{% endif %}}"
    )


_EACH = "{% for call in message.tool_calls or [] %}{% set call = call.function %}"
_ITEMS = "{% for key, value in call.arguments.items() %}"
_VALUE = "{{ value if value is string else value | tojson }}"

DERIVED = {
    "name and JSON": _template(
        f"{_EACH}[TOOL_CALLS]{{{{ call.name }}}}[ARGS]{{{{ call.arguments | tojson }}}}{{% endfor %}}"
    ),
    "numbered": _template(
        "{% if message.tool_calls %}<|calls|>{% for call in message.tool_calls %}<|call|>functions."
        "{{ call.function.name }}:{{ loop.index0 }}<|arguments|>{{ call.function.arguments | tojson }}<|/call|>"
        "{% endfor %}<|/calls|>{% endif %}"
    ),
    "a digit in a tag": _template(
        f"{_EACH}<|step 0|>{{{{ call.name }}}}<|arguments|>{{{{ call.arguments | tojson }}}}<|done|>{{% endfor %}}"
    ),
    "with ids": _template(
        "{% if message.tool_calls %}<|calls|>{% for call in message.tool_calls %}<|id|>{{ call.id }}<|name|>"
        "{{ call.function.name }}<|arguments|>{{ call.function.arguments | tojson }}<|done|>{% endfor %}<|/calls|>"
        "{% endif %}"
    ),
    "other keys": _template(
        '{% if message.tool_calls %}<|action|>[{% for call in message.tool_calls %}\n  {"id": "{{ loop.index0 }}"'
        ', "tool_name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
        "{% if not loop.last %},{% endif %}{% endfor %}\n]<|/action|>{% endif %}"
    ),
    "name as key": _template(
        '{% if message.tool_calls %}<|calls|>[{% for call in message.tool_calls %}{"{{ call.function.name }}": '
        "{{ call.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]<|/calls|>{% endif %}"
    ),
    "parameters": _template(
        f"{_EACH}\n<tool_call>\n<function={{{{ call.name }}}}>\n{_ITEMS}<parameter={{{{ key }}}}>\n{_VALUE}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    ),
    "keys and values": _template(
        f"{_EACH}<tool_call>{{{{ call.name }}}}{_ITEMS}<arg_key>{{{{ key }}}}</arg_key><arg_value>{_VALUE}</arg_value>"
        "{% endfor %}</tool_call>{% endfor %}",
        before="<think>",
        thought="<think>{{ message.reasoning_content }}</think>",
    ),
    "kinds": _template(
        "{% if message.tool_calls %}<|calls|>" + _EACH + '<|invoke name="{{ call.name }}">' + _ITEMS
        + '<|parameter name="{{ key }}" string="{{ \'true\' if value is string else \'false\' }}">' + _VALUE
        + "</|parameter>{% endfor %}</|invoke>{% endfor %}<|/calls|>{% endif %}"
    ),
    "keyword arguments": _template(
        "{% if message.tool_calls %}<|calls|>[{% for call in message.tool_calls %}{{ call.function.name }}("
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|/calls|>"
        "{% endif %}"
    ),
    "python list": _template(
        "{% if message.tool_calls %}[{% for call in message.tool_calls %}{{ call.function.name }}("
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
    ),
    "own quotes": _template(
        f"{_EACH}<|call>call:{{{{ call.name }}}}{{{{ '{{' }}}}{_ITEMS}{{{{ key }}}}:{{% if value is string %}}"
        "<|q|>{{ value }}<|q|>{% else %}{{ value | tojson }}{% endif %}{% if not loop.last %},{% endif %}"
        "{% endfor %}}<call|>{% endfor %}"
    ),
    "channels": _template(
        "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %} to=functions.{{ call.name }}"
        "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}{% else %}{% if message.reasoning_content %}"
        "<|channel|>analysis<|message|>{{ message.reasoning_content }}<|end|><|assistant|>{% endif %}<|channel|>final"
        "<|message|>{{ message.content }}{% endif %}",
    ).replace("{{ message.content }}{% if message.tool_calls %}", "{% if message.tool_calls %}"),
    "ends of parts": _template(
        "<|close|>text<|sep|>{% if message.tool_calls %}<|open|>tools<|sep|>{% for call in message.tool_calls %}"
        "<|open|>{{ call.function.name }}<|sep|>{{ call.function.arguments | tojson }}<|close|>call<|sep|>{% endfor %}"
        "<|close|>tools<|sep|>{% endif %}<|close|>answer<|sep|>"
    ),
    "end before calls": _template(
        "{% for call in message.tool_calls or [] %}<|end|>\n\nfunction call<|role|>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}'
    ),
    "end before a call": _template(
        "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}<|end|>\n\nfunction call<|role|>\n"
        '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}{% endif %}'
    ),
    "id after the arguments": _template(
        "{% for call in message.tool_calls or [] %}<|call|>{{ call.function.name }}<|arguments|>"
        "{{ call.function.arguments | tojson }}<|id|>{{ call.id }}<|done|>{% endfor %}"
    ),
    "code": _template(
        "{% if message.tool_calls %}```tool_code{{ '\\n' }}"
        "{% for call in message.tool_calls %}{{ call.function.name }}("
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}){{ '\\n' }}{% endfor %}```{% endif %}"
    ),
    "recipient": _template(
        f"{_EACH}>>>{{{{ call.name }}}}{{{{ '\\n' }}}}{{{{ call.arguments | tojson }}}}{{% endfor %}}"
    ),
    "reasoning in blocks": _template(
        f"{_EACH}[TOOL_CALLS]{{{{ call.name }}}}[ARGS]{{{{ call.arguments | tojson }}}}{{% endfor %}}"
    ).replace(
        "{{ message.content }}{% for",
        "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
        "{% if block.type == 'thinking' %}[THINK]{{ block.thinking }}[/THINK]{% else %}{{ block.text }}{% endif %}"
        "{% endfor %}{% endif %}{% for",
    ),
    "arguments as text": _template(
        "{% if message.tool_calls %}<|calls|>{% for call in message.tool_calls %}<|call|>"
        "{{ call.function.name + '\\n' + call.function.arguments }}{% endfor %}{% endif %}"
    ),
}  # fmt: skip
"""Templates of each way in which calls are written."""
