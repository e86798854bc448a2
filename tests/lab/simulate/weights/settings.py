"""What is simulated: the sizes, the links, and what goes wrong."""

import msgspec

from penstock.messages.errors import ConfigError

GB = 1e9
GBIT = 1e9 / 8


class RegionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One region as seen from the trainer's site."""

    name: str
    link_gbit_s: float
    """Bandwidth from the origin store to the relay."""
    round_trip_s: float


class Mishap(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong, in one region; by default nothing does."""

    region: str = ""
    relay_lost_at_step: int = 0
    relay_lost_s: float = 0.0
    link_factor: float = 1.0
    """Remaining share of the region's bandwidth, from the first step on."""
    join_at_step: int = 0
    num_joiners: int = 0
    """Replicas that join without weights."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A whole simulation; it and the seed decide every figure."""

    seed: int = 0
    num_steps: int = 50
    step_s: float = 60.0
    model_bytes: int = 10**12
    num_ranks: int = 512
    rank_gbit_s: float = 25.0
    """Bandwidth of each rank, each verifier and the committer."""
    ranks_per_verifier: int = 8
    """Ranks whose shards one verifier reads back: they hold its tensors together."""
    origin_round_trip_s: float = 0.002
    """Round trip from ranks, verifiers and committer to the origin store."""
    regions: tuple[RegionSettings, ...] = (
        RegionSettings(name="home", link_gbit_s=100.0, round_trip_s=0.002),
        RegionSettings(name="europe", link_gbit_s=100.0, round_trip_s=0.09),
        RegionSettings(name="asia", link_gbit_s=50.0, round_trip_s=0.18),
        RegionSettings(name="south", link_gbit_s=25.0, round_trip_s=0.14),
    )
    num_replicas: int = 1000
    """Spread evenly over the regions."""
    fan_out_gbit_s: float = 1600.0
    """Bandwidth of each region's store, for all its replicas together."""
    replica_gbit_s: float = 100.0
    encode_gb_s: float = 4 * 0.89
    """Speed of each rank, in bytes of the model: four threads at the measured speed of one."""
    verifier_decode_gb_s: float = 16 * 1.0
    """Speed of each verifier, in bytes of the model: sixteen threads."""
    verifier_digest_gb_s: float = 16 * 1.15
    """Likewise, for all digests together."""
    decode_gb_s: float = 256 * 1.0
    """Speed of each replica, in bytes of the model: 256 threads on its hosts."""
    relay_gb_s: float = 64 * 0.89
    """Speed of each relay, for a merged delta or a full snapshot: 64 threads."""
    swap_s: float = 0.03
    """Pause of generation; an assumption."""
    learning_rate: str = "3e-6"
    """Row of the measured ratios."""
    mishap: Mishap = Mishap()

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        for name in ("num_steps", "num_ranks", "num_replicas"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"simulation: {name}: expected 1 or more, got {value}")
        if self.num_replicas % len(self.regions):
            text = f"expected a multiple of {len(self.regions)} regions, got {self.num_replicas}"
            raise ConfigError(f"simulation: num_replicas: {text}")

    @property
    def replicas_per_region(self) -> int:
        """Return the replicas of each region."""
        return self.num_replicas // len(self.regions)
