"""Chat formats of published models (Qwen3, GLM, Kimi K2, ...) on top of the package `renderers`.

The package renders and parses with hand-written code and bridges from one turn to the next by ids.
It joins its markup with text from users, files and tools before it tokenizes. To keep that text
from forging markup, each added token that it spells is broken by a mark, which `MarkupTokenizer`
removes again:

    "</tool_response>" in a file ─▶ "<" mark "/tool_response>" ─▶ plain tokens, never that one id
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

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
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import ToolCall

_BREAK = "\ufdd0"
"""Mark inside broken markup: a noncharacter, which Unicode reserves for internal use."""


class MarkupTokenizer:
    """Tokenizer for the package: encodes markup to added tokens, broken markup to plain ones."""

    unk_token_id = None
    eos_token_id = None
    name_or_path = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Longest first: a regular expression takes the first alternative that matches.
        names = sorted(tokenizer.special_names, key=len, reverse=True)
        spelled = "|".join(re.escape(name) for name in names if len(name) > 1) or r"(?!)"
        self._markup = re.compile(f"({spelled})")
        self._start = re.compile(f"(?=(?:{spelled})).", re.DOTALL)
        self.missing: list[str] = []

    def broken(self, text: str) -> str:
        """Return a text with a mark inserted into each added token that it spells."""
        text = text.replace(_BREAK, "\N{REPLACEMENT CHARACTER}")
        return self._start.sub(lambda found: found[0] + _BREAK, text)

    def encode(self, text: str, **_options: Any) -> list[int]:
        """Encode markup to added tokens and all other text to plain ones."""
        ids: list[int] = []
        # The pattern has one group, so every second part of the split is a match.
        for index, part in enumerate(self._markup.split(text)):
            if index % 2:
                ids.append(self._tokenizer.special_id(part))
            elif part:
                ids += self._tokenizer.encode(part.replace(_BREAK, ""))
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode to text."""
        special_of = self._tokenizer.special_of
        kept = [index for index in ids if not (skip_special_tokens and special_of(index))]
        return self._tokenizer.decode(kept)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of an added token; note it in `missing` if there is none."""
        if self._tokenizer.has_special(token):
            return self._tokenizer.special_id(token)
        self.missing.append(token)
        return None


PREFIX = "renderers:"
_CALL_ENDS = ("</tool_call>", "<|tool_call_end|>", "<｜tool▁call▁end｜>")
_UNFIT = frozenset({"auto", "default", "custom", "gpt-oss"})
"""Formats of the package that need a chat template, custom code or a download."""
_REASONING = ("<think>", "</think>")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class RenderersChat:
    """One format of the package with one tokenizer.

    Raises:
        ConfigError: The package is missing or has no such format, or the tokenizer lacks a token
            that the format needs; the text names it.

    """

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._text = MarkupTokenizer(tokenizer)
        self._renderer = _open(name, self._text)
        marks = [tokenizer.special_id(mark) for mark in _REASONING if tokenizer.has_special(mark)]
        self._reasoning_ids = frozenset(marks)
        self._keeping = _open_keeping(name, self._text) if len(marks) == len(_REASONING) else None
        """Renderer that keeps the reasoning of all turns; None if the format has no such option."""
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        ends = [name for name in _CALL_ENDS if tokenizer.has_special(name)]
        self.call_end_id = tokenizer.special_id(ends[0]) if ends else None
        self._check_round_trip(name)

    def render_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: OfferedTools,
        sampled: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """Render a conversation, keeping sampled ids as they are where the format allows it."""
        rendered = self._messages(messages, tools)
        # Nothing follows the last message, so it needs no bridge.
        cuts = sorted(index for index in sampled or {} if index < len(messages) - 1)
        if not cuts:
            return self._render(rendered, tools)
        assert sampled is not None
        ids = self._render(rendered[: cuts[0]], tools)
        for index, after in zip(cuts, [*cuts[1:], len(rendered)], strict=True):
            bridged = self._bridge(ids, sampled[index], rendered[index + 1 : after], tools)
            ids = self._render(rendered[:after], tools) if bridged is None else bridged
        return ids

    def render_turn(self, text: str, calls: Sequence[ToolCall], tools: OfferedTools) -> list[int]:
        """Render the part of an assistant's message that a policy samples.

        Raises:
            UnrenderableError: The format does not mark the sampled tokens.

        """
        turn = self._message(
            ChatMessage(role=Role.ASSISTANT, content=text, calls=tuple(calls)), tools
        )
        follows = {"role": "tool" if calls else "user", "content": ""}
        # Some formats end a turn only by the role token of the next message, so try with one.
        for rest in ([], [follows]):
            messages = [{"role": "user", "content": ""}, turn, *rest]
            done = self._renderer.render(messages, tools=self._schemas(tools))
            parts = zip(done.token_ids, done.message_indices, done.sampled_mask, strict=False)
            ids = [token for token, index, is_sampled in parts if index == 1 and is_sampled]
            if ids and ids[-1] in self.stop_ids:
                return ids
        raise UnrenderableError("this format does not mark the tokens that a policy samples")

    def render_observation(
        self,
        context_ids: Sequence[int],
        turn_ids: Sequence[int],
        results: Sequence[tuple[str, str]],
        tools: OfferedTools,
        request: str = "",
    ) -> list[int] | None:
        """Render the ids between a turn and the next; with a request, earlier reasoning is kept."""
        messages = [self._result(index, name, text) for index, (name, text) in enumerate(results)]
        if request:
            messages.append({"role": Role.USER.value, "content": self._plain(request)})
        ids = self._bridge(context_ids, turn_ids, messages, tools, keeps=bool(request))
        return None if ids is None else ids[len(context_ids) + len(turn_ids) :]

    def parse_turn(
        self, token_ids: Sequence[int], context_ids: Sequence[int], tools: OfferedTools
    ) -> ParsedTurn | ParseFailure:
        """Parse a sampled turn with the package; any error in it means a malformed turn."""
        if not token_ids or token_ids[-1] not in self.stop_ids:
            detail = f"no end token after {len(token_ids)} tokens"
            return _failure(ParseFailureReason.UNFINISHED, detail)
        try:
            return self._parsed(list(token_ids), list(context_ids), tools)
        # The package may raise anything, and its message may quote what the policy wrote.
        except Exception as error:
            return _failure(ParseFailureReason.BAD_CALL, type(error).__name__)

    def _parsed(
        self, token_ids: list[int], context_ids: list[int], tools: OfferedTools
    ) -> ParsedTurn | ParseFailure:
        done = self._renderer.parse_response(
            token_ids, prompt_ids=context_ids, tools=self._schemas(tools)
        )
        # None means that the format has no reasoning.
        if done.reasoning_complete is False:
            return _failure(ParseFailureReason.UNFINISHED, "the reasoning is not closed")
        calls: list[ToolCall] = []
        for found in done.tool_calls:
            if found.status != "ok":
                return _failure(ParseFailureReason.BAD_CALL, str(found.status))
            arguments = found.arguments
            # Some parsers of the package return the arguments as JSON text.
            if isinstance(arguments, str):
                arguments = json.loads(arguments or "{}")
            if not isinstance(found.name, str) or not (
                found.name in tools.names or _NAME.fullmatch(found.name)
            ):
                return _failure(ParseFailureReason.BAD_NAME, "a call's name is none")
            if not isinstance(arguments, dict):
                return _failure(ParseFailureReason.BAD_CALL, "arguments that are no JSON object")
            texts = {_utf8(key): _utf8(argument_text(v)) for key, v in arguments.items()}
            calls.append(ToolCall(name=found.name, arguments=texts))
        return ParsedTurn(text=_utf8(done.content), calls=tuple(calls))

    def _check_round_trip(self, name: str) -> None:
        """Check that the format can parse a call that it rendered, and continue after it.

        Raises:
            ConfigError: It cannot.

        """
        call = ToolCall(name="read_file", arguments={"path": "a.py"})
        schema = {"type": "object", "properties": {"path": {"type": "string"}}}
        tools = OfferedTools(schemas=[{"name": call.name, "description": "", "parameters": schema}])
        try:
            prompt = self.render_prompt([ChatMessage(role=Role.USER, content="Go.")], tools)
            turn = self.render_turn("", [call], tools)
            parsed = self.parse_turn(turn, prompt, tools)
            follows = self.render_observation(prompt, turn, [(call.name, "x")], tools)
        except ValueError as error:
            raise ConfigError(f"model.chat: {PREFIX}{name}: {error}") from error
        if parsed != ParsedTurn(text="", calls=(call,)) or follows is None:
            text = "with this tokenizer, the format cannot parse a call that it rendered itself"
            raise ConfigError(f"model.chat: {PREFIX}{name}: {text}")

    def _bridge(
        self,
        context_ids: Sequence[int],
        turn_ids: Sequence[int],
        messages: list[dict[str, Any]],
        tools: OfferedTools,
        *,
        keeps: bool = False,
    ) -> list[int] | None:
        """Return all ids up to the next turn, or None if the format cannot extend the context.

        Args:
            context_ids: All ids before the turn.
            turn_ids: Ids of the turn as sampled.
            messages: Messages after the turn.
            tools: Tools that the assistant may call.
            keeps: Whether reasoning in earlier turns stays, e.g. for a summary of all of it.

        """
        before = [*context_ids, *turn_ids]
        given = (list(context_ids), list(turn_ids), messages)
        done = self._renderer.bridge_to_next_turn(*given, tools=self._schemas(tools))
        # Formats that drop earlier reasoning render everything again at the next user message, even
        # if no turn has any reasoning. Without any, the renderer that keeps it gives the same.
        may_keep = keeps or self._reasoning_ids.isdisjoint(before)
        if done is None and self._keeping and may_keep:
            done = self._keeping.bridge_to_next_turn(*given, tools=self._schemas(tools))
        # Sampled ids must never change: training needs them exactly as they were drawn.
        if done is None or done.token_ids[: len(before)] != before:
            return None
        return list(done.token_ids)

    def _render(self, messages: list[dict[str, Any]], tools: OfferedTools) -> list[int]:
        schemas = self._schemas(tools)
        try:
            return self._renderer.render_ids(messages, tools=schemas, add_generation_prompt=True)
        except Exception as error:
            text = f"{PREFIX}{self._renderer.config.name}: {error}"
            raise UnrenderableError(text) from error

    def _messages(
        self, messages: Sequence[ChatMessage], tools: OfferedTools
    ) -> list[dict[str, Any]]:
        """Return messages in the package's form; each result gets the name of its call."""
        converted: list[dict[str, Any]] = []
        called: list[ToolCall] = []
        num_results = 0
        for message in messages:
            if message.role is Role.TOOL:
                name = called[num_results].name if num_results < len(called) else ""
                converted.append(self._result(num_results, name, message.content))
                num_results += 1
            else:
                called, num_results = list(message.calls), 0
                converted.append(self._message(message, tools))
        return converted

    def _result(self, index: int, name: str, text: str) -> dict[str, Any]:
        return {
            "role": Role.TOOL.value,
            "tool_call_id": f"call_{index}",
            "name": self._plain(name or "error"),
            "content": self._plain(text),
        }

    def _message(self, message: ChatMessage, tools: OfferedTools) -> dict[str, Any]:
        content = self._plain(message.content)
        converted: dict[str, Any] = {"role": message.role.value, "content": content}
        if message.calls:
            converted["tool_calls"] = [
                {"id": f"call_{index}", "type": "function", "function": self._function(call, tools)}
                for index, call in enumerate(message.calls)
            ]
        return converted

    def _function(self, call: ToolCall, tools: OfferedTools) -> dict[str, Any]:
        return self._plain({"name": call.name, "arguments": tools.typed_arguments(call)})

    def _schemas(self, tools: OfferedTools) -> list[dict[str, Any]] | None:
        return [self._plain(schema) for schema in tools.schemas] or None

    def _plain(self, value: Any) -> Any:
        """Break the added tokens in all texts of a JSON value."""
        if isinstance(value, str):
            return self._text.broken(value)
        if isinstance(value, dict):
            return {self._plain(key): self._plain(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(inner) for inner in value]
        return value


def _open(name: str, text: MarkupTokenizer) -> Any:
    package = _package()
    known = sorted(set(package.configs._CONFIG_BY_NAME) - _UNFIT)
    if name not in known:
        choices = ", ".join(known)
        raise ConfigError(
            f"model.chat: expected {PREFIX}NAME with NAME one of {choices}; got {name!r}"
        )
    try:
        return package.create_renderer(text, package.config_from_name(name))
    except Exception as error:
        if not text.missing:
            raise ConfigError(f"model.chat: {PREFIX}{name} cannot be opened: {error!r}") from error
        tokens = ", ".join(map(repr, text.missing))
        raise ConfigError(
            f"model.chat: the format {PREFIX}{name} needs the token {tokens}, "
            "which the tokenizer lacks"
        ) from error


def _open_keeping(name: str, text: MarkupTokenizer) -> Any:
    """Return a renderer that keeps the reasoning of all turns; None if the format has none."""
    package = _package()
    config = type(package.config_from_name(name))
    try:
        return package.create_renderer(text, config(thinking_retention="all"))
    # The package raises its own errors for formats that do not let a caller choose this.
    except Exception:
        return None


def _package() -> ModuleType:
    try:
        import renderers
        import renderers.configs
    except ImportError as error:
        raise ConfigError(
            f"model.chat: {PREFIX}NAME needs the package renderers: pip install -e '.[models]'"
        ) from error
    return renderers


def _utf8(text: str) -> str:
    """Replace lone surrogates, which JSON can express but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _failure(reason: ParseFailureReason, detail: str) -> ParseFailure:
    return ParseFailure(reason=reason, detail=detail)
