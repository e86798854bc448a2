"""Settings of the trainer. Imports no torch, so that a wrong setting is told at once."""

import msgspec

from penstock.messages.errors import ConfigError

ESTIMATORS = ("dr_grpo", "grpo", "rloo")
CORRECTIONS = ("none", "token_tis", "sequence_tis", "icepop", "sequence_mis", "geometric")
LOSSES = ("policy_gradient", "ppo_clip")
SCHEDULES = ("wsd", "cosine")
STALENESS_POLICIES = ("pace", "drop")


def check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse an unknown name.

    Raises:
        ConfigError: Lists the choices.

    """
    if value not in choices:
        raise ConfigError(f"{field}: expected one of {', '.join(choices)}, got {value!r}")


def check_range(field: str, value: float, low: float, high: float = float("inf")) -> None:
    """Refuse a number outside [low, high].

    Raises:
        ConfigError: Gives the range.

    """
    if not low <= value <= high:
        raise ConfigError(f"{field}: expected {low:g} to {high:g}, got {value}")


class MidtrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stage one: next-token and multi-token prediction."""

    num_tokens: int = 600_000
    """Budget; the same budget gives the same bits. 0 leaves stage one out."""
    seconds: float = 0.0
    """Budget by the clock instead of tokens, if > 0: as far as the machine gets."""
    sequence_tokens: int = 256
    """Longest sequence; longer documents are cut."""
    batch_tokens: int = 4096
    """Of one optimizer step."""
    pass_tokens: int = 2048
    """Of one forward and backward pass; passes of a step are computed `num_workers` at once."""
    num_workers: int = 2
    """Nothing else runs meanwhile; changes the time and no bit."""
    learning_rate: float = 3e-3
    warmup_fraction: float = 0.05
    schedule: str = "wsd"
    decay_fraction: float = 0.3
    """Last part of the budget, over which `wsd` falls to a tenth."""
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    mtp_weight: float = 0.3
    balance_weight: float = 0.01
    """Of the experts' load-balance loss."""
    report_steps: int = 10
    heldout_tokens_max: int = 32_768
    tokens_key: str = "midtrain/tokens"
    heldout_key: str = "midtrain/heldout"

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        check_choice("trainer.midtrain.schedule", self.schedule, SCHEDULES)
        check_range("trainer.midtrain.num_tokens", self.num_tokens, 0)
        check_range("trainer.midtrain.sequence_tokens", self.sequence_tokens, 3)
        check_range("trainer.midtrain.pass_tokens", self.pass_tokens, self.sequence_tokens)
        check_range("trainer.midtrain.batch_tokens", self.batch_tokens, self.sequence_tokens)
        check_range("trainer.midtrain.num_workers", self.num_workers, 1)
        check_range("trainer.midtrain.report_steps", self.report_steps, 1)
        check_range("trainer.midtrain.warmup_fraction", self.warmup_fraction, 0, 1)
        check_range("trainer.midtrain.decay_fraction", self.decay_fraction, 0, 1)


class LossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stage two: what a step minimizes."""

    name: str = "policy_gradient"
    correction: str = "token_tis"
    ratio_cap: float = 2.0
    """C of truncated importance sampling."""
    ratio_low: float = 0.5
    """Masks of icepop and sequence_mis keep ratios in [ratio_low, ratio_high]."""
    ratio_high: float = 5.0
    geometric_low: float = 0.999
    geometric_high: float = 1.001
    clip_low: float = 0.2
    clip_high: float = 0.2
    token_denominator: float = 256.0
    """Constant that stands for a rollout's length (Dr. GRPO, arXiv 2503.20783)."""
    temperature: float = 1.0
    """Of the rollouts; the behavior logprobs were taken at it."""

    def __post_init__(self) -> None:
        """Refuse unknown names and impossible values."""
        check_choice("trainer.loss.name", self.name, LOSSES)
        check_choice("trainer.loss.correction", self.correction, CORRECTIONS)
        check_range("trainer.loss.ratio_cap", self.ratio_cap, 1)
        check_range("trainer.loss.ratio_low", self.ratio_low, 0, 1)
        check_range("trainer.loss.ratio_high", self.ratio_high, 1)
        check_range("trainer.loss.token_denominator", self.token_denominator, 1)
        check_range("trainer.loss.temperature", self.temperature, 1e-3)
        if self.name == "ppo_clip" and self.correction != "none":
            raise ConfigError(
                "trainer.loss.correction: expected none, since ppo_clip's own ratio is taken "
                f"against the behavior policy, got {self.correction!r}"
            )


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW of stage two."""

    learning_rate: float = 5e-4
    warmup_steps: int = 10
    decay_fraction: float = 0.0
    """Last part of `steps_max`, over which the learning rate falls to a tenth."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        check_range("trainer.optimizer.learning_rate", self.learning_rate, 0)
        check_range("trainer.optimizer.warmup_steps", self.warmup_steps, 0)
        check_range("trainer.optimizer.decay_fraction", self.decay_fraction, 0, 1)
        check_range("trainer.optimizer.grad_clip", self.grad_clip, 1e-9)


class LiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Users' samples: REINFORCE with a running baseline."""

    num_samples_max: int = 32
    """In one step; the others wait for the next."""
    baseline_momentum: float = 0.9
    weight: float = 1.0
    """Of a live sample, next to a rollout's 1."""

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        check_range("trainer.live.num_samples_max", self.num_samples_max, 0)
        check_range("trainer.live.baseline_momentum", self.baseline_momentum, 0, 1)


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of the trainer; with the log and the seed it determines every weight."""

    midtrain: MidtrainConfig = MidtrainConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    live: LiveConfig = LiveConfig()
    estimator: str = "dr_grpo"
    groups_per_batch: int = 8
    staleness_max: int = 2
    staleness_policy: str = "pace"
    """pace: wait for groups that would become too old; drop: leave them out."""
    isolation_classes: tuple[str, ...] = ("user_mode_kernel",)
    """Sandboxes whose rollouts are trained (`envs.sandbox.IsolationClass`); a rollout of another is
    left out, so that no group is mixed."""
    filter_zero_variance: bool = True
    """Leave out groups whose rewards are all equal: they have no gradient."""
    steps_max: int = 100
    pass_rate_stop: float = 0.0
    """End before `steps_max`, once a trained version solves this share of the held-out tasks; 0:
    never."""
    checkpoint_steps: int = 10
    """Save a checkpoint every so many steps."""
    checkpoints_kept: int = 3
    """Newest ones; that of step 0 is always kept, replay starts from it."""
    batch_wait_s_max: float = 900.0
    """The trainer fails, loudly, when a batch takes longer to come."""
    micro_batch_tokens: int = 4096
    """Bound of one forward and backward pass; a longer sequence goes alone."""
    num_threads: int = 1
    """Of torch, inside one pass; another number gives other bits."""
    num_workers: int = 1
    """Passes computed at once; changes the time and no bit."""

    def __post_init__(self) -> None:
        """Refuse unknown names and impossible values."""
        check_choice("trainer.estimator", self.estimator, ESTIMATORS)
        check_choice("trainer.staleness_policy", self.staleness_policy, STALENESS_POLICIES)
        for field in (
            "groups_per_batch",
            "checkpoint_steps",
            "checkpoints_kept",
            "num_threads",
            "num_workers",
        ):
            check_range(f"trainer.{field}", getattr(self, field), 1)
        check_range("trainer.pass_rate_stop", self.pass_rate_stop, 0, 1)
        for field in ("staleness_max", "steps_max"):
            check_range(f"trainer.{field}", getattr(self, field), 0)
