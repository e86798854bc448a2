"""Events that record the order of training, which a replay follows."""

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
    """Credit of a sample's first tokens if other samples branched off after them."""

    num_tokens: int
    """Number of sampled tokens in the shared turns."""
    branches: list[str]
    """Trained rollouts that share the turns, including the sample itself."""
    advantage: Finite
    """Mean of the branches' advantages, which these tokens get in place of the sample's own."""


class SampleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout or live sample in a batch manifest, either trained or left out for a reason."""

    rollout_id: str
    outcome: Outcome
    """Outcome: SOLVED, FAILED, POLICY_ERROR and TIMEOUT are trained; others say why it is not."""
    reward: Finite
    advantage: Finite
    """Advantage of every sampled token of every turn; 0 if not trained."""
    version_spans: list[VersionSpan]
    """Versions of all sampled tokens, merged over turns; the conservation ledger counts these."""
    trunk: TrunkCredit | None = None
    """Credit of the shared turns if other rollouts branched off this one."""
    tenant: str = ""
    """Tenant of a live sample, to whose baseline and cap it counts."""
    user: str = ""
    """Pseudonym of the tenant's user who sent a live sample's requests."""
    share: UnitInterval = 1.0
    """Factor on a live sample's advantage that the caps on users and tenants left."""
    revision: NonNegativeInt = 0
    """Revision of a live sample; this field and those below, up to `weight`, are as in
    `LiveSampleJoined`."""
    num_turns: NonNegativeInt = 0
    turn_rewards: list[Finite] = []
    unrated: list[NonNegativeInt] = []
    weight: NonNegativeFloat = 1.0
    ess: UnitInterval = 1.0
    """Effective sample size of a live sample's tokens under the policy being trained, as a
    fraction; 1 if that policy sampled all of them."""
    ratio: NonNegativeFloat = 1.0
    """Geometric mean over tokens of their probability under the policy being trained, divided by
    that when they were sampled."""
    is_change: bool = False
    """Whether an earlier revision was trained; advantages are then the difference to it."""
    turn_advantages: list[Finite] = []
    """Advantage by turn, with `advantage` as their mean; empty if all turns have the same."""
    trained_from: NonNegativeInt = 0
    """Oldest policy version of a rollout whose tokens are trained; tokens of earlier versions are
    withheld and remain as context."""
    num_inputs: list[PositiveInt] = []
    """Number of tokens that the model reads in each sequence of a trained sample, by which batches
    are split. Empty in logs of earlier builds."""

    @property
    def trained_spans(self) -> list[VersionSpan]:
        """Trained tokens by policy version."""
        if not self.outcome.is_trained:
            return []
        # Tokens of older versions are context: see `withhold` of `trainer.staleness_policy`.
        return [span for span in self.version_spans if span.policy_version >= self.trained_from]


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Group of rollouts of one task in a batch manifest."""

    group_id: str
    group_index: int
    task_id: str
    samples: list[SampleEntry]
    num_judged: NonNegativeInt = 0
    """Number of rollouts whose outcome the policy caused, whether they are trained or not."""
    num_solved: NonNegativeInt = 0
    """Number of judged rollouts that were solved."""
    is_length_only: bool = False
    """Whether rewards differ only by the length penalty. Such a group does not use up a place in
    the batch and does not reduce other groups' weight (`batching/manifests.py`)."""

    @property
    def has_unequal_work(self) -> bool:
        """Whether some rollouts did better than others, apart from their length."""
        rewards = {sample.reward for sample in self.samples if not sample.outcome.is_masked}
        return len(rewards) > 1 and not self.is_length_only


class BatchManifest(Event, frozen=True, kw_only=True):
    """Trainer -> trainer, replay, ledger: content of a batch.

    It is published before the step is taken, so that each sample is trained exactly once.
    """

    stream: ClassVar[Stream] = Stream.TRAINING
    keyed_by: ClassVar[tuple[str, ...]] = ("step",)
    step: int
    """Number of the step, from 1; step 1 makes policy version 1."""
    policy_version: int
    """Policy version that the batch trains: step - 1."""
    groups: list[GroupEntry]
    """Groups in the order of training."""
    discarded: list[GroupEntry] = []
    """Groups that left the pool in this step without being trained (filtered, failed, stale)."""
    live: list[SampleEntry] = []
    """Live samples; `rollout_id` is the sample id."""
    preferences: list[PreferenceEntry] = []
    """Users' corrections and judgments."""
    settings: str = ""
    """Trainer settings of this step as JSON, as a service may continue a run with other settings;
    empty for the run's own."""

    @property
    def num_placed(self) -> int:
        """Number of groups that use up a place in the batch."""
        return sum(not group.is_length_only for group in self.groups)

    @property
    def num_made_up_for(self) -> int:
        """Number of groups that others replace: discarded ones and those without a place."""
        return len(self.discarded) + len(self.groups) - self.num_placed


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens by fate; `generated` is the sum of all other columns."""

    generated: int = 0
    trained: int = 0
    stale: int = 0
    filtered: int = 0
    infra_failed: int = 0
    judge_failed: int = 0
    not_reproducible: int = 0
    """Tokens of samples whose distribution the trainer cannot compute."""
    greedy: int = 0
    """Tokens of samples drawn at temperature 0."""
    erased: int = 0
    """Tokens of samples whose users were erased before training."""
    skipped: int = 0
    """Tokens of steps that changed no weights (`StepCompleted.skipped`)."""
    withheld: int = 0
    """Tokens too old for the step that trained their group, in whose baseline their rewards count;
    and tokens of turns that are read but not trained (`Turn.is_withheld`)."""
    in_flight: int = 0


class VersionDrift(msgspec.Struct, frozen=True, kw_only=True):
    """Divergence between the version that a step trained and one that sampled users' tokens."""

    num_tokens: int
    kl: float
    """Mean over tokens of r - 1 - log r in nats, with r = trainer / sampler probability."""
    ess: float
    """Effective sample size (sum r)^2 / (N sum r^2); 1 for equal policies."""


class StepCompleted(Event, frozen=True, kw_only=True):
    """Trainer -> publisher, pacer, replay, monitor: a step made a new policy version."""

    stream: ClassVar[Stream] = Stream.TRAINING
    keyed_by: ClassVar[tuple[str, ...]] = ("step",)
    step: int
    policy_version: int
    """Policy version that the step made, equal to `step`."""
    weights_digest: str
    """Digest of the float32 master weights."""
    optimizer_digest: str
    metrics: dict[str, float]
    """Metrics of the step: loss, reward_mean, pass_rate (over all groups in its manifest),
    grad_norm, mismatch_k1, mismatch_k3, ess, masked_fraction, staleness_mean, staleness_max ..."""
    staleness_tokens: dict[int, int] = {}
    """Staleness when trained -> number of trained tokens of rollouts."""
    train_s: float = 0.0
    wait_s: float = 0.0
    skipped: str = ""
    """Why the step changed neither weights nor optimizer (non-finite loss or gradient), though it
    made a version and used up its batch; empty for a normal step."""
    num_skipped: int = 0
    """Number of consecutive skipped steps, including this one."""
    drift: dict[int, VersionDrift] = {}
    """Divergence from users' tokens, by the version that sampled them."""
    arithmetic: str = ""
    """Library version and vector units that computed the step; empty: not recorded."""


class MidtrainCompleted(Event, frozen=True, kw_only=True):
    """Trainer -> everyone: mid-training is done and policy version 0 exists."""

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
    """Number of times that mid-training resumed from a save."""
    is_cached: bool = False
    """Whether the result was taken from an earlier run with the same inputs, bit for bit."""

    def key(self) -> str:
        """Return the key: one event per run."""
        return "midtrain"


class ArithmeticChanged(Event, frozen=True, kw_only=True):
    """Trainer -> replay: from a checkpoint on, steps are computed by another machine or library.

    Steps after the checkpoint that were taken already are taken again; their versions stay as they
    were published.
    """

    stream: ClassVar[Stream] = Stream.TRAINING
    step: int
    """Step of the checkpoint."""
    checkpoint: str
    """Key of the checkpoint's head, which is deleted when newer checkpoints replace it."""
    before: str
    now: str

    def key(self) -> str:
        """Return the key: one event per step and arithmetic."""
        return f"{self.step}.{self.now.encode().hex()[-64:]}"


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """Trainer -> trainer at the next start, garbage collection: a checkpoint is complete."""

    stream: ClassVar[Stream] = Stream.TRAINING
    keyed_by: ClassVar[tuple[str, ...]] = ("step",)
    step: int
    object_key: str
    """Key of the checkpoint's head in the object store; the head names the tensors' objects."""
    weights_digest: str

    def object_keys(self) -> list[str]:
        """List the checkpoint's head."""
        return [self.object_key]
