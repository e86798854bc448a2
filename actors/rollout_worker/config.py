"""Settings of rollout workers."""

import msgspec


class RolloutWorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of everything that an episode waits for; what the policy may do is the task's."""

    num_concurrent: int = 16
    """Episodes at once."""
    generate_idle_s: float = 20.0
    """Longest silence of a generator before the turn is sampled again."""
    generate_wait_s: float = 180.0
    """Longest time that one turn is tried before the episode is an infrastructure error."""
    acquire_wait_s: float = 120.0
    """Longest wait for a sandbox host with room."""
    retry_delay_s: float = 0.2
    """First pause before asking again; doubles up to `retry_delay_s_max`."""
    retry_delay_s_max: float = 5.0
    lease_s: float = 60.0
    """A machine is reaped this long after its worker's last request."""
    num_machines_max: int = 3
    """Machines tried for one episode; each rebuilds its state from the stored turns."""
    ends_on_parse_error: bool = False
    """Whether a turn that does not parse ends the episode, or is told to the policy."""
    num_files_max: int = 256
    """Bound on the files that an episode may leave changed."""
    files_bytes_max: int = 256 << 10

    def __post_init__(self) -> None:
        """Refuse values that bound nothing."""
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if not isinstance(value, bool) and value <= 0:
                raise ValueError(f"rollout_worker.{field}: expected > 0, got {value}")
