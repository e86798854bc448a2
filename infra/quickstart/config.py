"""The `[prepare]` section: how much a run starts from."""

import msgspec

from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.ladder.generate import Selection
from penstock.envs.ladder.repository import LIMITS
from penstock.envs.ladder.transcripts import Habits
from penstock.envs.trail.config import TrailConfig
from penstock.infra.quickstart.slow_calls import SlowCalls
from penstock.infra.quickstart.sources import EpisodeLimits, SourceConfig, SourceKind
from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, UnitInterval


class PrepareConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and sources of what a run starts from."""

    selection: Selection = Selection()
    """Categories and families of all tasks, trained, held out and demonstrated."""
    tasks: str = ""
    """Folder of Harbor tasks (`penstock tasks make`, or others'), in place of the ladder's.
    Demonstrations are the ladder's all the same."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sources of tasks, each with its weight and limits, in place of that one."""
    egress_addresses: bool = False
    """Whether these tasks' rules may name addresses; as `sandbox_host.egress_addresses`."""
    evaluates_unseparated: bool = False
    """Whether held-out tasks may have verifiers that the code under test could deceive."""
    isolation_min: str = ""
    """Least isolation of machines for strangers' tasks; as `sandbox_host.isolation_min`."""
    num_train_tasks: PositiveInt = 1024
    num_heldout_tasks: PositiveInt = 128
    num_demonstrations: NonNegativeInt = 8000
    """Episodes of mid-training, each on a task of its own."""
    code_tokens: NonNegativeInt = 500_000
    """Standard-library tokens of mid-training; 0: none, where `model.corpora` has others."""
    code_weight: NonNegativeFloat = 0.3
    """Weight of a code token as a target; a token of the demonstrating actor has 1."""
    context_weight: NonNegativeFloat = 0.1
    """Weight of a token that the demonstrating actor reads."""
    endings: UnitInterval = 1.0
    """Share of the demonstrations that are read to their ends. Others are cut after their last
    edits: what follows takes a third of the tokens, and little of it is hard to learn."""
    drill_tokens: NonNegativeInt = 160_000
    """Tokens of repeated rows, from which copying is learned."""
    drill_half_tokens: PositiveInt = 20
    piece_tokens: PositiveInt = 256
    habits: Habits = Habits()
    trail: TrailConfig | None = None
    """Trails in place of the ladder: its tasks, unless `sources` says otherwise, and its
    demonstrations."""
    limits: EpisodeLimits = EpisodeLimits(**msgspec.structs.asdict(LIMITS))
    """Limits of an episode of any of these tasks."""
    slow_calls: SlowCalls | None = None
    """Machines that sleep before each call, for measurements; by default none does."""
    harness: str = HARNESS_VERSION
    """Version of the tools that demonstrations use; by default the one of `pacer.harness`."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"prepare.sources: expected each name once, got {name!r} twice")
        if self.sources and self.tasks:
            text = "expected none beside prepare.sources; make it one of these, of kind folder"
            raise ConfigError(f"prepare.tasks: {text}")
        if self.sources and not any(source.weight for source in self.sources):
            raise ConfigError("prepare.sources: expected a weight above 0")

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The sources; without any, the one that the other settings describe."""
        if self.sources:
            return self.sources
        kind = SourceKind.TRAIL if self.trail else SourceKind.LADDER
        kind = SourceKind.FOLDER if self.tasks else kind
        return (SourceConfig(name=kind.value, kind=kind, path=self.tasks),)
