"""The turns of a run, to be asked for again: what each read, and how it was sampled."""

import asyncio
from dataclasses import dataclass

import numpy as np

from penstock.infra.run.runs import RunDir, open_log
from penstock.kernels.arrays import from_array
from penstock.messages.reading.trajectories import load_turn
from penstock.messages.rollout import Turn, TurnSampled
from penstock.messages.task import Purpose, Sampling


@dataclass(frozen=True)
class RecordedTurn:
    """A turn as a request."""

    context: np.ndarray
    """int32 [P]: all that the episode had read and sampled before."""
    sampling: Sampling


def read_episodes(run: RunDir) -> list[list[RecordedTurn]]:
    """Return the training episodes of a run in the order in which they began.

    Raises:
        BusError: The log cannot be read.

    """
    return asyncio.run(_read(run))


async def _read(run: RunDir) -> list[list[RecordedTurn]]:
    turns: dict[str, dict[int, Turn]] = {}
    async with open_log(run, "bench") as bus:
        async for delivery in bus.follow((TurnSampled,), stop_at_end=True):
            event = delivery.event
            if isinstance(event, TurnSampled) and event.purpose is Purpose.TRAIN:
                turn = await load_turn(run.store(), event.turn)
                turns.setdefault(event.rollout_id, {})[event.turn_index] = turn
    return [_requests([by_index[i] for i in sorted(by_index)]) for by_index in turns.values()]


def _requests(turns: list[Turn]) -> list[RecordedTurn]:
    context, requests = np.empty(0, np.int32), list[RecordedTurn]()
    for turn in turns:
        before = np.empty(0, np.int32) if turn.starts_segment else context
        context = np.concatenate([before, from_array(turn.context_ids)]).astype(np.int32)
        if turn.sampling is not None:
            requests.append(RecordedTurn(context, turn.sampling))
        context = np.concatenate([context, from_array(turn.token_ids)]).astype(np.int32)
    return requests
