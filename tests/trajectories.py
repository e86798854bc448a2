"""Finished rollouts with what they recorded, as a judge reads them in."""

from collections.abc import Sequence
from typing import Any

from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.rollout import EpisodeFiles, RolloutFinished, Turn


def trajectory(
    *, turns: Sequence[Turn] = (), files: dict[str, bytes] | None = None, **fields: Any
) -> Trajectory:
    """Return a rollout of these turns and files; `fields` are its event's own."""
    finished = RolloutFinished(
        **fields, turns=[turn.summary for turn in turns], files=EpisodeFiles()
    )
    return Trajectory(finished=finished, turns=list(turns), files=files or {})
