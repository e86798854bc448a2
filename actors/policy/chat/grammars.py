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

How chat formats write calls, as rules of a grammar.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, UnrenderableError
from penstock.actors.policy.chat.schemas import GrammarError, check_schema, json_rule, text_rule
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.rollout import ToolCall
from penstock.messages.task import GRAMMAR_CHARS_MAX, Grammar

_NAME = r"/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_OTHER_ARGUMENTS_MAX = 8
"""Arguments of a tool whose schema names none."""
ToolSchema = Mapping[str, Any]


class CallSyntax(Protocol):
    """Rules of a grammar for the calls of one chat format."""

    def opening(self, tool: str) -> Sequence[int]:
        """Return the tokens that a call of a tool begins with."""
        ...

    def call(self, rule: str, tool: ToolSchema) -> str:
        """Return the rules of a call of a tool, the first being `rule`."""
        ...

    def rest(self, rule: str, tool: ToolSchema) -> str:
        """Return the rules of what follows `opening`."""
        ...


class PenstockSyntax:
    """`<call name="edit_file"><path>a.py</path></call>`, whose markup is special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, tool: str) -> Sequence[int]:
        """Return the tool's own token, or its name between generic ones."""
        known, tokenizer = special_tokens.call_open(tool), self._tokenizer
        if tokenizer.has_special(known):
            return [tokenizer.special_id(known)]
        start, end = self._id(special_tokens.CALL_OPEN), self._id(special_tokens.NAME_CLOSE)
        return [start, *tokenizer.encode(tool), end]

    def call(self, rule: str, tool: ToolSchema) -> str:
        """Return opening and rest."""
        known = special_tokens.call_open(tool["name"])
        opening = self._named(known, special_tokens.CALL_OPEN, tool["name"])
        return f"{rule}: {opening} {rule}_rest\n{self.rest(f'{rule}_rest', tool)}"

    def rest(self, rule: str, tool: ToolSchema) -> str:
        """Return the arguments and the closing token."""
        arguments = list(self._arguments(tool))
        lines = [f"{rule}_{n}: {text}\n" for n, (text, _) in enumerate(arguments)]
        names = " ".join(f"{rule}_{n}{mark}" for n, (_, mark) in enumerate(arguments))
        return f"{rule}: {names} {self._token(special_tokens.CALL_CLOSE)}\n{''.join(lines)}"

    def _arguments(self, tool: ToolSchema) -> Iterator[tuple[str, str]]:
        """Yield each argument's rule, and how often it may come."""
        parameters = tool.get("parameters") or {}
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            text = "expected an object of properties, and a list of those required"
            raise GrammarError(f"{tool['name']}: {text}")
        is_strict = bool(tool.get("strict"))
        for name, schema in properties.items():
            where = f"{tool['name']}.{name}"
            value = text_rule(
                schema if isinstance(schema, Mapping) else {}, parameters, where, strict=is_strict
            )
            yield self._argument(name, value), "" if name in required else "?"
        if not properties and not is_strict:
            opening = self._token(special_tokens.ARGUMENT_OPEN)
            end = self._token(special_tokens.ARGUMENT_CLOSE)
            name_end = self._token(special_tokens.NAME_CLOSE)
            yield f"{opening} {_NAME} {name_end} /(?s:.*)/ {end}", f"{{0,{_OTHER_ARGUMENTS_MAX}}}"

    def _argument(self, name: str, value: str) -> str:
        known = special_tokens.argument_open(name)
        opening = self._named(known, special_tokens.ARGUMENT_OPEN, name)
        is_known = self._tokenizer.has_special(known)
        end = special_tokens.argument_close(name) if is_known else special_tokens.ARGUMENT_CLOSE
        return f"{opening} {value} {self._token(end)}"

    def _named(self, known: str, generic: str, name: str) -> str:
        quoted = json.dumps(name, ensure_ascii=False)
        if self._tokenizer.has_special(known):
            return self._token(known)
        return f"{self._token(generic)} {quoted} {self._token(special_tokens.NAME_CLOSE)}"

    def _token(self, name: str) -> str:
        return f"<[{self._id(name)}]>"

    def _id(self, name: str) -> int:
        return self._tokenizer.special_id(name)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PROBE = ToolCall(name="probe", arguments={"a": "b"})


class HermesSyntax:
    """`<tool_call>`, a line of JSON with name and arguments, `</tool_call>`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open, self._close = tokenizer.special_id(_OPEN), tokenizer.special_id(_CLOSE)

    @classmethod
    def of(cls, chat: ChatFormat) -> "HermesSyntax | None":
        """Return the syntax if this format writes a call so, else None.

        Raises:
            UnrenderableError: The format does not say how it writes one.

        """
        if not (chat.tokenizer.has_special(_OPEN) and chat.tokenizer.has_special(_CLOSE)):
            return None
        written = chat.tokenizer.decode(chat.render_turn("", [_PROBE], OfferedTools()))
        line = '{"name": "probe", "arguments": {"a": "b"}}'
        return cls(chat.tokenizer) if f"{_OPEN}\n{line}\n{_CLOSE}" in written else None

    def opening(self, tool: str) -> Sequence[int]:
        """Return everything up to the arguments."""
        return [self._open, *self._tokenizer.encode(_head(tool))]

    def call(self, rule: str, tool: ToolSchema) -> str:
        """Return opening and rest."""
        head = json.dumps(_head(tool["name"]))
        return (
            f'{rule}: "\\n"? <[{self._open}]> {head} {rule}_rest\n{self.rest(f"{rule}_rest", tool)}'
        )

    def rest(self, rule: str, tool: ToolSchema) -> str:
        """Return the arguments as JSON and the closing token."""
        parameters = {"type": "object"} | dict(tool.get("parameters") or {})
        arguments = json_rule(parameters, f"{tool['name']}.parameters")
        return f'{rule}: {rule}_json "}}\\n" <[{self._close}]>\n{rule}_json: {arguments}\n'


def _head(tool: str) -> str:
    return f'\n{{"name": {json.dumps(tool)}, "arguments": '


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
