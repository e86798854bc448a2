"""The tokenizer's part of an exported folder.

The built-in chat format as a Jinja template: what `apply_chat_template` and vLLM render with.

It renders the messages and tools of a chat completion as the gateway does. Other systems parse
special tokens in any text, also where a file's content spells one: Penstock's own tokenizer does
not, so only text without such spellings gives equal ids.
"""

import json
from typing import Any, NamedTuple

from penstock.actors.policy import special_tokens
from penstock.actors.policy.hf.config import CONFIG_FILE
from penstock.actors.policy.hf.stored import (
    MODEL_PREFIX,
    TOKENIZER_FILES,
    StoredModel,
    stored_model,
)
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.envs.harness import HARNESS_VERSIONS
from penstock.envs.harness.tools import tools_of, tools_prompt
from penstock.messages.bus import ObjectStore
from penstock.messages.reading.parsing import parse_json

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


_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class TokenizerFiles(NamedTuple):
    """What goes beside the weights."""

    files: dict[str, bytes]
    """Content by name."""
    special_ids: dict[str, Any]
    """What config.json says of the tokenizer."""


async def tokenizer_files(store: ObjectStore, num_tokens_max: int) -> TokenizerFiles:
    """Return the files of a run's tokenizer, with its chat template and how it is sampled from.

    Raises:
        NotFoundError: The run has no tokenizer.
        ValueError: It is no tokenizer.

    """
    stored = await stored_model(store)
    if stored is not None:
        return await _outside_files(store, stored)
    data = await store.get(TOKENIZER_KEY)
    tokenizer = Tokenizer.from_json(data.decode(), TOKENIZER_KEY)
    # The class matters: without it AutoTokenizer picks one by `model_type`, which splits text by
    # rules of its own, and indented code differently.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special_tokens.END,
        "pad_token": special_tokens.PAD,
        "model_max_length": num_tokens_max,
        "clean_up_tokenization_spaces": False,
    }
    special_ids = {
        "eos_token_id": tokenizer.special_id(special_tokens.END),
        "pad_token_id": tokenizer.special_id(special_tokens.PAD),
    }
    files = {
        "tokenizer.json": data,
        "tokenizer_config.json": _json(config),
        "chat_template.jinja": chat_template().encode(),
        "generation_config.json": _json({**special_ids, "do_sample": True, "temperature": 1.0}),
    }
    return TokenizerFiles(files, special_ids)


async def _outside_files(store: ObjectStore, stored: StoredModel) -> TokenizerFiles:
    """Return the files of a run that started from an outside model as that model has them."""
    names = [name for name in TOKENIZER_FILES if name in stored.digests]
    files = {name: await store.get(MODEL_PREFIX + name) for name in names}
    config = parse_json(await store.get(MODEL_PREFIX + CONFIG_FILE), dict[str, Any], CONFIG_FILE)
    return TokenizerFiles(files, {name: config[name] for name in _SPECIAL_IDS if name in config})


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode()
