"""The settings that a what-if may change: none that decided which samples the log has."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.reward import recompose
from penstock.actors.trainer.config import TrainerConfig
from penstock.infra.config.file import apply_overrides
from penstock.infra.config.settings import RunConfig
from penstock.messages.errors import ConfigError
from penstock.messages.reward import Verdict
from penstock.messages.settings import PositiveFloat

TRAINER_KEYS = (
    *("trainer.loss.", "trainer.optimizer.", "trainer.estimator", "trainer.num_passes"),
    *("trainer.live.weight", "trainer.live.kl_coefficient", "trainer.preferences.beta"),
    *("trainer.preferences.label_smoothing", "trainer.preferences.desirable_weight"),
    *("trainer.preferences.undesirable_weight", "trainer.preferences.live_weight"),
)
JUDGE_KEYS = (
    *("judge.length_penalty.", "judge.auxiliary.", "judge.judges.", "judge.partial_credit"),
    *("judge.reward_solved", "judge.reward_failed", "judge.reward_min"),
)
T = TypeVar("T", TrainerConfig, JudgeConfig)
TOLERANCE = 1e-6
"""Maximum difference between recorded and recomposed components."""


class WhatIfSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Changed settings, checked against the run's settings."""

    given: list[str]
    """All changes as `KEY=VALUE`."""
    trainer: list[str]
    """Changes of the trainer's settings as `KEY=VALUE`."""
    judge: JudgeConfig | None
    """Changed settings of the judge; None to keep the recorded rewards."""

    def change(self, config: TrainerConfig) -> TrainerConfig:
        """Return the changed settings of a step.

        Raises:
            ConfigError: The settings are not compatible.

        """
        return _converted("trainer", config, self.trainer)


def read_question(given: Sequence[str], config: RunConfig) -> WhatIfSettings:
    """Read `KEY=VALUE` settings.

    Raises:
        ConfigError: A setting cannot be changed, or its value is wrong.

    """
    trainer: list[str] = []
    judge: list[str] = []
    for each in given:
        key, equals, _ = each.partition("=")
        if not equals:
            raise ConfigError(f"--what-if {each}: expected KEY=VALUE")
        if _is_one_of(key.strip(), TRAINER_KEYS):
            trainer.append(each)
        elif _is_one_of(key.strip(), JUDGE_KEYS):
            judge.append(each)
        else:
            choices = ", ".join(
                name + ("*" if name.endswith(".") else "") for name in (*TRAINER_KEYS, *JUDGE_KEYS)
            )
            raise ConfigError(
                f"--what-if {key.strip()}: expected one of {choices}; other settings decided what "
                "was sampled, and a log has no other samples"
            )
    question = WhatIfSettings(
        given=list(given),
        trainer=trainer,
        judge=_judge(config.judge, judge) if judge else None,
    )
    # Checked now: otherwise an error would appear only after the first step is read.
    question.change(config.trainer)
    return question


def reward_function(
    question: WhatIfSettings, config: RunConfig
) -> Callable[[Verdict], float] | None:
    """Return the changed reward of a verdict; None if rewards do not change."""
    judge, own = question.judge, config.judge
    if judge is None:
        return None

    def reward(verdict: Verdict) -> float:
        # A log of another version, or with a custom judge, may have composed them differently.
        recorded, composed = verdict.components, recompose(verdict, own)
        if not _is_close(recorded, composed):
            raise ConfigError(
                f"--what-if judge: {verdict.rollout_id}: its verdict has the components "
                f"{recorded}, but the run's settings give {composed}: rewards of such a log "
                "cannot be composed with others"
            )
        return sum(recompose(verdict, judge).values())

    return reward


def _is_one_of(key: str, choices: Sequence[str]) -> bool:
    return any(key.startswith(each) if each.endswith(".") else key == each for each in choices)


def _judge(own: JudgeConfig, given: Sequence[str]) -> JudgeConfig:
    # `judge.judges` is a list, so its overrides `judge.judges.NAME.weight` are read here.
    plain = [each for each in given if not each.startswith("judge.judges.")]
    changed = _converted("judge", own, plain)
    for name, value in changed.auxiliary.weights.items():
        if name not in own.auxiliary.weights:
            text = f"the run gave it no weight, so that its log has no scores of it; got {value:g}"
            raise ConfigError(f"--what-if judge.auxiliary.{name}: {text}")
    judges = {each.name: each for each in own.judges}
    for each in given:
        if not each.startswith("judge.judges."):
            continue
        key, _, value = each.partition("=")
        name, _, field = key.strip().removeprefix("judge.judges.").rpartition(".")
        if field != "weight" or name not in judges:
            choices = ", ".join(f"judge.judges.{one}.weight" for one in judges) or "none: it has no"
            raise ConfigError(f"--what-if {key.strip()}: expected of this run {choices}")
        try:
            weight = msgspec.convert(float(value), PositiveFloat)
        except ValueError as error:
            raise ConfigError(f"--what-if {each}: expected a number above 0") from error
        judges[name] = msgspec.structs.replace(judges[name], weight=weight)
    try:
        return msgspec.structs.replace(changed, judges=list(judges.values()))
    except ConfigError as error:
        raise ConfigError(f"--what-if {error}") from error


def _converted(table: str, config: T, given: Sequence[str]) -> T:
    data = apply_overrides({table: msgspec.to_builtins(config)}, list(given))
    try:
        return msgspec.convert(data[table], type(config))
    except ValueError as error:
        raise ConfigError(f"--what-if {table}: {error}") from error


def _is_close(one: dict[str, float], other: dict[str, float]) -> bool:
    return one.keys() == other.keys() and all(
        math.isclose(value, other[name], rel_tol=0.0, abs_tol=TOLERANCE)
        for name, value in one.items()
    )
