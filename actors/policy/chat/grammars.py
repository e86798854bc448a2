"""Grammars of turns, in llguidance's Lark syntax: JSON of a schema, and calls of offered tools.

A route asks here for the text; the generator compiles it to token masks. JSON schemas are checked
for their size first, so that nothing recursive ever meets a hostile one.

Calls follow the chat format's own syntax. Of `penstock`, whose markup is special tokens:

    start: call | text call*           (required, auto)
    call:  <[open]> argument* <[close]>
    argument: <[open]> value <[close]>   required ones in the schema's order, others optional

A value is plain text where the schema says string, JSON where it says another type. Of formats of
published models, those that write calls as JSON between `<tool_call>` tokens (Qwen3 and others of
Hermes' syntax) have grammars; the rest refuse by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.call_syntax import CallSyntax, HermesSyntax, PenstockSyntax
from penstock.actors.policy.chat.format import ChatFormat, UnrenderableError
from penstock.actors.policy.chat.schemas import GrammarError, check_schema, json_rule
from penstock.messages.task import GRAMMAR_CHARS_MAX, Grammar

NUM_CALLS_MAX = 16
"""Calls in one turn."""


def grammar_for_schema(schema: Mapping[str, Any], *, where: str = "schema") -> Grammar:
    """Return the grammar of a turn that is one JSON value of a schema, and nothing else.

    Args:
        schema: a JSON Schema; `{"type": "object"}` is any object.
        where: the request's field, for errors.

    Raises:
        GrammarError: It is too large or nested too deep; names `where`.

    """
    check_schema(schema, where)
    return _bounded(f"start: {json_rule(schema, where)}\n", where)


def grammar_for_calls(
    chat: ChatFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: str = "auto",
    *,
    parallel: bool = True,
    answer: Mapping[str, Any] | None = None,
) -> Grammar:
    """Return the grammar of a turn that calls tools as their schemas say.

    Args:
        chat: the policy's format.
        tools: functions: name, parameters, and strict, where arguments must follow the schema.
        choice: `auto` (text, then any calls), `required` (at least one call and no text), or a
            tool's name: the turn is that one call, whose opening is forced.
        parallel: whether a turn may have several calls.
        answer: where the choice is `auto`: a turn is calls, or one JSON value of this schema.

    Raises:
        GrammarError: No such tool, a schema that the format cannot follow, or a format that has no
            grammar; the text names what.

    """
    syntax = call_syntax(chat)
    named = [tool for tool in tools if tool["name"] == choice]
    for index, tool in enumerate(tools):
        check_schema(tool.get("parameters") or {}, f"tools[{index}].function.parameters")
    if choice in {"auto", "required"}:
        rules = [syntax.call(f"call{n}", tool) for n, tool in enumerate(tools)]
        any_call = " | ".join(f"call{n}" for n in range(len(tools)))
        most = NUM_CALLS_MAX if parallel else 1
        calls = f"(call){{1,{most}}}" if most > 1 else "call"
        start = calls if choice == "required" else f"TEXT {calls} | TEXT"
        text = "TEXT: /(?s:.*)/\n"
        if answer is not None and choice == "auto":
            check_schema(answer, "response_format")
            start, text = f"{calls} | answer", f"answer: {json_rule(answer, 'response_format')}\n"
        head = f"start: {start}\ncall: {any_call}\n{text}"
        return _bounded(head + "".join(rules), "tools")
    if not named:
        raise GrammarError(
            f"tool_choice: expected auto, required or an offered tool, not {choice!r}"
        )
    rest = syntax.rest("rest", named[0])
    return _bounded(f"start: rest\n{rest}", "tools", syntax.opening(choice))


def call_syntax(chat: ChatFormat) -> CallSyntax:
    """Return how a chat format writes calls.

    Raises:
        GrammarError: In a way that has no grammar here.

    """
    if isinstance(chat, PenstockChat):
        return PenstockSyntax(chat.tokenizer)
    try:
        syntax = HermesSyntax.of(chat)
    except UnrenderableError:
        syntax = None
    if syntax is None:
        raise GrammarError(
            "tool_choice: this model's chat format has no grammar for calls; use auto"
        )
    return syntax


def _bounded(text: str, where: str, prefix_ids: Sequence[int] = ()) -> Grammar:
    if len(text) > GRAMMAR_CHARS_MAX:
        raise GrammarError(f"{where}: its grammar has more than {GRAMMAR_CHARS_MAX} characters")
    return Grammar(text=text, prefix_ids=tuple(prefix_ids))
