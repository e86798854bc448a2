r"""Pairs and labels for training on preferences: lines of JSON in TRL's conversational shapes.

    {"prompt": [{"role": "user", "content": "..."}],
     "chosen": [{"role": "assistant", "content": "yes"}],
     "rejected": [{"role": "assistant", "content": "no"}]}
    {"prompt": [...], "completion": [{"role": "assistant", "content": "yes"}],
     "label": true, "weight": 0.5}

Messages are those of traces (`traces.py`), tool calls included; a reply may go on over several
turns, of which only the assistant's count. Without `tools`, the tools are those of the harness that
the run uses.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, Role
from penstock.actors.trainer.preferences.examples import (
    PREFERENCES_HELDOUT_KEY,
    PREFERENCES_KEY,
    StoredExample,
    StoredReply,
    encode_examples,
)
from penstock.infra.corpora.builder import HELDOUT_EVERY
from penstock.infra.corpora.lines import existing, read_lines
from penstock.infra.corpora.traces import (
    ChatTrace,
    TraceMessage,
    TraceTool,
    trace_messages,
    unreadable_calls,
)
from penstock.messages.errors import ConfigError

FIELD = "model.preferences"
_WEIGHT_MAX = 1e6


class PreferenceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a file."""

    prompt: list[TraceMessage]
    chosen: list[TraceMessage] | None = None
    rejected: list[TraceMessage] | None = None
    completion: list[TraceMessage] | None = None
    label: bool | None = None
    weight: Annotated[float, msgspec.Meta(ge=0, le=_WEIGHT_MAX)] = 1.0
    """Of a label."""
    tools: list[TraceTool] | None = None
    metadata: dict[str, Any] = {}
    """Not read: where it comes from."""


def preference_objects(
    paths: Sequence[str], chat: ChatFormat, tools: OfferedTools, tokens_max: int
) -> dict[str, bytes]:
    """Return the examples to train and those held out, every twentieth, by their keys.

    Args:
        paths: files of lines.
        chat: the policy's format.
        tools: of a line that names none.
        tokens_max: the longest context and reply that the policy reads.

    Raises:
        ConfigError: A file that is not there, a line that is no such preference or is too long; the
            text names file, line and field. Or fewer than two lines.

    """
    train: list[StoredExample] = []
    heldout: list[StoredExample] = []
    for index, example in enumerate(read_preferences(paths, chat, tools, tokens_max)):
        (train if index % HELDOUT_EVERY else heldout).append(example)
    if not train:
        raise ConfigError(f"{FIELD}: expected at least two lines, got {len(heldout)}")
    return {
        PREFERENCES_KEY: encode_examples(train),
        PREFERENCES_HELDOUT_KEY: encode_examples(heldout),
    }


def read_preferences(
    paths: Sequence[str], chat: ChatFormat, tools: OfferedTools, tokens_max: int
) -> Iterator[StoredExample]:
    """Yield the example of every line; raises as `preference_objects` does."""
    for given in paths:
        for place, line in read_lines(existing(given, FIELD), PreferenceLine, FIELD):
            try:
                yield _Rendering(line, chat, tools, tokens_max).example()
            except ValueError as error:
                raise ConfigError(f"{FIELD}: {place}: {error}") from error


class _Rendering:
    """One line to token ids; what is wrong with it is a `ValueError` that names the field."""

    def __init__(
        self, line: PreferenceLine, chat: ChatFormat, tools: OfferedTools, tokens_max: int
    ) -> None:
        self._line, self._chat, self._tokens_max = line, chat, tokens_max
        self._tools = tools
        if line.tools is not None:
            self._tools = OfferedTools(schemas=[tool.function for tool in line.tools])

    def example(self) -> StoredExample:
        line = self._line
        if line.chosen is not None and line.rejected is not None:
            if line.completion is not None or line.label is not None:
                raise ValueError("completion, label: expected neither in a pair")
            context, chosen = self._reply("chosen", line.chosen)
            _, rejected = self._reply("rejected", line.rejected)
            if chosen == rejected:
                raise ValueError("rejected: expected a reply other than `chosen`")
            return StoredExample(context=context, chosen=chosen, rejected=rejected)
        if line.chosen is not None or line.rejected is not None:
            missing = "chosen" if line.chosen is None else "rejected"
            raise ValueError(f"{missing}: expected it in a pair")
        if line.completion is None or line.label is None:
            raise ValueError("expected `chosen` and `rejected`, or `completion` and `label`")
        context, reply = self._reply("completion", line.completion)
        return StoredExample(
            context=context,
            chosen=reply if line.label else None,
            rejected=None if line.label else reply,
            weight=line.weight,
        )

    def _reply(self, field: str, given: Sequence[TraceMessage]) -> tuple[list[int], StoredReply]:
        """Return the token ids of the prompt and of a reply to it."""
        num_prompt = len(self._line.prompt)
        if not num_prompt or self._line.prompt[-1].role == "assistant":
            raise ValueError("prompt: expected messages, the last not an assistant's")
        if not given or given[0].role != "assistant" or given[-1].role != "assistant":
            raise ValueError(f"{field}: expected messages, the first and last an assistant's")
        try:
            trace = ChatTrace(messages=[*self._line.prompt, *given])
            messages, unreadable = trace_messages(trace), unreadable_calls(trace)
        except ValueError as error:
            raise ValueError(f"prompt and {field}: {error}") from error
        ids: list[int] = []
        targets: list[bool] = []
        sampled: dict[int, list[int]] = {}
        num_context = 0
        for index in range(num_prompt, len(messages)):
            if messages[index].role is not Role.ASSISTANT:
                continue
            before = self._chat.render_prompt(messages[:index], self._tools, sampled)
            self._check_length(field, before)
            if before[: len(ids)] != ids:
                text = "the chat format does not keep its earlier turns as they were"
                raise ValueError(f"{field}: {text}; give each turn a line of its own")
            turn = self._chat.render_turn(
                messages[index].content, messages[index].calls, self._tools
            )
            num_context = num_context or len(before)
            targets += [False] * (len(before) - len(ids)) + [index not in unreadable] * len(turn)
            ids = before + turn
            sampled[index] = turn
        self._check_length(field, ids)
        if not any(targets):
            raise ValueError(f"{field}: expected a call whose arguments are a JSON object")
        reply = StoredReply(token_ids=ids[num_context:], targets=targets[num_context:])
        return ids[:num_context], reply

    def _check_length(self, field: str, ids: Sequence[int]) -> None:
        if len(ids) > self._tokens_max:
            text = f"{len(ids)} tokens with its prompt, more than the policy's {self._tokens_max}"
            raise ValueError(f"{field}: {text}")
