"""The built-in chat format as a Jinja template: what `apply_chat_template` and vLLM render with.

It renders the messages and tools of a chat completion as the gateway does. Other systems parse
special tokens in any text, also where a file's content spells one: Penstock's own tokenizer does
not, so only text without such spellings gives equal ids.
"""

import json

from penstock.actors.policy import special_tokens
from penstock.envs.harness import HARNESS_VERSIONS
from penstock.envs.harness.versions import tools_of, tools_prompt

_TEMPLATE = """\
{%- set role_tokens = @ROLES@ -%}
{%- set argument_names = @ARGUMENTS@ -%}
{%- set known_tools = @TOOLS@ -%}
{%- set versions = @VERSIONS@ -%}
{%- macro text_of(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- elif content -%}{%- for part in content -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro call_of(call) -%}
    {%- if call.arguments is string -%}
        {{- raise_exception('tool_calls: arguments must be an object, not its JSON text') -}}
    {%- endif -%}
    {{- '@CALL_OPEN@' ~ call.name ~ ('">' if call.name in known_tools else '@NAME_CLOSE@') -}}
    {%- for name, value in (call.arguments or {}).items() -%}
        {%- set text = value if value is string else value | tojson(separators=(',', ':')) -%}
        {%- if name in argument_names -%}{{- '<' ~ name ~ '>' ~ text ~ '</' ~ name ~ '>' -}}
        {%- else -%}{{- '@ARGUMENT_OPEN@' ~ name ~ '@NAME_CLOSE@' ~ text ~ '@ARGUMENT_CLOSE@' -}}
        {%- endif -%}
    {%- endfor -%}
    {{- '@CALL_CLOSE@' -}}
{%- endmacro -%}
{%- if tools -%}
    {%- set offered = tools | map(attribute='function') | list -%}
    {%- set names = offered | map(attribute='name') | sort | list -%}
    {%- set found = namespace(words=none, lines=[]) -%}
    {%- for version in versions -%}
        {%- if names == version.tools -%}{%- set found.words = version.words -%}{%- endif -%}
    {%- endfor -%}
    {%- if found.words is none -%}
        {%- for tool in offered if tool.name not in known_tools -%}
            {%- set arguments = (tool.parameters or {}).properties or {} -%}
            {%- set line = tool.name ~ '(' ~ arguments.keys() | join(', ') ~ '): ' -%}
            {%- set found.lines = found.lines + [line ~ (tool.description or '')] -%}
        {%- endfor -%}
        {%- set found.words = 'Further tools:\\n' ~ found.lines | join('\\n') if found.lines -%}
    {%- endif -%}
    {%- if found.words -%}{{- role_tokens.system ~ found.words ~ '@END@' -}}{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in role_tokens -%}
        {{- raise_exception('messages: there is no role ' ~ message.role) -}}
    {%- endif -%}
    {{- role_tokens[message.role] ~ text_of(message.content) -}}
    {%- for call in message.tool_calls or [] -%}{{- call_of(call.function or call) -}}{%- endfor -%}
    {{- '@END@' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- role_tokens.assistant -}}{%- endif -%}
"""
_ROLES = {
    "system": special_tokens.SYSTEM,
    "developer": special_tokens.SYSTEM,
    "user": special_tokens.USER,
    "assistant": special_tokens.ASSISTANT,
    "tool": special_tokens.TOOL,
}


def chat_template() -> str:
    """Return the template of the built-in format."""
    versions = [
        {"tools": sorted(tools_of(version)), "words": tools_prompt(version)}
        for version in HARNESS_VERSIONS
    ]
    values = {
        "ROLES": json.dumps(_ROLES),
        "ARGUMENTS": json.dumps(special_tokens.ARGUMENT_NAMES),
        "TOOLS": json.dumps(special_tokens.TOOL_NAMES),
        "VERSIONS": json.dumps(versions),
        "CALL_OPEN": special_tokens.CALL_OPEN,
        "CALL_CLOSE": special_tokens.CALL_CLOSE,
        "NAME_CLOSE": special_tokens.NAME_CLOSE,
        "ARGUMENT_OPEN": special_tokens.ARGUMENT_OPEN,
        "ARGUMENT_CLOSE": special_tokens.ARGUMENT_CLOSE,
        "END": special_tokens.END,
    }
    text = _TEMPLATE
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
