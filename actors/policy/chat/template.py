"""Chat formats of published models, based on the chat template in the model's folder.

The template frames messages. Tool calls have the same syntax for all models, the one that many of
them know (Hermes): the tools are described in the system message, calls are
lines of JSON in the assistant's text, results come back in a user's message.

    <tool_call>
    {"name": "read_file", "arguments": {"path": "a.py"}}
    </tool_call>

Sampled turns are never rendered: the template renders a placeholder, which the turn's ids replace.
A template that frames a turn differently once others follow is refused, since the ids of a context
could then not be continued. Text from users, files and tools cannot forge markup, as in
`renderers.py`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.actors.policy.chat.format import (
    ChatMessage,
    OfferedTools,
    ParsedTurn,
    ParseFailure,
    ParseFailureReason,
    Role,
    UnrenderableError,
    argument_text,
)
from penstock.actors.policy.chat.renderers import MarkupTokenizer
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.rollout import ToolCall

TEMPLATE = "template"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{_OPEN}\s*(.*?)\s*{_CLOSE}", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_MARK = "\ufdd1{}\ufdd2"
"""Place of the assistant's message with this number: noncharacters, which no text has here."""
_MARKED = re.compile("\ufdd1(\\d+)\ufdd2")
_RESULT = "<tool_response>\n{}\n</tool_response>"


class TemplateChat:
    """The format of one tokenizer's chat template.

    Raises:
        ConfigError: The model's folder has no chat template, or one that cannot be continued.

    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._text = MarkupTokenizer(tokenizer)
        if tokenizer.chat is None:
            text = "expected a chat_template.jinja, or chat_template in tokenizer_config.json"
            raise ConfigError(f"model.chat: 'template': {text}, in the model's folder")
        self._names = tokenizer.chat.tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(tokenizer.chat.template)
            self._stop = self._stop_token()
            self.stop_ids: tuple[int, ...] = (tokenizer.special_id(self._stop),)
            self._check()
        except (jinja2.TemplateError, UnrenderableError) as error:
            raise ConfigError(f"model.chat: 'template': {error}") from error
        has_close = tokenizer.has_special(_CLOSE)
        self.call_end_id = tokenizer.special_id(_CLOSE) if has_close else None

    def render_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: OfferedTools,
        sampled: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Render a conversation up to the assistant's next turn; sampled ids stay as they are."""
        turns = {
            index: list((sampled or {}).get(index) or self._turn(message))
            for index, message in enumerate(messages)
            if message.role is Role.ASSISTANT
        }
        return self._joined(self._rendered(self._plain(messages, tools)), turns)

    def render_turn(self, text: str, calls: Sequence[ToolCall], tools: OfferedTools) -> list[int]:
        """Render text, calls and the stop token."""
        written = ChatMessage(role=Role.ASSISTANT, content=text, calls=tuple(calls))
        return self._turn(written, tools)

    def render_observation(
        self,
        context_ids: Sequence[int],
        turn_ids: Sequence[int],
        results: Sequence[tuple[str, str]],
        tools: OfferedTools,
        request: str = "",
    ) -> list[int] | None:
        """Render what follows a turn; the context before does not matter."""
        parts = [_RESULT.format(self._text.broken(text)) for _, text in results]
        parts += [self._text.broken(request)] if request else []
        following = [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": _MARK.format(0)},
            {"role": "user", "content": "\n".join(parts)},
        ]
        after = self._rendered(following).partition(_MARK.format(0))[2]
        ids = self._text.encode(after)
        has_stop = bool(turn_ids) and turn_ids[-1] in self.stop_ids
        return ids[1:] if has_stop else ids

    def parse_turn(
        self, token_ids: Sequence[int], context_ids: Sequence[int], tools: OfferedTools
    ) -> ParsedTurn | ParseFailure:
        """Parse text, and calls as JSON between `<tool_call>` and `</tool_call>`."""
        if not token_ids or token_ids[-1] not in self.stop_ids:
            detail = f"no end token after {len(token_ids)} tokens"
            return ParseFailure(reason=ParseFailureReason.UNFINISHED, detail=detail)
        written = self.tokenizer.decode(token_ids[:-1])
        text, opening, rest = written.partition(_OPEN)
        calls: list[ToolCall] = []
        for body in _CALL.findall(opening + rest):
            try:
                call = parse_json(body, dict[str, Any], "call")
            except CodecError as error:
                return ParseFailure(reason=ParseFailureReason.BAD_CALL, detail=str(error))
            name, arguments = call.get("name"), call.get("arguments", {})
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                detail = "a call's name is none"
                return ParseFailure(reason=ParseFailureReason.BAD_NAME, detail=detail)
            if not isinstance(arguments, dict):
                detail = "arguments that are no JSON object"
                return ParseFailure(reason=ParseFailureReason.BAD_CALL, detail=detail)
            texts = {_utf8(key): _utf8(argument_text(each)) for key, each in arguments.items()}
            calls.append(ToolCall(name=name, arguments=texts))
        if _CALL.sub("", opening + rest).strip():
            detail = f"text after a call, or a {_OPEN} that is not closed"
            return ParseFailure(reason=ParseFailureReason.BAD_CALL, detail=detail)
        return ParsedTurn(text=text.strip() if calls else text, calls=tuple(calls))

    def _turn(self, message: ChatMessage, tools: OfferedTools | None = None) -> list[int]:
        parts = [self._text.broken(message.content)] if message.content else []
        for call in message.calls:
            typed = dict(call.arguments) if tools is None else tools.typed_arguments(call)
            line = _to_json({"name": call.name, "arguments": typed})
            parts.append(f"{_OPEN}\n{self._text.broken(line)}\n{_CLOSE}")
        return [*self._text.encode("\n".join(parts)), *self.stop_ids]

    def _plain(self, messages: Sequence[ChatMessage], tools: OfferedTools) -> list[dict[str, str]]:
        """Return messages in the template's form, with placeholders for the assistant's."""
        plain: list[dict[str, str]] = []
        words = self._text.broken(_described(tools))
        for index, message in enumerate(messages):
            content = self._text.broken(message.content)
            role = message.role.value
            if message.role is Role.ASSISTANT:
                content = _MARK.format(index)
            elif message.role is Role.TOOL:
                role, content = "user", _RESULT.format(content)
            elif message.role is Role.SYSTEM and words:
                content, words = f"{content}\n\n{words}", ""
            if plain and plain[-1]["role"] == role == "user":
                plain[-1]["content"] += f"\n{content}"
            else:
                plain.append({"role": role, "content": content})
        return [{"role": "system", "content": words}, *plain] if words else plain

    def _rendered(self, messages: list[dict[str, str]], *, opens: bool = True) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=opens, tools=None, **self._names
            )
        # A template's expressions may raise any exception.
        except Exception as error:
            raise UnrenderableError(
                f"the chat template refuses the conversation: {error}"
            ) from error

    def _joined(self, text: str, turns: Mapping[int, Sequence[int]]) -> list[int]:
        """Encode rendered text, replacing placeholders by the ids of their turns."""
        ids: list[int] = []
        has_stop = False
        for place, part in enumerate(_MARKED.split(text)):
            if place % 2:
                turn = turns[int(part)]
                has_stop = turn[-1] in self.stop_ids
                ids += turn
            else:
                ids += self._text.encode(part)[int(place > 0 and has_stop) :]
        return ids

    def _stop_token(self) -> str:
        """Return the added token that the template puts after an assistant's text."""
        asked = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "\ufdd1"}]
        more = [{"role": "user", "content": "Go on."}]
        after = self._rendered([*asked, *more]).partition("\ufdd1")[2]
        ids = self._text.encode(after)
        name = self.tokenizer.special_of(ids[0]) if ids else None
        if name is None:
            raise UnrenderableError("expected an added token after the assistant's text")
        return name

    def _check(self) -> None:
        """Check that adding a message appends its ids and changes no earlier one."""
        nothing = OfferedTools()
        asked = ChatMessage(role=Role.USER, content="Go.")
        said = ChatMessage(role=Role.ASSISTANT, content="done")
        prompt = self.render_prompt([asked], nothing)
        turn = self.render_turn("done", (), nothing)
        grown = [*prompt, *turn, *(self.render_observation(prompt, turn, [], nothing, "On.") or [])]
        more = ChatMessage(role=Role.USER, content="On.")
        if grown != self.render_prompt([asked, said, more], nothing):
            raise UnrenderableError("it frames a turn differently once others follow")


def _described(tools: OfferedTools) -> str:
    """Return the system message that describes tools; empty without any."""
    if not tools.schemas:
        return tools.words
    lines, examples = list[str](), list[str]()
    for schema in tools.schemas:
        parameters = schema.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else {}
        arguments = dict.fromkeys(properties or {}, "...")
        examples.append(_to_json({"name": str(schema.get("name")), "arguments": arguments}))
        lines.append(f"{schema.get('name')}({', '.join(properties or {})}): "
                     f"{schema.get('description') or ''}")  # fmt: skip
    return "\n".join(("To call a tool, write", _OPEN, examples[0], _CLOSE, "Tools:", *lines))


def _to_json(value: Any, **_options: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _utf8(text: str) -> str:
    """Replace lone surrogates, which JSON can express but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
