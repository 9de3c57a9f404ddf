"""Chat templates that write tools and calls as well-known models do, without what does not matter here."""

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
