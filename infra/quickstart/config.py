"""The `[prepare]` section: how much a run starts from."""

import msgspec

from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.ladder.generate import Selection
from penstock.envs.ladder.repository import LIMITS
from penstock.envs.ladder.transcripts import Habits
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt, PositiveInt
from penstock.messages.task import Limits


class EpisodeLimits(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits as settings: an unknown key is refused."""


class PrepareConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and sources of what a run starts from."""

    selection: Selection = Selection()
    """Categories and families of all tasks, trained, held out and demonstrated."""
    tasks: str = ""
    """Folder of Harbor tasks (`penstock tasks make`, or others'), in place of the ladder's.
    Demonstrations are the ladder's all the same."""
    egress_addresses: bool = False
    """Whether these tasks' rules may name addresses; as `sandbox.egress_addresses`."""
    evaluates_unseparated: bool = False
    """Whether held-out tasks may have verifiers that the code under test could deceive."""
    isolation_min: str = ""
    """Least isolation of machines for strangers' tasks; as `sandbox.isolation_min`."""
    num_train_tasks: PositiveInt = 1024
    num_heldout_tasks: PositiveInt = 128
    num_demonstrations: PositiveInt = 8000
    """Episodes of mid-training, each on a task of its own."""
    code_tokens: PositiveInt = 500_000
    """Standard-library tokens of mid-training."""
    code_weight: NonNegativeFloat = 0.3
    """Weight of a code token as a target; a token of the demonstrating actor has 1."""
    context_weight: NonNegativeFloat = 0.1
    """Weight of a token that the demonstrating actor reads."""
    drill_tokens: NonNegativeInt = 160_000
    """Tokens of repeated rows, from which copying is learned."""
    drill_half_tokens: PositiveInt = 20
    piece_tokens: PositiveInt = 256
    habits: Habits = Habits()
    limits: EpisodeLimits = EpisodeLimits(**msgspec.structs.asdict(LIMITS))
    """Limits of an episode of any of these tasks."""
    harness: str = HARNESS_VERSION
    """Version of the tools that demonstrations use; by default the one of `pacer.harness`."""
