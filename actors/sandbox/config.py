"""Settings of a sandbox host."""

import msgspec


class SandboxHostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what one host leases."""

    num_leases_max: int = 32
    """Machines leased at once; one more is refused as busy."""
    lease_s_max: float = 600.0
    """Longest lease that an asker may name."""
    num_results_kept: int = 64
    """Ended commands of one lease whose results a repeated request still gets."""

    def __post_init__(self) -> None:
        """Refuse values that bound nothing."""
        for field in self.__struct_fields__:
            if getattr(self, field) <= 0:
                raise ValueError(f"sandbox.{field}: expected > 0, got {getattr(self, field)}")
