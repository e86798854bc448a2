"""Settings of the trainer. Imports no torch, so a wrong setting is reported before torch loads."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.actors.policy.config import DEVICES, AdapterConfig
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
"""Corrections whose narrow bounds apply to the engine's share of a ratio."""
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
"""Settings that change no bit of a step."""
DECAYED_RATE = 0.1
"""Learning rate after the decay, as a share of the rate before it."""
STALENESS_POLICIES = ("pace", "drop", "withhold")
ENGINES = ("local", "ranks")


class MidtrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mid-training: next-token and multi-token prediction."""

    num_tokens: NonNegativeInt = 600_000
    """Token budget; the same budget gives the same bits. 0 skips mid-training."""
    seconds: NonNegativeFloat = 0.0
    """Time budget in seconds instead of tokens, if > 0; the result depends on the machine."""
    sequence_tokens: Annotated[int, Meta(ge=3, le=2**31)] = 256
    """Maximum sequence length; longer documents are cut."""
    batch_tokens: PositiveInt = 4096
    """Tokens per optimizer step."""
    pass_tokens: PositiveInt = 2048
    """Tokens per forward and backward pass; `num_workers` passes run concurrently."""
    # Nothing else runs during mid-training. Changes the time and no bit.
    num_workers: NumThreads = 2
    learning_rate: NonNegativeFloat = 3e-3
    warmup_fraction: UnitInterval = 0.05
    schedule: Annotated[str, one_of(SCHEDULES)] = "wsd"
    decay_fraction: UnitInterval = 0.3
    """Last part of the budget, over which `wsd` falls to a tenth."""
    weight_decay: NonNegativeFloat = 0.1
    grad_clip: PositiveFloat = 1.0
    mtp_weight: NonNegativeFloat = 0.3
    balance_weight: NonNegativeFloat = 0.01
    """Weight of the experts' load-balance loss."""
    report_steps: PositiveInt = 10
    save_s: PositiveFloat = 60.0
    """Seconds between saves, from which a killed trainer continues; the last save is dropped at the
    end. Ranks of a model of transformers take none, and begin again."""
    uses_cache: bool = False
    """Whether finished mid-training of the same inputs is kept in the user's cache; not with a time
    budget."""
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
    """Cost of leaving the reference policy, version 0."""

    where: Annotated[str, one_of(KL_PLACES)] = "none"
    """reward: k1 of a rollout's tokens under the sampling policy, subtracted from its reward
    (Composer 2, arXiv 2603.24477); loss: k3 of each token, with its gradient (GRPO, arXiv
    2402.03300)."""
    coefficient: NonNegativeFloat = 0.001


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objective of an RL step."""

    name: Annotated[str, one_of_or_own(LOSSES)] = "policy_gradient"
    """Name of a loss, or own code `module:name`: a `LossSpec`, or a function of `LossTokens` and
    these settings, which takes no correction."""
    correction: Annotated[str, one_of(CORRECTIONS)] = "token_tis"
    ratio_cap: AtLeastOne = 2.0
    """Cap C of truncated importance sampling; icepop and geometric cap staleness with it."""
    ratio_low: UnitInterval = 0.5
    """Lower bound of ratios: icepop keeps tokens whose engine ratio is in [ratio_low, ratio_high],
    sequence_mis keeps sequences whose whole ratio is in [ratio_low, ratio_cap]."""
    ratio_high: AtLeastOne = 5.0
    geometric_low: NonNegativeFloat = 0.999
    """Lower bound: geometric keeps sequences whose mean engine ratio is in [geometric_low,
    geometric_high]."""
    geometric_high: NonNegativeFloat = 1.001
    rejection: Annotated[str, one_of(REJECTIONS)] = "none"
    """Mask for tokens or sequences too far from the sampler, on top of the correction: by token, or
    by the sum, mean or maximum over a sequence's tokens."""
    rejection_low: PositiveFloat = 0.5
    """Lower bound: k1 keeps ratios (for a sequence, their product or geometric mean) in
    [rejection_low, rejection_high]."""
    rejection_high: PositiveFloat = 2.0
    rejection_nats_max: PositiveFloat = 0.1
    """Maximum divergence that k2 and k3 keep."""
    clip_low: UnitInterval = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: NonNegativeFloat = 0.0
    """Bound C > 1: ppo_clip and decoupled_ppo bound the loss of a negative advantage A by -C A
    (arXiv 1912.09729). 0 for no bound."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of each token's entropy, in nats."""
    kl: KlConfig = KlConfig()
    token_denominator: AtLeastOne = 256.0
    """Constant in place of a rollout's length (Dr. GRPO, arXiv 2503.20783)."""

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
    """AdamW settings for RL."""

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
    """Live samples: REINFORCE with a baseline per tenant."""

    num_samples_max: NonNegativeInt = 32
    """Maximum live samples in one step; others wait for the next."""
    num_waiting_max: PositiveInt = 64
    """Maximum waiting samples per user; the oldest beyond it are left out as `capped`."""
    user_share_max: UnitInterval = 0.2
    """Maximum share of one user in its tenant's part of a step: of the samples (the rest waits) and
    of |advantage| x tokens (scaled down). With few users, one and a half equal shares."""
    tenant_share_max: UnitInterval = 0.1
    """The same for a tenant in the live part of a step; 1 if all tenants are one organization's."""
    baseline_momentum: UnitInterval = 0.99
    """Decay of the baseline per trained sample."""
    baseline_num_prior: PositiveFloat = 8.0
    """Number of prior samples, at the mean of all tenants, in each tenant's baseline."""
    weight: NonNegativeFloat = 1.0
    """Weight of a live sample; a rollout has 1."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Coefficient of the KL to the version that served, in the loss: k3 on each trained live token.
    The KL is measured in any case (`StepCompleted.drift`, metric `live_kl`)."""
    ess_min: UnitInterval = 0.1
    """Minimum effective sample size, as a share of the tokens, for a sample of an older version;
    below it, the sample is `stale`. Its age in steps does not count."""
    ratio_min: Annotated[float, Meta(gt=0, le=1)] = 0.02
    """Minimum geometric mean of the tokens' probabilities now over those when sampled; below it, or
    above its inverse, the sample is `stale`."""


class EpochConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a service that trains on live samples alone makes its next version."""

    num_samples: PositiveInt
    """Trainable samples that complete an epoch."""
    s_max: PositiveFloat
    """Seconds after which the oldest waiting sample completes an epoch."""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All trainer settings; with the log and the seed they determine every weight."""

    midtrain: MidtrainConfig = MidtrainConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    live: LiveConfig = LiveConfig()
    preferences: PreferencesConfig = PreferencesConfig()
    epoch: EpochConfig | None = None
    """Epochs of live samples alone; without it, live samples join the batches of groups."""
    engine: Annotated[str, one_of(ENGINES)] = "local"
    """local: the trainer's process holds the weights; ranks: separate processes hold them
    (`ranks`)."""
    ranks: RanksConfig = RanksConfig()
    adapter: AdapterConfig | None = None
    """LoRA: adapters alone train, in every phase, and the weights of `model.checkpoint` stay as
    they are. By default all weights train."""
    estimator: Annotated[str, one_of(ESTIMATORS)] = "dr_grpo"
    groups_per_batch: PositiveInt = 8
    num_passes: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Optimizer steps per batch; the policy before the first one is the proximal policy."""
    versions_kept: NonNegativeInt | None = None
    """Earlier versions whose weights are kept, to measure engine mismatch on the tokens that they
    sampled; otherwise it is known only for tokens of the trained version. Defaults to
    `staleness_max` if the correction bounds the mismatch (icepop, geometric), else 0."""
    staleness_max: NonNegativeInt = 2
    staleness_policy: Annotated[str, one_of(STALENESS_POLICIES)] = "pace"
    """pace: a step waits for groups that would become too old; drop: they are left out; withhold:
    only their tokens that are too old are left out, and all of their rewards count."""
    straggler_wait_s: NonNegativeFloat = 0.0
    """Seconds that a step first waits for late groups, with drop and withhold."""
    isolation_classes: tuple[str, ...] = ("user_mode_kernel",)
    """Isolation classes whose rollouts are trained (`envs.sandbox.IsolationClass`); others are left
    out, so that no group is mixed."""
    filter_zero_variance: bool = True
    """Leave out groups whose rollouts have equal merit: they differ by length at most."""
    length_only_groups: bool = False
    """Train groups that differ by length penalty alone, in addition to a full batch and without
    reducing the weight of its groups."""
    step_s_min: NonNegativeFloat = 0.0
    """Minimum seconds per step, to emulate the step of a larger model in measurements."""
    steps_max: NonNegativeInt = 100
    pass_rate_stop: UnitInterval = 0.0
    """Share of held-out tasks at which a trained version ends the run; 0 for never."""
    checkpoint_steps: PositiveInt = 10
    """Steps between checkpoints."""
    checkpoints_kept: PositiveInt = 3
    """Newest checkpoints kept; the one of step 0 is always kept, because replay starts from it."""
    batch_wait_s_max: PositiveFloat = 900.0
    """Seconds without a batch after which the trainer fails."""
    skipped_steps_max: PositiveInt = 3
    """Consecutive skipped steps (loss or gradient not finite) that end the run."""
    infrastructure_share_max: UnitInterval = 0.2
    """Maximum share of the newest rollouts, trained and evaluated, that may end because machines or
    judges failed; above it the run ends with the reason. 1 for never."""
    infrastructure_window: PositiveInt = 128
    """Newest rollouts considered for that share."""
    infrastructure_num_min: PositiveInt = 64
    """Rollouts below which that share is not judged."""
    turns_bytes_max: PositiveInt = 256 << 20
    """Bytes of unsettled samples' turns kept in memory; others are read again when needed. The
    turns of the batch in training come on top."""
    micro_batch_tokens: PositiveInt = 4096
    """Input tokens of one forward and backward pass; a longer sequence gets its own pass."""
    micro_batch_pairs: NonNegativeInt = 0
    """Pairs of tokens that attend to each other in one pass, n^2 / 2 of a sequence of n, beside its
    tokens: so that passes side by side on ranks take about as long. 0 for any number."""
    device: Annotated[str, one_of(DEVICES)] = "cpu"
    """Device of the ranks: cuda is one GPU each, for `[trainer.ranks] model = "transformers"`."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, same bits."""
    num_threads: NumThreads = 1
    """Torch threads inside one pass; another number gives other bits."""
    num_workers: NumThreads = 1
    """Concurrent passes; changes the time and no bit."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.ranks.offload_optimizer and self.device == "cpu":
            text = 'expected false with trainer.device = "cpu", whose memory is the host\'s'
            raise ConfigError(f"trainer.ranks.offload_optimizer: {text}, got true")
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
        """Earlier versions whose weights a step keeps."""
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
        """Return the settings that a manifest holds, or these if it holds none.

        Settings that change no bit stay as they are here.

        Raises:
            ConfigError: The text is not such settings.

        """
        if not settings:
            return self
        try:
            stored = parse_json(settings.encode(), TrainerConfig, "settings")
        except CodecError as error:
            raise ConfigError(f"BatchManifest.{error}") from error
        return msgspec.structs.replace(stored, **{name: getattr(self, name) for name in _NO_BITS})
