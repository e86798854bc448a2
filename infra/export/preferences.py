"""`penstock export RUN --format preferences`: users' corrections and judgments, as JSON lines.

    {"kind": "pair", "context": ..., "rejected": ..., "chosen": ..., lineage}
    {"kind": "label", "context": ..., "reply": ..., "is_desirable": ..., "weight": ..., lineage}

Of amended feedback the newest counts, retracted feedback is left out, and so is what its user's
erased key no longer opens. Texts are as the tokenizer decodes them, special tokens included.
"""

from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.actors.runtime.files import open_private
from penstock.infra.run.runs import RunDir, open_log
from penstock.infra.run.vault import open_vault
from penstock.kernels.arrays import from_array
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.feedback import FeedbackReceived, FeedbackRetracted, InferenceRecorded
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.reading.sealed import FeedbackContent, Opener
from penstock.messages.reading.trajectories import Last, last_of, open_live_turn
from penstock.messages.signals.preferences import Label, PreferencePair

Judgment = PreferencePair | Label


async def export_preferences(run: RunDir, path: Path) -> dict[str, int]:
    """Write the lines of a run's log to a new file; return how many of each kind.

    Raises:
        ConfigError: There is something at `path`.

    """
    _check_new(path)
    temporary = path.with_name(f".{path.name}.partial")
    counts = {"pairs": 0, "labels": 0, "unreadable": 0}
    try:
        async with open_log(run, "export") as bus:
            store = run.store()
            text = (await store.get(TOKENIZER_KEY)).decode()
            reader = PreferenceReader(
                store, open_vault(run), last_of(bus), Tokenizer.from_json(text, TOKENIZER_KEY)
            )
            with open_private(temporary, "wb") as file:
                for judgment in await standing(bus):
                    line = await reader.line(judgment)
                    if line is None:
                        counts["unreadable"] += 1
                        continue
                    file.write(msgspec.json.encode(line) + b"\n")
                    counts["pairs" if line["kind"] == "pair" else "labels"] += 1
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return counts


def _check_new(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"--output: {path} exists; name a new file")


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
        self, store: ObjectStore, opener: Opener, last: Last, tokenizer: Tokenizer
    ) -> None:
        self._store, self._opener, self._last = store, opener, last
        self._tokenizer = tokenizer

    async def line(self, judgment: Judgment) -> dict[str, Any] | None:
        """Return the line of a judgment, or None where its content cannot be read any more."""
        try:
            context, reply = await self._turn(judgment.request_id)
            lineage = {
                "request_id": judgment.request_id,
                "feedback": judgment.feedback,
                "tenant": judgment.tenant,
                "user": judgment.user,
                "policy_version": judgment.policy_version,
            }
            if isinstance(judgment, PreferencePair):
                chosen = await self._correction(judgment.feedback)
                return {
                    "kind": "pair", "context": context, "rejected": reply, "chosen": chosen,
                } | lineage  # fmt: skip
        except CodecError:
            return None
        return {
            "kind": "label",
            "context": context,
            "reply": reply,
            "is_desirable": judgment.is_desirable,
            "weight": judgment.weight,
            "signal": judgment.name,
        } | lineage

    async def _turn(self, request_id: str) -> tuple[str, str]:
        record = await self._last(InferenceRecorded, request_id)
        if record is None:
            raise CodecError(f"request {request_id}: the log has no record of it")
        turn = await open_live_turn(self._store, self._opener, record.turn, request_id)
        decode = self._tokenizer.decode
        context = decode(from_array(turn.context_ids).tolist())
        return context, decode(from_array(turn.token_ids).tolist())

    async def _correction(self, key: str) -> str:
        event = await self._last(FeedbackReceived, key)
        if event is None or event.content is None:
            raise CodecError(f"feedback {key}: the log has no correction of it")
        data = await self._opener.open(event.content, key)
        return parse_msgpack(data, FeedbackContent, f"content of feedback {key}").correction
