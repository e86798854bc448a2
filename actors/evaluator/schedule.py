"""Evaluation settings: which versions are evaluated, and on which tasks.

Version 0 and the final version are always evaluated; others every `every_steps` steps.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.messages.errors import ConfigError
from penstock.messages.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from penstock.messages.task import TEMPERATURE_MIN


class EvalSetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of held-out tasks and how they are sampled."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]{1,32}\Z")]
    sources: list[str] = []
    """Task sources to choose from (`[[prepare.sources]]`); empty: all."""
    categories: list[str] = []
    """Task categories to choose from; empty: all."""
    num_tasks: NonNegativeInt = 0
    """Number of tasks; 0: `evaluator.num_eval_tasks`."""
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Attempts per task, and the largest k of pass@k."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0: greedy; None: `pacer.eval_temperature`."""
    every_steps: NonNegativeInt | None = None
    """Steps between evaluations; 0: only version 0 and the final version; None:
    `evaluator.eval_every_steps`."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        where = f"evaluator.sets.{self.name}"
        if self.temperature is not None and 0 < self.temperature < TEMPERATURE_MIN:
            text = f"expected 0, or at least {TEMPERATURE_MIN:g}, got {self.temperature:g}"
            raise ConfigError(f"{where}.temperature: {text}")
        if self.temperature == 0 and self.num_samples > 1:
            # Greedy attempts at one task are all alike: more of them would only cost time.
            text = f"expected 1 if temperature is 0, got {self.num_samples}"
            raise ConfigError(f"{where}.num_samples: {text}")


class EvaluatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the evaluation on held-out tasks."""

    num_eval_tasks: PositiveInt = 64
    """Number of held-out tasks per evaluation, for sets that name none."""
    eval_every_steps: NonNegativeInt = 0
    """Steps between evaluations; 0: only version 0 and the final version."""
    sets: tuple[EvalSetConfig, ...] = ()
    """Task sets, each evaluated separately; empty: one set of all held-out tasks. Stop rules,
    release gates and reported pass rates use the first."""
    judge: str = "hidden_tests"
    """Name of the judge whose verdicts count; by default the one of `judge.judge`."""
    eval_deadline_s: PositiveFloat = 600.0
    """Longest duration of an evaluation in seconds, from the end of the previous one; missing
    verdicts then count as masked, even if no replica ever served the version."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        names = [eval_set.name for eval_set in self.sets]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"evaluator.sets: expected each name once, got {name!r} twice")

    @property
    def all_sets(self) -> tuple[EvalSetConfig, ...]:
        """All sets with defaults filled in, the main one first.

        If none is configured: one set with an empty name.
        """
        every_steps = self.eval_every_steps
        return tuple(
            msgspec.structs.replace(
                eval_set,
                num_tasks=eval_set.num_tasks or self.num_eval_tasks,
                every_steps=every_steps if eval_set.every_steps is None else eval_set.every_steps,
            )
            for eval_set in self.sets or (EvalSetConfig(name=""),)
        )

    def check_sets(self, sources: Sequence[str], temperature: float) -> None:
        """Check the sets against the rest of a run's configuration.

        Args:
            sources: Names of the configured task sources.
            temperature: Sampling temperature of sets without one.

        Raises:
            ConfigError: A set names an unknown source, or asks for several samples at temperature
                0, which would all be equal.

        """
        for eval_set in self.sets:
            where = f"evaluator.sets.{eval_set.name}"
            if unknown := sorted(set(eval_set.sources) - set(sources)):
                text = f"expected some of {', '.join(sources)}, got {', '.join(unknown)}"
                raise ConfigError(f"{where}.sources: {text}")
            if eval_set.temperature is None and temperature == 0 and eval_set.num_samples > 1:
                text = f"expected 1, as pacer.eval_temperature is 0, got {eval_set.num_samples}"
                raise ConfigError(f"{where}.num_samples: {text}")

    def due(self, policy_version: int) -> list[EvalSetConfig]:
        """Return the sets that are due for evaluation at a version."""
        return [
            eval_set
            for eval_set in self.all_sets
            if eval_set.every_steps and policy_version % eval_set.every_steps == 0
        ]
