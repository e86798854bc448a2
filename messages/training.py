"""The order of training: what replay follows."""

from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.reward import Outcome
from penstock.messages.rollout import VersionSpan
from penstock.messages.settings import (
    Finite,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UnitInterval,
)
from penstock.messages.signals.preferences import PreferenceEntry


class TrunkCredit(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample's first tokens earn, where other samples branched off after them."""

    num_tokens: int
    """Sampled, of the sample's first turns."""
    branches: list[str]
    """Trained rollouts that share them, the sample itself included."""
    advantage: Finite
    """Mean of the branches' advantages, given to these tokens in place of the sample's own."""


class SampleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout (or live request) in a batch, or left out of it, and why."""

    rollout_id: str
    outcome: Outcome
    """SOLVED, FAILED, POLICY_ERROR, TIMEOUT are trained; the others say why they are not."""
    reward: Finite
    advantage: Finite
    """Given to every sampled token of every turn; 0 where not trained."""
    version_spans: list[VersionSpan]
    """All sampled tokens, merged over turns: the conservation ledger counts these."""
    trunk: TrunkCredit | None = None
    """Credit of the shared turns, where other rollouts branched off this one."""
    tenant: str = ""
    """Of a live sample: whose baseline and cap it counts to."""
    user: str = ""
    """Of a live sample: pseudonym of the tenant's user."""
    share: UnitInterval = 1.0
    """Of a live sample: what the caps on users and tenants left of its advantage."""
    revision: NonNegativeInt = 0
    """Of a live sample, like the fields below; `LiveSampleJoined` says what they are."""
    num_turns: NonNegativeInt = 0
    turn_rewards: list[Finite] = []
    unrated: list[NonNegativeInt] = []
    weight: NonNegativeFloat = 1.0
    ess: UnitInterval = 1.0
    """Effective sample size of its tokens under the policy that trains it, as a share; 1 where that
    policy drew them all."""
    ratio: NonNegativeFloat = 1.0
    """Geometric mean of its tokens' probabilities then over those when they were drawn."""
    is_change: bool = False
    """An earlier revision was trained: advantages are what this one changes of those."""
    turn_advantages: list[Finite] = []
    """By turn, in place of `advantage`, which is their mean; empty: all turns have that."""
    trained_from: NonNegativeInt = 0
    """Of a rollout, the oldest policy version whose tokens are trained: those of versions before it
    are withheld, which leaves them as context."""
    num_inputs: list[PositiveInt] = []
    """Of a trained sample, the tokens that the model reads of each of its sequences: what a batch
    is cut by. Empty in logs of earlier builds."""

    @property
    def trained_spans(self) -> list[VersionSpan]:
        """The sampled tokens that are trained, by version."""
        if not self.outcome.is_trained:
            return []
        return [span for span in self.version_spans if span.policy_version >= self.trained_from]


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of one task."""

    group_id: str
    group_index: int
    task_id: str
    samples: list[SampleEntry]
    num_judged: NonNegativeInt = 0
    """Rollouts that were solved or not by the policy's own doing, whatever became of them here."""
    num_solved: NonNegativeInt = 0
    """Of these, the solved ones."""
    is_length_only: bool = False
    """Its rewards differ by the length penalty alone. It takes no other group's place in a batch,
    and no weight from the others (`batching/manifests.py`)."""

    @property
    def has_unequal_work(self) -> bool:
        """Whether some rollouts did better than others: a group may be trained without it."""
        rewards = {one.reward for one in self.samples if not one.outcome.is_masked}
        return len(rewards) > 1 and not self.is_length_only


class BatchManifest(Event, frozen=True, kw_only=True):
    """Trainer -> trainer, replay, ledger. Published before the step is taken: exactly-once."""

    stream: ClassVar[Stream] = Stream.TRAINING
    step: int
    """1 for the step that makes policy version 1."""
    policy_version: int
    """The version that this batch trains, = step - 1."""
    groups: list[GroupEntry]
    """Groups in the order of training."""
    discarded: list[GroupEntry] = []
    """Groups that left the pool with this step without being trained (filtered, failed, stale)."""
    live: list[SampleEntry] = []
    """Live samples, `rollout_id` being the sample id."""
    preferences: list[PreferenceEntry] = []
    """Users' corrections and judgments."""
    settings: str = ""
    """The trainer's settings as JSON, with which this step is taken: a service may continue a run
    with others. Empty: the run's own."""

    def key(self) -> str:
        """One per step: of two trainers, one wins."""
        return str(self.step)

    @property
    def num_placed(self) -> int:
        """Groups that take one of a batch's places."""
        return sum(not group.is_length_only for group in self.groups)

    @property
    def num_made_up_for(self) -> int:
        """Groups that others are granted for: those not trained, and those without a place."""
        return len(self.discarded) + len(self.groups) - self.num_placed


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens by fate. generated = the sum of all the others."""

    generated: int = 0
    trained: int = 0
    stale: int = 0
    filtered: int = 0
    infra_failed: int = 0
    judge_failed: int = 0
    not_reproducible: int = 0
    """Of samples whose distribution the trainer cannot compute."""
    greedy: int = 0
    """Of samples drawn at temperature 0."""
    erased: int = 0
    """Of samples whose users were erased before they were trained."""
    skipped: int = 0
    """Of steps that changed no weight (`StepCompleted.skipped`)."""
    withheld: int = 0
    """Too old for the step that trained their group, whose baseline has their rollouts' rewards; or
    of turns that are read and not trained (`Turn.is_withheld`)."""
    in_flight: int = 0


class VersionDrift(msgspec.Struct, frozen=True, kw_only=True):
    """How far the version that a step trained from is from one that users' tokens came from."""

    num_tokens: int
    kl: float
    """Mean over the tokens of r - 1 - log r, in nats; r = trainer / sampler probability."""
    ess: float
    """(sum r)^2 / (N sum r^2): 1 for equal policies."""


class StepCompleted(Event, frozen=True, kw_only=True):
    """Trainer -> publisher, pacer, replay, monitor."""

    stream: ClassVar[Stream] = Stream.TRAINING
    step: int
    policy_version: int
    """The version that the step made, = step."""
    weights_digest: str
    """Digest of the fp32 master weights."""
    optimizer_digest: str
    metrics: dict[str, float]
    """loss, reward_mean, pass_rate (of all groups that left with the step), grad_norm, mismatch_k1,
    mismatch_k3, ess, masked_fraction, staleness_mean, staleness_max ..."""
    staleness_tokens: dict[int, int] = {}
    """Staleness at consumption -> number of trained tokens of rollouts."""
    train_s: float = 0.0
    wait_s: float = 0.0
    skipped: str = ""
    """Why the step changed neither weights nor optimizer (its loss or gradient was no finite
    number), though it made a version and used up its batch; empty where it was taken."""
    num_skipped: int = 0
    """Steps skipped in a row, this one included."""
    drift: dict[int, VersionDrift] = {}
    """Of users' tokens, by the version that sampled them."""

    def key(self) -> str:
        """One per step."""
        return str(self.step)


class MidtrainCompleted(Event, frozen=True, kw_only=True):
    """Trainer -> everyone: policy version 0 exists."""

    stream: ClassVar[Stream] = Stream.TRAINING
    num_tokens: int
    loss_first: float
    loss_last: float
    heldout_loss: float
    heldout_perplexity: float
    weights_digest: str
    wall_s: float
    num_saves: NonNegativeInt = 0
    num_resumed: NonNegativeInt = 0
    """Times that it went on from a save."""
    is_cached: bool = False
    """Whether an earlier run took its steps, from the same inputs to the same bits."""

    def key(self) -> str:
        """One per run."""
        return "midtrain"


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """Trainer -> trainer at the next start, garbage collection."""

    stream: ClassVar[Stream] = Stream.TRAINING
    step: int
    object_key: str
    """Key of the checkpoint's head in the run's object store; it names the objects of tensors."""
    weights_digest: str

    def key(self) -> str:
        """One per step."""
        return str(self.step)

    def object_keys(self) -> list[str]:
        """List the checkpoint."""
        return [self.object_key]
