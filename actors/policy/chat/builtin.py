"""The chat format of policies that are trained from scratch here.

A conversation is a sequence of messages, each `<|role|> text <|end|>`. The assistant's turn is text
followed by any number of calls:

    <call name="edit_file"><path>a.py</path><old>x < y</old><new>x <= y</new></call><|end|>

All markup consists of special tokens (`policy/special_tokens.py`) with one id each, so text needs
no escaping.
"""

from collections.abc import Mapping, Sequence

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.format import (
    ChatMessage,
    OfferedTools,
    ParsedTurn,
    ParseFailure,
    Role,
)
from penstock.actors.policy.chat.grammar import parse_turn
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import ToolCall

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
        """Parse a sampled turn with the grammar in `grammar.py`."""
        return parse_turn(self.tokenizer, token_ids)

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
