"""What one attempt at an episode came to, and the event that closes its account."""

import msgspec

from penstock.actors.rollout_worker.changes import Changes
from penstock.envs.egress.record import EgressRecord
from penstock.messages.base import Array
from penstock.messages.rollout import (
    EgressAttempt,
    EpisodeEnd,
    EpisodeSaved,
    RolloutFinished,
    SandboxRecord,
    Trunk,
    Turn,
)
from penstock.messages.task import StartRollout


class Tally(msgspec.Struct, kw_only=True):
    """Counts of one machine's episode, from its beginning or from where it was saved."""

    started_at: float = 0.0
    """When the episode would have begun, had nothing come in between; monotonic seconds."""
    sandbox: SandboxRecord | None = None
    num_calls: int = 0
    num_invalid_calls: int = 0
    tool_s: float = 0.0
    lost_s: float = 0.0
    """Time that generators were away: none of the policy's."""
    egress_before: list[EgressAttempt] = []
    """What programs tried to reach outside, up to where the machine was saved."""
    egress: list[EgressAttempt] = []
    """The same, and in this machine as far as it was read."""

    def add_egress(self, attempts: list[EgressAttempt]) -> None:
        """Take in all that this machine has on record."""
        self.egress = EgressRecord([*self.egress_before, *attempts]).lines

    def elapsed_s(self, now: float) -> float:
        """Return the episode's own time so far."""
        return now - self.started_at - self.lost_s

    def saved(
        self, command: StartRollout, num_turns: int, observation_ids: Array, now: float
    ) -> EpisodeSaved:
        """Return the account so far; the checkpoint is still to be named."""
        return EpisodeSaved(
            rollout_id=command.rollout_id,
            group_id=command.group_id,
            num_turns=num_turns,
            checkpoint_id="",
            host="",
            observation_ids=observation_ids,
            num_calls=self.num_calls,
            num_invalid_calls=self.num_invalid_calls,
            tool_s=self.tool_s,
            elapsed_s=self.elapsed_s(now),
            egress=self.egress,
        )


def open_tally(sandbox: SandboxRecord, saved: EpisodeSaved | None, now: float) -> Tally:
    """Return the account of an episode that begins in a machine, or goes on in it."""
    if saved is None:
        return Tally(started_at=now, sandbox=sandbox)
    return Tally(
        started_at=now - saved.elapsed_s,
        sandbox=sandbox,
        num_calls=saved.num_calls,
        num_invalid_calls=saved.num_invalid_calls,
        tool_s=saved.tool_s,
        egress_before=saved.egress,
        egress=saved.egress,
    )


def close_account(  # noqa: PLR0913 - all that an end has
    command: StartRollout,
    tally: Tally,
    turns: list[Turn],
    trunk: Trunk | None,
    *,
    end: EpisodeEnd,
    changes: Changes,
    error: str,
    now: float,
) -> RolloutFinished:
    """Return an episode's end."""
    return RolloutFinished(
        rollout_id=command.rollout_id,
        group_id=command.group_id,
        group_index=command.group_index,
        group_size=command.group_size,
        member=command.member,
        purpose=command.purpose,
        task_id=command.task.task_id,
        rung=command.task.rung,
        end=end,
        turns=turns,
        files=changes.files,
        deleted=changes.deleted,
        sandbox=tally.sandbox,
        num_calls=tally.num_calls,
        num_invalid_calls=tally.num_invalid_calls,
        wall_s=now - tally.started_at if tally.sandbox else 0.0,
        tool_s=tally.tool_s,
        error=error,
        egress=tally.egress,
        trunk=trunk,
    )
