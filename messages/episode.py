"""Intermediate states of episodes, and the files that a task's set-up scripts produce."""

import hashlib
from typing import ClassVar

from penstock.messages.base import Array, Claim, Event, Stream
from penstock.messages.rollout import EgressAttempt, EpisodeFiles
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt
from penstock.messages.task import Split


class EpisodeSaved(Event, frozen=True, kw_only=True):
    """Rollout worker -> worker that resumes or branches the episode: its state after a turn.

    The machine's state is a checkpoint on its host. If that is lost, the calls of the stored turns
    are run again in a fresh machine.
    """

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    keyed_by: ClassVar[tuple[str, ...]] = ("rollout_id", "num_turns")
    rollout_id: str
    group_id: str
    num_turns: NonNegativeInt
    """Turns whose calls the machine has run."""
    checkpoint_id: str
    host: str
    observation_ids: Array
    """int32 [P]: context tokens of the next turn."""
    num_calls: int
    num_invalid_calls: int
    tool_s: float
    elapsed_s: float
    """Seconds since the episode began."""
    own_s: float = 0.0
    """Part of `elapsed_s` during which the policy's programs ran."""
    egress: list[EgressAttempt] = []
    """Network attempts so far; kept here because a copy of the machine starts an empty record."""
    call_s: list[list[NonNegativeFloat]] = []
    """Seconds per call of the turns so far, as in `RolloutFinished.call_s`."""
    starts_segment: bool = False
    """Whether the next turn starts a segment, as in `Turn.starts_segment`."""
    is_summary: bool = False
    """Whether the next turn is a summary, as in `Turn.is_summary`."""
    step_ends: list[NonNegativeInt] = []
    """Turns that ended a step so far, as in `RolloutFinished.step_ends`."""


class EpisodeStepEnded(Event, frozen=True, kw_only=True):
    """Rollout worker -> judge of the rollout: files left by one step of a multi-step task.

    The files of the step in which the episode ended are in `RolloutFinished`.
    """

    stream: ClassVar[Stream] = Stream.TRAJECTORIES
    keyed_by: ClassVar[tuple[str, ...]] = ("rollout_id", "turn_index")
    rollout_id: str
    group_id: str
    step: NonNegativeInt
    turn_index: NonNegativeInt
    """Index of the turn that ended the step."""
    files: EpisodeFiles | Claim
    """Files that differ from those that the task had written into the machine by then."""
    deleted: list[str] = []


def set_up_key(split: Split, task_id: str, step: int) -> str:
    """Return the key of a `SetUpRecorded`; the task id is hashed because it may be any text."""
    # Task ids come from outside and may have characters that a subject cannot have.
    return f"{split}.{hashlib.sha256(task_id.encode()).hexdigest()[:32]}.{step}"


class SetUpRecorded(Event, frozen=True, kw_only=True):
    """Judge -> judges and readers of episodes: files that a task's set-up scripts produced.

    Recorded in a machine that no policy has used: files that an episode left in the same state are
    not changes made by the policy.
    """

    stream: ClassVar[Stream] = Stream.REWARDS
    split: Split
    task_id: str
    step: NonNegativeInt
    files: EpisodeFiles | Claim
    """Against all that the task had written into the machine by then."""
    deleted: list[str] = []

    def key(self) -> str:
        """Return the key: one event per task and step."""
        return set_up_key(self.split, self.task_id, self.step)
