"""Which versions are evaluated, when, and on what: the settings.

A version is due at the start (0), every so many steps, and at the end of the run.
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
    """Held-out tasks, and how they are attempted."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]{1,32}\Z")]
    sources: list[str] = []
    """Choose among the tasks of these sources (`[[prepare.sources]]`); empty: all."""
    categories: list[str] = []
    """Choose among the tasks of these categories; empty: all."""
    num_tasks: NonNegativeInt = 0
    """0: `evaluator.num_eval_tasks`."""
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Attempts of each task; `pass_at_k` goes up to it."""
    temperature: NonNegativeFloat | None = None
    """0 is greedy; by default `pacer.eval_temperature`."""
    every_steps: NonNegativeInt | None = None
    """0: only version 0 and the final version; by default `evaluator.eval_every_steps`."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        where = f"evaluator.sets.{self.name}"
        if self.temperature is not None and 0 < self.temperature < TEMPERATURE_MIN:
            text = f"expected 0, or at least {TEMPERATURE_MIN:g}, got {self.temperature:g}"
            raise ConfigError(f"{where}.temperature: {text}")
        if self.temperature == 0 and self.num_samples > 1:
            text = f"expected 1 where temperature is 0, got {self.num_samples}"
            raise ConfigError(f"{where}.num_samples: {text}")


class EvaluatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the policy is evaluated on held-out tasks."""

    num_eval_tasks: PositiveInt = 64
    eval_every_steps: NonNegativeInt = 0
    """0: only version 0 and the final version."""
    sets: tuple[EvalSetConfig, ...] = ()
    """Several sets in place of one of all held-out tasks. The first is the main one, by which stop
    rules, gates and headlines go."""
    judge: str = "hidden_tests"
    """The judge whose verdicts count; by default the one of `judge.judge`."""
    eval_deadline_s: PositiveFloat = 600.0
    """Longest evaluation, from the moment that it is the next one; verdicts that are missing then
    count as masked, also where no replica ever served the version."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        names = [each.name for each in self.sets]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"evaluator.sets: expected each name once, got {name!r} twice")

    @property
    def all_sets(self) -> tuple[EvalSetConfig, ...]:
        """The sets with nothing left to default, the main one first.

        Without any, the one whose name is empty.
        """
        return tuple(
            msgspec.structs.replace(
                each,
                num_tasks=each.num_tasks or self.num_eval_tasks,
                every_steps=self.eval_every_steps if each.every_steps is None else each.every_steps,
            )
            for each in self.sets or (EvalSetConfig(name=""),)
        )

    def check_sets(self, sources: Sequence[str], temperature: float) -> None:
        """Check the sets against the rest of a run's configuration.

        Args:
            sources: Names of those that tasks come from.
            temperature: Of sets that name none.

        Raises:
            ConfigError: A source that there is not, or several attempts that cannot differ.

        """
        for each in self.sets:
            where = f"evaluator.sets.{each.name}"
            if unknown := sorted(set(each.sources) - set(sources)):
                text = f"expected some of {', '.join(sources)}, got {', '.join(unknown)}"
                raise ConfigError(f"{where}.sources: {text}")
            if each.temperature is None and temperature == 0 and each.num_samples > 1:
                text = f"expected 1, as pacer.eval_temperature is 0, got {each.num_samples}"
                raise ConfigError(f"{where}.num_samples: {text}")

    def due(self, policy_version: int) -> list[EvalSetConfig]:
        """Return the sets whose period ends with a version."""
        return [
            each
            for each in self.all_sets
            if each.every_steps and policy_version % each.every_steps == 0
        ]
