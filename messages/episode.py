"""What an episode stores on its way, and what its task's set-up makes before any policy acts."""

import hashlib
from typing import ClassVar

from penstock.messages.base import Array, Claim, Event, Stream
from penstock.messages.rollout import EgressAttempt, EpisodeFiles
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt
from penstock.messages.task import Split


class EpisodeSaved(Event, frozen=True, kw_only=True):
    """Rollout worker -> the worker that resumes or branches the episode: what a turn left.

    The machine is a checkpoint of its host. Should that be gone, the stored turns' calls are run
    again in a fresh machine.
    """

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    rollout_id: str
    group_id: str
    num_turns: NonNegativeInt
    """Played in the machine."""
    checkpoint_id: str
    host: str
    observation_ids: Array
    """int32 [P]: the next turn's context."""
    num_calls: int
    num_invalid_calls: int
    tool_s: float
    elapsed_s: float
    """Seconds since the episode began."""
    own_s: float = 0.0
    """Of these, how long the policy's programs ran."""
    egress: list[EgressAttempt] = []
    """What its programs had tried to reach by then: a copy of the machine begins a new record."""
    call_s: list[list[NonNegativeFloat]] = []
    """As `RolloutFinished.call_s`, of the turns so far."""
    starts_segment: bool = False
    """Of the next turn, like the one below: as `Turn` says."""
    is_summary: bool = False
    step_ends: list[NonNegativeInt] = []
    """As `RolloutFinished.step_ends`, so far."""

    def key(self) -> str:
        """One per rollout and number of turns: the first that was saved."""
        return f"{self.rollout_id}.{self.num_turns}"


class EpisodeStepEnded(Event, frozen=True, kw_only=True):
    """Rollout worker -> the judge that grades the rollout: what one step of its task left.

    The step in which the episode ended has its files in `RolloutFinished`.
    """

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    rollout_id: str
    group_id: str
    step: NonNegativeInt
    turn_index: NonNegativeInt
    """Of the turn that ended it."""
    files: EpisodeFiles | Claim
    """Against all that the task had written into the machine by then."""
    deleted: list[str] = []

    def key(self) -> str:
        """One per rollout and turn, as `RolloutFinished.turn_key` names it."""
        return f"{self.rollout_id}.{self.turn_index}"


def set_up_key(split: Split, task_id: str, step: int) -> str:
    """Return the key of what the set-ups of a task made by a step; its id may be any text."""
    return f"{split}.{hashlib.sha256(task_id.encode()).hexdigest()[:32]}.{step}"


class SetUpRecorded(Event, frozen=True, kw_only=True):
    """Judge -> judges and readers of episodes: what a task's own set-ups made by one of its steps.

    In a machine that no policy has had. What an episode left just so is no change of the policy's.
    """

    stream: ClassVar[Stream] = Stream.REWARDS
    split: Split
    task_id: str
    step: NonNegativeInt
    files: EpisodeFiles | Claim
    """Against all that the task had written into the machine by then."""
    deleted: list[str] = []

    def key(self) -> str:
        """One per task and step."""
        return set_up_key(self.split, self.task_id, self.step)
