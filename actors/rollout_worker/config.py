"""Settings of rollout workers."""

import msgspec

from penstock.actors.policy.summaries import SummaryConfig
from penstock.envs.sandbox_client.client import GroupSpec, LeaseSpec, SavedSandbox
from penstock.messages.episode import EpisodeSaved
from penstock.messages.retries import RetryPolicy
from penstock.messages.settings import NonNegativeInt, PositiveFloat, PositiveInt
from penstock.messages.task import Purpose, StartRollout


class RolloutWorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on what an episode waits for; limits on the policy are in the task."""

    num_concurrent: PositiveInt = 16
    """Concurrent episodes, and so machines; each branch of a tree is one."""
    generate_idle_s: PositiveFloat = 20.0
    """Maximum silence of a generator before the turn is sampled again."""
    generate_wait_s: PositiveFloat = 180.0
    """Maximum time for one turn before the episode ends as an infrastructure error."""
    acquire_wait_s: PositiveFloat = 120.0
    """Maximum wait for a sandbox host with room."""
    retry_delay_s: PositiveFloat = 0.2
    """First pause before asking again; doubles up to `retry_delay_s_max`."""
    retry_delay_s_max: PositiveFloat = 5.0
    places_groups: bool = False
    """Ask the scheduler for one host per group; otherwise any host with room takes the machine."""
    lease_s: PositiveFloat = 60.0
    """A machine is reaped this long after its worker's last request."""
    num_machines_max: PositiveInt = 3
    """Machines per episode; each resumes from a saved state or from the stored turns."""
    checkpoint_turns: NonNegativeInt = 0
    """Save an episode's machine every this many turns, which bounds what a crash costs; needs
    machines that can be saved. 0 never saves: the calls of stored turns run again."""
    restore_wait_s: PositiveFloat = 20.0
    """Maximum wait for the host of a saved state, before the machine is rebuilt from the turns."""
    ends_on_parse_error: bool = False
    """Whether a turn that does not parse ends the episode; otherwise the policy sees the error."""
    num_files_max: PositiveInt = 256
    """Maximum files that an episode may change."""
    files_bytes_max: PositiveInt = 256 << 10
    summary: SummaryConfig = SummaryConfig()
    """Summaries, for tasks whose limits allow several segments."""

    @property
    def retry(self) -> RetryPolicy:
        """Retries of one turn."""
        return RetryPolicy(
            pause_s=self.retry_delay_s,
            pause_s_max=self.retry_delay_s_max,
            deadline_s=self.generate_wait_s,
        )

    def is_save_due(self, num_turns: int) -> bool:
        """Return whether to save an episode after `num_turns` turns."""
        return self.checkpoint_turns > 0 and num_turns % self.checkpoint_turns == 0

    def lease_spec(
        self,
        command: StartRollout,
        saved: EpisodeSaved | None,
        *,
        takes_over: bool,
        avoid_host: str = "",
    ) -> LeaseSpec:
        """Return the lease of an episode's machine, or of a copy of a saved one.

        With a host to avoid, the machine is placed apart from its group.
        """
        # Rollouts of an evaluation need many images and may exceed one host's room.
        is_single = command.purpose is Purpose.EVAL
        group = GroupSpec(
            group_id=command.rollout_id if is_single else command.group_id,
            num_machines=1 if is_single else command.group_size,
            holder=command.purpose,
        )
        branch_of = None
        if saved is not None:
            branch_of = SavedSandbox(checkpoint_id=saved.checkpoint_id, host=saved.host)
        return LeaseSpec(
            holder=command.rollout_id,
            lease_s=self.lease_s,
            acquire_wait_s=self.restore_wait_s if saved else self.acquire_wait_s,
            retry_delay_s=self.retry_delay_s,
            image_digest=command.task.image,
            machine=command.task.machine,
            takes_over=takes_over,
            branch_of=branch_of,
            group=group if self.places_groups and not avoid_host else None,
            avoid_host=avoid_host,
        )
