"""`penstock export RUN --format preferences`: users' corrections and judgments, as TRL reads them.

    pairs.jsonl   {"prompt": [...], "chosen": [...], "rejected": [...], "tools": [], "metadata": {}}
    labels.jsonl  {"prompt": [...], "completion": [...], "label": true, "weight": 1.0, ...}

Prompts and replies are messages, tool calls included, as `[model] preferences` reads them;
`metadata` has the lineage. The contexts of a published chat format cannot be read
back: they are texts as the tokenizer decodes them, TRL's other shape. Of amended feedback the
newest counts, retracted feedback is left out, and so is what its user's erased key no longer opens.
"""

import tempfile
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatMessage, Role
from penstock.actors.policy.chat.open import PENSTOCK
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.actors.runtime.files import open_private, sync_folder
from penstock.actors.runtime.vault import Vault
from penstock.infra.config.file import load_config
from penstock.infra.corpora.traces_format import TraceCall, TraceFunction, TraceMessage
from penstock.infra.export.folder import check_target
from penstock.infra.run.runs import RunDir, open_log, open_vault
from penstock.kernels.arrays import from_array
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import CodecError
from penstock.messages.feedback import FeedbackReceived, FeedbackRetracted, InferenceRecorded
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.reading.sealed import FeedbackContent
from penstock.messages.reading.trajectories import Last, last_of, open_live_turn
from penstock.messages.signals.preferences import Label, PreferencePair

Judgment = PreferencePair | Label
FILES = {PreferencePair: "pairs.jsonl", Label: "labels.jsonl"}


async def export_preferences(run: RunDir, folder: Path) -> dict[str, int]:
    """Write the lines of a run's log to a new folder; return how many of each kind.

    `unreadable` counts those whose content is gone, or is no conversation of the chat format.

    Raises:
        ConfigError: There is something at `folder`.

    """
    check_target(folder)
    counts = {"pairs": 0, "labels": 0, "unreadable": 0}
    is_built_in = load_config(run.config).model.chat == PENSTOCK
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        unfinished = Path(name) / "lines"
        unfinished.mkdir(mode=0o700)
        async with open_log(run, "export") as bus:
            store = run.store()
            tokenizer = Tokenizer.from_json(
                (await store.get(TOKENIZER_KEY)).decode(), TOKENIZER_KEY
            )
            chat = PenstockChat(tokenizer) if is_built_in else None
            reader = PreferenceReader(store, open_vault(run), last_of(bus), tokenizer, chat)
            with (
                open_private(unfinished / FILES[PreferencePair], "wb") as pairs,
                open_private(unfinished / FILES[Label], "wb") as labels,
            ):
                for judgment in await standing(bus):
                    line = await reader.line(judgment)
                    if line is None:
                        counts["unreadable"] += 1
                    elif isinstance(judgment, PreferencePair):
                        counts["pairs"] += 1
                        pairs.write(msgspec.json.encode(line) + b"\n")
                    else:
                        counts["labels"] += 1
                        labels.write(msgspec.json.encode(line) + b"\n")
        unfinished.replace(folder)
        sync_folder(folder.parent)
    return counts


async def standing(bus: Bus) -> list[Judgment]:
    """Return the judgments of a log that count: the newest of amended ones, none retracted."""
    found: dict[tuple[type, str], Judgment] = {}
    async for delivery in bus.follow((PreferencePair, Label), stop_at_end=True):
        if isinstance(event := delivery.event, PreferencePair | Label):
            found[type(event), event.root] = event
    retracted: set[str] = set()
    async for delivery in bus.follow((FeedbackRetracted,), stop_at_end=True):
        retracted.add(delivery.event.key())
    return [event for (_, root), event in found.items() if root not in retracted]


class PreferenceReader:
    """Opens what judgments are about."""

    def __init__(
        self,
        store: ObjectStore,
        opener: Vault,
        last: Last,
        tokenizer: Tokenizer,
        chat: PenstockChat | None,
    ) -> None:
        """Read a run's content; without `chat`, as texts."""
        self._store, self._opener, self._last = store, opener, last
        self._tokenizer, self._chat = tokenizer, chat

    async def line(self, judgment: Judgment) -> dict[str, Any] | None:
        """Return the line of a judgment, or None where its content cannot be read."""
        try:
            context, reply = await self._turn(judgment.request_id)
            lines: dict[str, Any] = {"prompt": self._prompt(context)}
            if isinstance(judgment, PreferencePair):
                correction = await self._correction(judgment.feedback)
                lines |= {"chosen": self._own(correction), "rejected": self._reply(reply)}
            else:
                lines |= {
                    "completion": self._reply(reply),
                    "label": judgment.is_desirable,
                    "weight": judgment.weight,
                }
        except CodecError:
            return None
        tools: dict[str, list[str]] = {} if self._chat is None else {"tools": []}
        return lines | tools | {"metadata": _lineage(judgment)}

    def _prompt(self, ids: list[int]) -> str | list[TraceMessage]:
        if self._chat is None:
            return self._tokenizer.decode(ids)
        messages = self._chat.read_prompt(ids)
        if messages is None:
            raise CodecError("its context is not a conversation in the chat format")
        return [_message(each) for each in messages]

    def _reply(self, ids: list[int]) -> str | list[TraceMessage]:
        if self._chat is None:
            return self._tokenizer.decode(ids)
        messages = self._chat.read_reply(ids)
        if messages is None:
            raise CodecError("its reply has a turn that is none of the chat format")
        return [_message(message) for message in messages]

    def _own(self, text: str) -> str | list[TraceMessage]:
        return text if self._chat is None else [TraceMessage(role="assistant", content=text)]

    async def _turn(self, request_id: str) -> tuple[list[int], list[int]]:
        record = await self._last(InferenceRecorded, request_id)
        if record is None:
            raise CodecError(f"request {request_id}: the log has no record of it")
        turn = await open_live_turn(self._store, self._opener.open, record.turn, request_id)
        return from_array(turn.context_ids).tolist(), from_array(turn.token_ids).tolist()

    async def _correction(self, key: str) -> str:
        event = await self._last(FeedbackReceived, key)
        if event is None or event.content is None:
            raise CodecError(f"feedback {key}: the log has no correction of it")
        data = await self._opener.open(event.content, key)
        return parse_msgpack(data, FeedbackContent, f"content of feedback {key}").correction


def _lineage(judgment: Judgment) -> dict[str, str]:
    named = {
        "request_id": judgment.request_id,
        "feedback": judgment.feedback,
        "tenant": judgment.tenant,
        "user": judgment.user,
        "policy_version": str(judgment.policy_version),
    }
    return named | ({"signal": judgment.name} if isinstance(judgment, Label) else {})


def _message(message: ChatMessage) -> TraceMessage:
    calls = [
        TraceCall(
            id=f"call_{index}",
            function=TraceFunction(
                name=call.name, arguments=msgspec.json.encode(call.arguments).decode()
            ),
        )
        for index, call in enumerate(message.calls)
    ]
    role = message.role
    return TraceMessage(
        role=role.value,
        content=message.content,
        tool_calls=calls or None,
        tool_call_id="call_0" if role is Role.TOOL else "",
    )
