"""Parser for turns in the `penstock` format; a malformed turn yields a `ParseFailure`."""

import re
from collections.abc import Sequence

from penstock.actors.policy import special_tokens
from penstock.actors.policy.chat.format import ParsedTurn, ParseFailure, ParseFailureReason
from penstock.actors.policy.tokenizer import Tokenizer
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


def parse_turn(tokenizer: Tokenizer, token_ids: Sequence[int]) -> ParsedTurn | ParseFailure:
    """Parse one sampled turn, including its end token.

    Grammar: turn = text call* END; call = open argument* CALL_CLOSE; argument = open text close.
    No text may appear between calls or between arguments.
    """
    try:
        return _Parser(tokenizer, token_ids).turn()
    except _Malformed as error:
        return error.failure


class _Parser:
    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
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
        if not _NAME.fullmatch(name):
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
