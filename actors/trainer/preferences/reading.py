"""Reads corrections and judgments from the log: context, reply, and preferred reply."""

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.preferences.examples import (
    PreferenceExample,
    PreferenceReply,
    check_example,
)
from penstock.actors.trainer.preferences.waiting import trained_preferences
from penstock.kernels.arrays import from_array
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CodecError
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded
from penstock.messages.reading.parsing import parse_msgpack
from penstock.messages.reading.sealed import FeedbackContent
from penstock.messages.reading.trajectories import Last, open_live_turn
from penstock.messages.signals.preferences import PreferenceEntry, PreferenceKind
from penstock.messages.training import BatchManifest

log = logging.getLogger(__name__)

_READS_MAX = 16
"""Concurrent reads of the store."""


class ExampleReader:
    """Reads preference examples from a run's log on demand."""

    def __init__(self, store: ObjectStore, opener: Vault, last: Last, policy: PolicyConfig) -> None:
        self._store, self._opener, self._last = store, opener, last
        self._policy = policy
        self._reads = asyncio.Semaphore(_READS_MAX)

    async def read(self, manifest: BatchManifest) -> list[PreferenceExample]:
        """Return the examples that a manifest trains, in its order.

        Raises:
            CodecError: An example cannot be read; `ErasedError` if its user was erased.
            StoreUnreachableError: The store did not answer.

        """
        found = await self.try_read(trained_preferences(manifest))
        for one in found:
            if isinstance(one, CodecError):
                raise one
        return [one for one in found if not isinstance(one, CodecError)]

    async def unreadable(self, manifest: BatchManifest) -> dict[str, CodecError]:
        """Return errors by name of the examples that cannot be read."""
        entries = trained_preferences(manifest)
        found = await self.try_read(entries)
        errors = {
            entry.name: one
            for entry, one in zip(entries, found, strict=True)
            if isinstance(one, CodecError)
        }
        for error in errors.values():
            log.warning("preference left out: %s", error)
        return errors

    async def try_read(
        self, entries: Sequence[PreferenceEntry]
    ) -> list[PreferenceExample | CodecError]:
        """Return each entry's example or error; raises `StoreUnreachableError` as `read` does."""
        return list(await asyncio.gather(*map(self._try_one, entries)))

    async def _try_one(self, entry: PreferenceEntry) -> PreferenceExample | CodecError:
        try:
            async with self._reads:
                example = await self._one(entry)
            check_example(example, self._policy.vocab_size, self._policy.max_position_embeddings)
        except CodecError as error:
            # The type decides the fate: `ErasedError` means erased, others unreadable.
            return type(error)(f"{entry.name}: {error}")
        return example

    async def _one(self, entry: PreferenceEntry) -> PreferenceExample:
        record = await self._last(InferenceRecorded, entry.request_id)
        if record is None:
            raise CodecError(f"request {entry.request_id}: the log has no record of it")
        # Checked again here: the events that led to the entry are no proof of consent.
        if not record.training_consent:
            raise CodecError(f"request {entry.request_id}: there is no consent to train on it")
        turn = await open_live_turn(self._store, self._opener.open, record.turn, entry.request_id)
        context = from_array(turn.context_ids).astype(np.int64)
        reply = _reply(context, from_array(turn.token_ids), turn.forced)
        if entry.kind is PreferenceKind.LABEL:
            return PreferenceExample(
                chosen=reply if entry.is_desirable else None,
                rejected=None if entry.is_desirable else reply,
                weight=entry.weight,
            )
        chosen = _reply(context, np.array(await self._correction(entry.feedback), np.int64))
        return PreferenceExample(chosen=chosen, rejected=reply)

    async def _correction(self, key: str) -> list[int]:
        event = await self._last(FeedbackReceived, key)
        if event is None or event.content is None:
            raise CodecError(f"feedback {key}: the log has no correction of it")
        data = await self._opener.open(event.content, key)
        content = parse_msgpack(data, FeedbackContent, f"content of feedback {key}")
        if not content.correction_ids:
            raise CodecError(f"feedback {key}: its correction has no token ids")
        return content.correction_ids


def _reply(
    context: np.ndarray, token_ids: np.ndarray, forced: Sequence[tuple[int, int]] = ()
) -> PreferenceReply:
    # Forced tokens were not sampled: they count as context, as in every loss.
    ids = token_ids.astype(np.int64)
    is_target = np.ones(ids.size, bool)
    for start, end in forced:
        is_target[start:end] = False
    return PreferenceReply(context_ids=context, reply_ids=ids, is_target=is_target)
