"""Settings of the trainer. Imports no torch, so that a wrong setting is reported at once."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.actors.policy.config import DEVICES
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.objective.registry import LOSSES
from penstock.actors.trainer.preferences.config import PreferencesConfig
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.settings import (
    AtLeastOne,
    NonNegativeFloat,
    NonNegativeInt,
    NumThreads,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    one_of,
    one_of_or_own,
)

ESTIMATORS = ("dr_grpo", "grpo", "rloo")
CORRECTIONS = ("none", "token_tis", "sequence_tis", "icepop", "sequence_mis", "geometric")
ENGINE_CORRECTIONS = ("icepop", "geometric")
"""Corrections whose narrow bounds are on the engine's part of a ratio."""
REJECTIONS = (
    *("none", "token_k1", "token_k2", "token_k3"),
    *("sequence_sum_k1", "sequence_sum_k2", "sequence_sum_k3"),
    *("sequence_mean_k1", "sequence_mean_k2", "sequence_mean_k3"),
    *("sequence_max_k2", "sequence_max_k3"),
)
KL_PLACES = ("none", "reward", "loss")
SCHEDULES = ("wsd", "cosine")
_NOT_OF_STEPS = ("midtrain", "engine", "ranks")
_NO_BITS = (*_NOT_OF_STEPS, "activation_checkpointing", "num_workers", "turns_bytes_max")
"""Settings on which no bit of a step depends."""
DECAYED_RATE = 0.1
"""Learning rate after its decay, as a share of what it was before."""
STALENESS_POLICIES = ("pace", "drop", "withhold")
ENGINES = ("local", "ranks")


class MidtrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mid-training: next-token and multi-token prediction."""

    num_tokens: NonNegativeInt = 600_000
    """Budget; the same budget gives the same bits. 0 skips mid-training."""
    seconds: NonNegativeFloat = 0.0
    """Budget by the clock instead of tokens, if > 0: as far as the machine gets."""
    sequence_tokens: Annotated[int, Meta(ge=3, le=2**31)] = 256
    """Longest sequence; longer documents are cut."""
    batch_tokens: PositiveInt = 4096
    """Tokens of one optimizer step."""
    pass_tokens: PositiveInt = 2048
    """Tokens of one forward and backward pass; `num_workers` passes are computed at once."""
    num_workers: NumThreads = 2  # Nothing else runs meanwhile; changes the time and no bit.
    learning_rate: NonNegativeFloat = 3e-3
    warmup_fraction: UnitInterval = 0.05
    schedule: Annotated[str, one_of(SCHEDULES)] = "wsd"
    decay_fraction: UnitInterval = 0.3  # Of the budget: `wsd` falls to a tenth over its last part.
    weight_decay: NonNegativeFloat = 0.1
    grad_clip: PositiveFloat = 1.0
    mtp_weight: NonNegativeFloat = 0.3
    balance_weight: NonNegativeFloat = 0.01
    """Weight of the experts' load-balance loss."""
    report_steps: PositiveInt = 10
    save_s: PositiveFloat = 60.0
    """Time between saves, which a killed trainer continues from; the end drops them."""
    uses_cache: bool = False
    """Finished ones of the same inputs are kept in the user's cache; not for a clock's budget."""
    heldout_tokens_max: NonNegativeInt = 32_768
    tokens_key: str = "midtrain/tokens"
    heldout_key: str = "midtrain/heldout"

    def __post_init__(self) -> None:
        """Check fields against each other."""
        for field in ("pass_tokens", "batch_tokens"):
            if (value := getattr(self, field)) < self.sequence_tokens:
                expected = f"expected at least sequence_tokens {self.sequence_tokens}"
                raise ConfigError(f"trainer.midtrain.{field}: {expected}, got {value}")


class KlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it costs to leave the reference policy, version 0."""

    where: Annotated[str, one_of(KL_PLACES)] = "none"
    """reward: k1 of a rollout's tokens, under the policy that sampled them, off its reward
    (Composer 2, arXiv 2603.24477); loss: k3 of each token, with its gradient (GRPO, arXiv
    2402.03300)."""
    coefficient: NonNegativeFloat = 0.001


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an RL step minimizes."""

    name: Annotated[str, one_of_or_own(LOSSES)] = "policy_gradient"
    """Or own code, `module:name`: a `LossSpec`, or a function of `LossTokens` and these settings,
    which takes no correction."""
    correction: Annotated[str, one_of(CORRECTIONS)] = "token_tis"
    ratio_cap: AtLeastOne = 2.0
    """C of truncated importance sampling; icepop and geometric cap staleness with it."""
    ratio_low: UnitInterval = 0.5
    """icepop keeps tokens whose engine ratio is in [ratio_low, ratio_high], sequence_mis sequences
    whose whole ratio is in [ratio_low, ratio_cap]."""
    ratio_high: AtLeastOne = 5.0
    geometric_low: NonNegativeFloat = 0.999
    """geometric keeps sequences whose mean engine ratio is in [geometric_low, geometric_high]."""
    geometric_high: NonNegativeFloat = 1.001
    rejection: Annotated[str, one_of(REJECTIONS)] = "none"
    """Masks what is too far from the sampler, on top of the correction: by token, or whole
    sequences by the sum, mean or maximum over their tokens."""
    rejection_low: PositiveFloat = 0.5
    """k1 keeps ratios (of a sequence: their product or geometric mean) in [rejection_low,
    rejection_high]."""
    rejection_high: PositiveFloat = 2.0
    rejection_nats_max: PositiveFloat = 0.1
    """k2 and k3 keep divergences up to this."""
    clip_low: UnitInterval = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: NonNegativeFloat = 0.0
    """C > 1: ppo_clip and decoupled_ppo bound the loss of a negative advantage A by -C A (arXiv
    1912.09729); 0: no such bound."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of each token's entropy, in nats."""
    kl: KlConfig = KlConfig()
    token_denominator: AtLeastOne = 256.0
    """Constant that stands for a rollout's length (Dr. GRPO, arXiv 2503.20783)."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.name in LOSSES:  # Own code is imported, and checked, by the trainer.
            LOSSES[self.name].check_correction(self.name, self.correction)
        if 0 < self.dual_clip <= 1:
            raise ConfigError(
                f"trainer.loss.dual_clip: expected 0 or a number above 1, got {self.dual_clip}"
            )
        for low, high in (("ratio_low", "ratio_high"), ("geometric_low", "geometric_high"),
                          ("rejection_low", "rejection_high")):  # fmt: skip
            if (least := getattr(self, low)) > (most := getattr(self, high)):
                raise ConfigError(
                    f"trainer.loss.{low}: expected at most {high} {most}, got {least}"
                )


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW of RL."""

    learning_rate: NonNegativeFloat = 5e-4
    warmup_steps: NonNegativeInt = 10
    decay_fraction: UnitInterval = 0.0
    """Last part of `steps_max`, over which the learning rate falls to a tenth."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0


class LiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Users' samples: REINFORCE with a baseline per tenant."""

    num_samples_max: NonNegativeInt = 32
    """Maximum live samples in one step; others wait for the next."""
    num_waiting_max: PositiveInt = 64
    """Samples of one user that wait; the oldest above that are left out as `capped`."""
    user_share_max: UnitInterval = 0.2
    """Largest share of a user in its tenant's part of a step: in its samples, of which more wait,
    and in its |advantage| x tokens, which is scaled down. Where few users are there, one and a half
    equal shares."""
    tenant_share_max: UnitInterval = 0.1
    """The same of a tenant in the whole live part of a step; 1 where all tenants are one's own."""
    baseline_momentum: UnitInterval = 0.99
    """What a trained sample leaves of the weight of those before it."""
    baseline_num_prior: PositiveFloat = 8.0
    """Samples that the mean of all tenants counts as in a tenant's own baseline."""
    weight: NonNegativeFloat = 1.0
    """Weight of a live sample, next to a rollout's 1."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Of KL to the version that served, estimated by k3 on each trained token of a user, in the
    loss. It is measured in any case (`StepCompleted.drift`, the metric `live_kl`)."""
    ess_min: UnitInterval = 0.1
    """Smallest effective sample size, as a share of its tokens, with which a sample of an older
    version is trained; below it is `stale`. Its age in steps does not count."""
    ratio_min: Annotated[float, Meta(gt=0, le=1)] = 0.02
    """Smallest geometric mean of its tokens' probabilities now over those when they were drawn;
    below it, or above its inverse, the sample is `stale`."""


class EpochConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a service that trains on users alone makes its next version."""

    num_samples: PositiveInt
    """As soon as so many of their samples can be trained,"""
    s_max: PositiveFloat
    """or when one has waited for so long."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of the trainer; with the log and the seed it determines every weight."""

    midtrain: MidtrainConfig = MidtrainConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    live: LiveConfig = LiveConfig()
    preferences: PreferencesConfig = PreferencesConfig()
    epoch: EpochConfig | None = None
    """Batches of live samples alone; without it, live samples train beside groups."""
    engine: Annotated[str, one_of(ENGINES)] = "local"
    """local: the trainer's process holds the weights; ranks: processes of their own (`ranks`)."""
    ranks: RanksConfig = RanksConfig()
    estimator: Annotated[str, one_of(ESTIMATORS)] = "dr_grpo"
    groups_per_batch: PositiveInt = 8
    num_passes: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Optimizer steps over each batch: the policy before the first one is the proximal policy."""
    versions_kept: NonNegativeInt | None = None
    """Earlier versions whose weights are kept to measure engine mismatch on the tokens that they
    sampled; without them it is known of tokens of the trained version alone. By default
    `staleness_max` where the correction has bounds for it (icepop, geometric), else 0."""
    staleness_max: NonNegativeInt = 2
    staleness_policy: Annotated[str, one_of(STALENESS_POLICIES)] = "pace"
    """pace: a step waits for groups that would become too old; drop: they are left out; withhold:
    of a late group what is too old is not trained, while all of its rewards count."""
    straggler_wait_s: NonNegativeFloat = 0.0
    """With drop and withhold: how long a step waits for such groups first."""
    isolation_classes: tuple[str, ...] = ("user_mode_kernel",)
    """Sandboxes whose rollouts are trained (`envs.sandbox.IsolationClass`); a rollout of another is
    left out, so that no group is mixed."""
    filter_zero_variance: bool = True
    """Leave out groups whose rollouts did equally well: at most their lengths differ."""
    length_only_groups: bool = False
    """Train those whose length penalties differ beside the batch, at no cost of its weight."""
    step_s_min: NonNegativeFloat = 0.0
    """Least time of a step, which sleeps when it is done: a larger model's, for measurements."""
    steps_max: NonNegativeInt = 100
    pass_rate_stop: UnitInterval = 0.0
    """End once a trained version solves this share of the held-out tasks; 0: never."""
    checkpoint_steps: PositiveInt = 10
    """Save a checkpoint every so many steps."""
    checkpoints_kept: PositiveInt = 3
    """Newest ones; that of step 0 is always kept, replay starts from it."""
    batch_wait_s_max: PositiveFloat = 900.0
    """The trainer fails, loudly, when a batch takes longer to come."""
    skipped_steps_max: PositiveInt = 3
    """The run ends, and says why, after so many steps in a row that changed no weight because
    their loss or gradient was no finite number."""
    infrastructure_share_max: UnitInterval = 0.2
    """The run ends, and says why, when a larger share of its newest rollouts, trained and
    evaluated, ended because machines or judges failed; 1: never."""
    infrastructure_window: PositiveInt = 128
    """Newest rollouts of which that share is taken,"""
    infrastructure_num_min: PositiveInt = 64
    """once there are as many as this."""
    turns_bytes_max: PositiveInt = 256 << 20
    """Turns of unsettled samples that are kept in memory; others are read again when needed. The
    turns of the batch in training come on top."""
    micro_batch_tokens: PositiveInt = 4096
    """Bound of one forward and backward pass; a longer sequence goes alone."""
    device: Annotated[str, one_of(DEVICES)] = "cpu"
    """Where the model is computed; cuda is the first GPU that the process sees."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory, and the same bits."""
    num_threads: NumThreads = 1
    """Threads of torch inside one pass; another number gives other bits."""
    num_workers: NumThreads = 1
    """Passes computed at once; changes the time and no bit."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.infrastructure_num_min > self.infrastructure_window:
            expected = f"expected at most infrastructure_window {self.infrastructure_window}"
            text = f"{expected}, got {self.infrastructure_num_min}"
            raise ConfigError(f"trainer.infrastructure_num_min: {text}")
        if self.length_only_groups and not self.filter_zero_variance:
            text = "expected filter_zero_variance with it, which chooses these groups"
            raise ConfigError(f"trainer.length_only_groups: {text}")
        if self.straggler_wait_s and self.staleness_policy == "pace":
            raise ConfigError("trainer.straggler_wait_s: expected 0 with pace, which waits anyway")
        if self.epoch is not None and self.epoch.num_samples > self.live.num_samples_max:
            expected = f"expected at most live.num_samples_max {self.live.num_samples_max}"
            text = f"{expected}, got {self.epoch.num_samples}"
            raise ConfigError(f"trainer.epoch.num_samples: {text}")

    @property
    def num_versions_kept(self) -> int:
        """Return how many earlier versions a step keeps."""
        if self.versions_kept is not None:
            return self.versions_kept
        return self.staleness_max if self.loss.correction in ENGINE_CORRECTIONS else 0

    def encoded(self) -> str:
        """Return what a step depends on as JSON, for its manifest."""
        fields: dict[str, Any] = msgspec.structs.asdict(self)
        for name in _NOT_OF_STEPS:
            del fields[name]
        return msgspec.json.encode(fields).decode()

    def of_step(self, settings: str) -> "TrainerConfig":
        """Return the settings that a manifest holds; where it holds none, these.

        What changes no bit stays as it is here.

        Raises:
            ConfigError: They are not such settings.

        """
        if not settings:
            return self
        try:
            stored = parse_json(settings.encode(), TrainerConfig, "settings")
        except CodecError as error:
            raise ConfigError(f"BatchManifest.{error}") from error
        return msgspec.structs.replace(stored, **{name: getattr(self, name) for name in _NO_BITS})
