"""The chat format of policies that are trained from scratch here.

A conversation is a sequence of messages, each `<|role|> text <|end|>`. The assistant's turn is text
followed by any number of calls:

    <call name="edit_file"><path>a.py</path><old>x < y</old><new>x <= y</new></call><|end|>

All markup consists of special tokens (`policy/special_tokens.py`) with one id each, so text needs
no escaping. A malformed turn yields a `ParseFailure`.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.format import (
    ChatMessage,
    OfferedTools,
    ParsedTurn,
    ParseFailure,
    ParseFailureReason,
    Role,
)
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import ToolCall

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_CALL_NAMES = {special_tokens.call_open(name): name for name in special_tokens.TOOL_NAMES}
_ARGUMENT_NAMES = {
    special_tokens.argument_open(name): name for name in special_tokens.ARGUMENT_NAMES
}


# An exception, so that the parser can give up at any depth.
class _Malformed(Exception):
    def __init__(self, reason: ParseFailureReason, detail: str, position: int) -> None:
        super().__init__(detail)
        self.failure = ParseFailure(reason=reason, detail=detail, position=position)


def parse_turn(
    tokenizer: Tokenizer, token_ids: Sequence[int], offered: Collection[str] = ()
) -> ParsedTurn | ParseFailure:
    """Parse one sampled turn, including its end token.

    Args:
        tokenizer: Tokenizer of the policy.
        token_ids: Ids of the turn.
        offered: Names of offered tools and their arguments, which need not look like identifiers.

    Grammar: turn = text call* END; call = open argument* CALL_CLOSE; argument = open text close.
    No text may appear between calls or between arguments.

    """
    try:
        return _Parser(tokenizer, token_ids, offered).turn()
    except _Malformed as error:
        return error.failure


class _Parser:
    def __init__(
        self, tokenizer: Tokenizer, token_ids: Sequence[int], offered: Collection[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._offered = offered
        self._ids = token_ids
        self._position = 0

    def turn(self) -> ParsedTurn:
        text = self._text()
        calls = []
        while (special := self._special()) != special_tokens.END:
            calls.append(self._call(special))
        if self._position != len(self._ids):
            raise self._unexpected("a token after the end token", self._position)
        return ParsedTurn(text=text, calls=tuple(calls))

    def _call(self, opening: str) -> ToolCall:
        name = _CALL_NAMES.get(opening)
        if name is None:
            name = self._spelled(opening, special_tokens.CALL_OPEN)
        arguments: dict[str, str] = {}
        while (special := self._special()) != special_tokens.CALL_CLOSE:
            start = self._position - 1
            argument, value = self._argument(special)
            if argument in arguments:
                reason = ParseFailureReason.DUPLICATE_ARGUMENT
                raise _Malformed(reason, f"argument {argument!r} is given twice", start)
            arguments[argument] = value
        return ToolCall(name=name, arguments=arguments)

    def _argument(self, opening: str) -> tuple[str, str]:
        name = _ARGUMENT_NAMES.get(opening)
        closing = (
            special_tokens.ARGUMENT_CLOSE if name is None else special_tokens.argument_close(name)
        )
        if name is None:
            name = self._spelled(opening, special_tokens.ARGUMENT_OPEN)
        value = self._text()
        self._expect(closing)
        return name, value

    def _spelled(self, opening: str, expected: str) -> str:
        """Read a name that is spelled out after a generic opening token."""
        start = self._position - 1
        if opening != expected:
            raise self._unexpected(f"{opening!r}, not a {expected!r}", start)
        name = self._text()
        self._expect(special_tokens.NAME_CLOSE)
        if name not in self._offered and not _NAME.fullmatch(name):
            raise _Malformed(ParseFailureReason.BAD_NAME, f"{name!r} is no name", start)
        return name

    def _text(self) -> str:
        """Read plain tokens up to the next special one."""
        start = self._position
        while self._position < len(self._ids) and self._special_at(self._position) is None:
            self._position += 1
        return self._tokenizer.decode(self._ids[start : self._position])

    def _special(self) -> str:
        """Read one token that must be special."""
        if self._position >= len(self._ids):
            detail = f"no {special_tokens.END} after {len(self._ids)} tokens"
            raise _Malformed(ParseFailureReason.UNFINISHED, detail, len(self._ids))
        special = self._special_at(self._position)
        if special is None:
            raise self._unexpected("text between calls or arguments", self._position)
        self._position += 1
        return special

    def _expect(self, expected: str) -> None:
        special = self._special()
        if special != expected:
            raise self._unexpected(f"{special!r}, not {expected!r}", self._position - 1)

    def _special_at(self, position: int) -> str | None:
        return self._tokenizer.special_of(self._ids[position])

    @staticmethod
    def _unexpected(detail: str, position: int) -> _Malformed:
        return _Malformed(ParseFailureReason.UNEXPECTED, f"found {detail}", position)


_ROLE_TOKENS = {
    Role.SYSTEM: special_tokens.SYSTEM,
    Role.USER: special_tokens.USER,
    Role.ASSISTANT: special_tokens.ASSISTANT,
    Role.TOOL: special_tokens.TOOL,
}
_NO_TOOLS = OfferedTools()


class PenstockChat:
    """The built-in format with one tokenizer.

    Raises:
        ConfigError: The tokenizer lacks a token of the format; the text names it.

    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        for name in special_tokens.STRUCTURE_TOKENS:
            if not tokenizer.has_special(name):
                raise ConfigError(
                    f"model.chat: the format 'penstock' needs the special token {name!r}, "
                    "which the tokenizer lacks"
                )
        self.tokenizer = tokenizer
        self.end_id = tokenizer.special_id(special_tokens.END)
        self.stop_ids = (self.end_id,)
        self.call_end_id: int | None = tokenizer.special_id(special_tokens.CALL_CLOSE)

    def render_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: OfferedTools = _NO_TOOLS,
        sampled: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Render a conversation and the token that opens the assistant's next turn."""
        ids: list[int] = []
        if tools.words:
            ids.append(self.tokenizer.special_id(special_tokens.SYSTEM))
            ids += self.render_turn(tools.words)
        for index, message in enumerate(messages):
            ids.append(self.tokenizer.special_id(_ROLE_TOKENS[message.role]))
            # Sampled ids as they are: rendering the text again may give other tokens.
            known = (sampled or {}).get(index)
            ids += known or self.render_turn(message.content, message.calls)
        ids.append(self.tokenizer.special_id(special_tokens.ASSISTANT))
        return ids

    def render_turn(
        self, text: str, calls: Sequence[ToolCall] = (), tools: OfferedTools = _NO_TOOLS
    ) -> list[int]:
        """Render the body of a message, including the end token."""
        ids = self.tokenizer.encode(text) if text else []
        for call in calls:
            ids += self._render_call(call)
        ids.append(self.end_id)
        return ids

    def render_observation(
        self,
        context_ids: Sequence[int],
        turn_ids: Sequence[int],
        results: Sequence[tuple[str, str]],
        tools: OfferedTools = _NO_TOOLS,
        request: str = "",
    ) -> list[int]:
        """Render one message per result, and one for the user's request if there is one."""
        messages = [ChatMessage(role=Role.TOOL, content=text) for _, text in results]
        if request:
            messages.append(ChatMessage(role=Role.USER, content=request))
        return self.render_prompt(messages)

    def read_messages(self, context_ids: Sequence[int]) -> list[ChatMessage] | None:
        """Return the messages that a text-only context was rendered from; None if it is not one."""
        roles = {self.tokenizer.special_id(token): role for role, token in _ROLE_TOKENS.items()}
        messages: list[ChatMessage] = []
        ids = list(context_ids)
        while ids and ids[0] in roles and self.end_id in ids:
            end = ids.index(self.end_id)
            text = self.tokenizer.decode(ids[1:end])
            messages.append(ChatMessage(role=roles[ids[0]], content=text))
            ids = ids[end + 1 :]
        return messages if ids == [self.tokenizer.special_id(special_tokens.ASSISTANT)] else None

    def read_prompt(self, ids: Sequence[int]) -> list[ChatMessage] | None:
        """Return the conversation that was rendered to a prompt; None if the ids are not a prompt.

        Sampled turns may use other tokens for the same text than `render_prompt` would.
        """
        roles = {self.tokenizer.special_id(token): role for role, token in _ROLE_TOKENS.items()}
        left = list(ids)
        messages: list[ChatMessage] = []
        while len(left) > 1:
            role = roles.get(left[0])
            if role is None or self.end_id not in left:
                return None
            end = left.index(self.end_id) + 1
            message = self.read_turn(left[1:end]) if role is Role.ASSISTANT else None
            # A turn that does not parse is kept as plain text.
            if message is None:
                text = self.tokenizer.decode(left[1 : end - 1])
                message = ChatMessage(role=role, content=text)
            messages.append(message)
            left = left[end:]
        is_open = left == [self.tokenizer.special_id(special_tokens.ASSISTANT)]
        return messages if messages and is_open else None

    def read_turn(self, ids: Sequence[int]) -> ChatMessage | None:
        """Return a turn as a message; None if it does not parse."""
        parsed = self.parse_turn(ids)
        if not isinstance(parsed, ParsedTurn):
            return None
        return ChatMessage(role=Role.ASSISTANT, content=parsed.text, calls=parsed.calls)

    def read_reply(self, ids: Sequence[int]) -> list[ChatMessage] | None:
        """Return one or more turns and the messages between them; None if a turn does not parse."""
        opening = self.tokenizer.special_id(special_tokens.ASSISTANT)
        messages: list[ChatMessage] = []
        left = [opening, *ids]
        while left:
            end = left.index(self.end_id) + 1 if self.end_id in left else len(left)
            found = (
                self.read_turn(left[1:end])
                if left[0] == opening
                else next(iter(self.read_prompt([*left[:end], opening]) or ()), None)
            )
            if found is None:
                return None
            messages.append(found)
            left = left[end:]
        return messages

    def parse_turn(
        self,
        token_ids: Sequence[int],
        context_ids: Sequence[int] = (),
        tools: OfferedTools = _NO_TOOLS,
    ) -> ParsedTurn | ParseFailure:
        """Parse a sampled turn."""
        return parse_turn(self.tokenizer, token_ids, tools.names)

    def _render_call(self, call: ToolCall) -> list[int]:
        tokenizer = self.tokenizer
        # Names that the tokenizer was trained with have one token; all others are spelled out.
        known = special_tokens.call_open(call.name)
        ids = self._opening(known, special_tokens.CALL_OPEN, call.name)
        for name, value in call.arguments.items():
            opening = special_tokens.argument_open(name)
            closing = special_tokens.argument_close(name)
            is_known = tokenizer.has_special(opening)
            ids += self._opening(opening, special_tokens.ARGUMENT_OPEN, name)
            ids += tokenizer.encode(value)
            ids.append(tokenizer.special_id(closing if is_known else special_tokens.ARGUMENT_CLOSE))
        ids.append(tokenizer.special_id(special_tokens.CALL_CLOSE))
        return ids

    def _opening(self, known: str, generic: str, name: str) -> list[int]:
        if self.tokenizer.has_special(known):
            return [self.tokenizer.special_id(known)]
        spelled = self.tokenizer.encode(name)
        return [
            self.tokenizer.special_id(generic),
            *spelled,
            self.tokenizer.special_id(special_tokens.NAME_CLOSE),
        ]
