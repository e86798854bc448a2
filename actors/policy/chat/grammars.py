"""Grammars for turns, in llguidance's Lark syntax: JSON of a schema, or calls of offered tools.

Gateway routes build the text of a grammar here, and the generator compiles it to token masks. JSON
schemas are first checked for size, so that no recursive code ever sees a hostile one.

Calls follow the syntax of the chat format. In `penstock`, whose markup is special tokens:

    start: call | text call*           (required, auto)
    call:  <[open]> argument* <[close]>
    argument: <[open]> value <[close]>   required ones in the schema's order, others optional

A value is plain text if the schema says string, and JSON for any other type. Among the formats of
published models, those that write calls as JSON between `<tool_call>` tokens (Hermes syntax, e.g.
Qwen3) have grammars; the others are refused with an error.
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
"""Maximum arguments of a tool whose schema declares none."""
ToolSchema = Mapping[str, Any]


class CallSyntax(Protocol):
    """Grammar rules for calls in one chat format."""

    def opening(self, tool: str) -> Sequence[int]:
        """Return the ids with which a call of a tool begins."""
        ...

    def call(self, rule: str, tool: ToolSchema) -> str:
        """Return the rules for a whole call of a tool; the first rule is named `rule`."""
        ...

    def rest(self, rule: str, tool: ToolSchema) -> str:
        """Return the rules for the part of a call after `opening`."""
        ...


class PenstockSyntax:
    """Calls like `<call name="edit_file"><path>a.py</path></call>`, with special-token markup."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, tool: str) -> Sequence[int]:
        """Return the token of a known tool, or its spelled-out name between generic tokens."""
        known, tokenizer = special_tokens.call_open(tool), self._tokenizer
        if tokenizer.has_special(known):
            return [tokenizer.special_id(known)]
        start, end = self._id(special_tokens.CALL_OPEN), self._id(special_tokens.NAME_CLOSE)
        return [start, *tokenizer.encode(tool), end]

    def call(self, rule: str, tool: ToolSchema) -> str:
        """Return the rules for the opening and the rest of a call."""
        known = special_tokens.call_open(tool["name"])
        opening = self._named(known, special_tokens.CALL_OPEN, tool["name"])
        return f"{rule}: {opening} {rule}_rest\n{self.rest(f'{rule}_rest', tool)}"

    def rest(self, rule: str, tool: ToolSchema) -> str:
        """Return the rules for the arguments and the closing token."""
        arguments = list(self._arguments(tool))
        lines = [f"{rule}_{n}: {text}\n" for n, (text, _) in enumerate(arguments)]
        names = " ".join(f"{rule}_{n}{mark}" for n, (_, mark) in enumerate(arguments))
        return f"{rule}: {names} {self._token(special_tokens.CALL_CLOSE)}\n{''.join(lines)}"

    def _arguments(self, tool: ToolSchema) -> Iterator[tuple[str, str]]:
        """Yield the rule of each argument and its repetition mark ("" or "?")."""
        parameters = tool.get("parameters") or {}
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            text = "expected `properties` to be an object and `required` a list"
            raise GrammarError(f"{tool['name']}: {text}")
        is_strict = bool(tool.get("strict"))
        for name, schema in properties.items():
            where = f"{tool['name']}.{name}"
            value = text_rule(
                schema if isinstance(schema, Mapping) else {}, parameters, where, strict=is_strict
            )
            yield self._argument(name, value), "" if name in required else "?"
        # A schema without properties allows any arguments; bounded, so that the turn ends.
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
    """Calls as a line of JSON with name and arguments between `<tool_call>` and `</tool_call>`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open, self._close = tokenizer.special_id(_OPEN), tokenizer.special_id(_CLOSE)

    @classmethod
    def of(cls, chat: ChatFormat) -> "HermesSyntax | None":
        """Return the syntax if this format writes calls in it, else None.

        Raises:
            UnrenderableError: The format cannot render a call.

        """
        # Rendering a sample call is more reliable than a list of formats by name.
        if not (chat.tokenizer.has_special(_OPEN) and chat.tokenizer.has_special(_CLOSE)):
            return None
        written = chat.tokenizer.decode(chat.render_turn("", [_PROBE], OfferedTools()))
        line = '{"name": "probe", "arguments": {"a": "b"}}'
        return cls(chat.tokenizer) if f"{_OPEN}\n{line}\n{_CLOSE}" in written else None

    def opening(self, tool: str) -> Sequence[int]:
        """Return the ids up to the arguments."""
        return [self._open, *self._tokenizer.encode(_head(tool))]

    def call(self, rule: str, tool: ToolSchema) -> str:
        """Return the rules for the opening and the rest of a call."""
        head = json.dumps(_head(tool["name"]))
        return (
            f'{rule}: "\\n"? <[{self._open}]> {head} {rule}_rest\n{self.rest(f"{rule}_rest", tool)}'
        )

    def rest(self, rule: str, tool: ToolSchema) -> str:
        """Return the rules for the arguments as JSON and the closing token."""
        parameters = {"type": "object"} | dict(tool.get("parameters") or {})
        arguments = json_rule(parameters, f"{tool['name']}.parameters")
        return f'{rule}: {rule}_json "}}\\n" <[{self._close}]>\n{rule}_json: {arguments}\n'


def _head(tool: str) -> str:
    return f'\n{{"name": {json.dumps(tool)}, "arguments": '


NUM_CALLS_MAX = 16
"""Maximum calls in one turn."""


def grammar_for_schema(schema: Mapping[str, Any], *, where: str = "schema") -> Grammar:
    """Return the grammar of a turn that consists of one JSON value matching a schema.

    Args:
        schema: JSON Schema; `{"type": "object"}` allows any object.
        where: Field of the request, named in errors.

    Raises:
        GrammarError: The schema is too large or too deeply nested; the text names `where`.

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
    """Return the grammar of a turn whose tool calls match the tools' schemas.

    Args:
        chat: Chat format of the policy.
        tools: Functions with name, parameters, and optionally strict, which enforces the schema.
        choice: `auto` (text, then any calls), `required` (at least one call and no text), or the
            name of a tool: the turn is one call of it, whose opening is forced.
        parallel: Whether a turn may have several calls.
        answer: Schema of the answer if the choice is `auto`: the turn is then either calls or one
            JSON value of this schema.

    Raises:
        GrammarError: There is no such tool, or the format has no grammar or cannot enforce the
            schema; the text says which.

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
            f"tool_choice: expected auto, required or the name of an offered tool, got {choice!r}"
        )
    # The opening is forced token by token, so the grammar only covers the rest.
    rest = syntax.rest("rest", named[0])
    return _bounded(f"start: rest\n{rest}", "tools", syntax.opening(choice))


def after_reasoning(grammar: Grammar, closing: int) -> Grammar:
    """Return a grammar for a turn that begins inside reasoning, which is free text.

    Args:
        grammar: Grammar of what follows the reasoning, without forced ids.
        closing: Token that closes the reasoning.

    """
    begins = f"start: REASONING <[{closing}]> SPACES turn"
    texts = "REASONING: /(?s:.*)/\nSPACES: /[ \\n]{0,4}/"
    turn = grammar.text.removeprefix("start:")
    return Grammar(text=f"{begins}\n{texts}\nturn:{turn}")


def call_syntax(chat: ChatFormat) -> CallSyntax:
    """Return the call syntax of a chat format.

    Raises:
        GrammarError: There is no grammar for calls in this format.

    """
    if isinstance(chat, PenstockChat):
        return PenstockSyntax(chat.tokenizer)
    try:
        syntax = HermesSyntax.of(chat)
    except UnrenderableError:
        syntax = None
    if syntax is None:
        raise GrammarError(
            "tool_choice: expected auto, since this model's chat format has no grammar for calls"
        )
    return syntax


def _bounded(text: str, where: str, prefix_ids: Sequence[int] = ()) -> Grammar:
    if len(text) > GRAMMAR_CHARS_MAX:
        expected = f"expected a grammar of at most {GRAMMAR_CHARS_MAX} characters"
        raise GrammarError(f"{where}: {expected}, got {len(text)}")
    return Grammar(text=text, prefix_ids=tuple(prefix_ids))
