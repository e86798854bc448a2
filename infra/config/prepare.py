"""The `[prepare]` section: what a run starts from, its tasks (`[[prepare.sources]]`) first."""

import math
import random
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.envs.harness import HARNESS_VERSION
from penstock.messages.errors import ConfigError
from penstock.messages.settings import REFERENCE, NonNegativeFloat, PositiveFloat, PositiveInt
from penstock.messages.task import Limits

WEIGHT_MAX = 1e6
_AROUND_MEAN = (0.6, 1.4)
"""Calls of one task take between these times its mean."""


class EpisodeLimits(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits as settings: an unknown key is refused."""


class SourceKind(StrEnum):
    """How a source's tasks are made."""

    FOLDER = "folder"
    PROMPTS = "prompts"
    OWN = "own"


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of tasks."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]{1,32}\Z")]
    kind: SourceKind
    weight: Annotated[float, Meta(ge=0, le=WEIGHT_MAX)] = 1.0
    """Share of the training groups, relative to the other sources' weights; 0: evaluation only."""
    limits: EpisodeLimits | None = None
    """Limits of its episodes; by default `prepare.limits`, and a folder's tasks have their own."""
    num_train_tasks: PositiveInt | None = None
    """Number of training tasks, at most: of a folder, drawn by the run's seed. By default all;
    own code that is asked for a number is asked for `prepare.num_train_tasks`."""
    num_heldout_tasks: PositiveInt | None = None
    """As `num_train_tasks`, of held-out tasks."""
    path: str = ""
    """Folder of Harbor tasks (`penstock tasks make`, or others'), for the kind `folder`; file of
    prompts (`.jsonl` or `.parquet`), for the kind `prompts`."""
    origins: tuple[str, ...] = ()
    """For the kind `folder`: only tasks that were made from these (`library`, `package`, `commits`
    ...; of others' tasks `harbor`); by default all."""
    make: Annotated[str, Meta(pattern=rf"^({REFERENCE})?\Z")] = ""
    """For the kind `own`: own code, `module:name`, that returns `TaskCandidate`s
    (docs/extend.md)."""
    settings: dict[str, Any] = {}
    """For the kind `own`: the settings of that code, which checks them."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        where = f"prepare.sources.{self.name}"
        has_path = self.kind in {SourceKind.FOLDER, SourceKind.PROMPTS}
        if has_path != bool(self.path):
            what = "folder" if self.kind is SourceKind.FOLDER else "file"
            text = f"expected the {what}" if has_path else f"expected none with kind {self.kind}"
            raise ConfigError(f"{where}.path: {text}, got {self.path!r}")
        if (self.kind is SourceKind.OWN) != bool(self.make):
            text = "expected module:name with kind own, and with no other"
            raise ConfigError(f"{where}.make: {text}, got {self.make!r}")
        owners = {"settings": SourceKind.OWN, "origins": SourceKind.FOLDER}
        for field, kind in owners.items():
            if getattr(self, field) and self.kind is not kind:
                text = f"expected none with kind {self.kind}: it is of kind {kind}"
                raise ConfigError(f"{where}.{field}: {text}")


class CorporaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Own code that makes the tokenizer and the corpora of mid-training."""

    make: Annotated[str, Meta(pattern=rf"^{REFERENCE}\Z")]
    """`module:name`, a function of a `CorpusRequest` that returns `Corpora` (docs/extend.md)."""
    settings: dict[str, Any] = {}
    """The settings of that code, which checks them."""


class SlowCalls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long machines sleep before each call of a tool: a moment in most tasks, long in some."""

    median_s: PositiveFloat = 1.0
    """Median over tasks of a task's mean."""
    spread: NonNegativeFloat = 1.0
    """Standard deviation of the logarithm of the tasks' means."""
    s_min: PositiveFloat = 0.5
    s_max: Annotated[float, msgspec.Meta(gt=0, le=60)] = 6.0

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.s_min > self.s_max:
            expected = f"expected at most s_max {self.s_max:g}"
            raise ConfigError(f"prepare.slow_calls.s_min: {expected}, got {self.s_min:g}")

    def draw(self, dice: random.Random) -> tuple[float, float]:
        """Return between which seconds a task's machines sleep."""
        mean_s = self.median_s * math.exp(dice.gauss(0.0, self.spread))
        low, high = (mean_s * factor for factor in _AROUND_MEAN)
        return min(max(low, self.s_min), self.s_max), max(min(high, self.s_max), self.s_min)


class PrepareConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and sources of what a run starts from."""

    sources: tuple[SourceConfig, ...] = ()
    """Sources of tasks, each with its weight and limits."""
    tasks: str = ""
    """Folder of Harbor tasks (`penstock tasks make`, or others'), in place of all `sources`."""
    corpora: CorporaConfig | None = None
    """What mid-training reads, beside `model.corpora`; needed without `model.checkpoint`."""
    egress_addresses: bool = False
    """Whether these tasks' rules may name addresses; as `sandbox_host.egress_addresses`."""
    evaluates_unseparated: bool = False
    """Whether held-out tasks may have verifiers that the code under test could deceive."""
    isolation_min: str = ""
    """Least isolation of machines for strangers' tasks; as `sandbox_host.isolation_min`."""
    num_train_tasks: PositiveInt = 1024
    """Training tasks that each source of own code is asked for."""
    num_heldout_tasks: PositiveInt = 128
    """As `num_train_tasks`, of held-out tasks."""
    limits: EpisodeLimits = EpisodeLimits(num_turns_max=8, num_tokens_max=512, turn_tokens_max=96)
    """Limits of an episode of any of these tasks."""
    slow_calls: SlowCalls | None = None
    """Machines that sleep before each call, for measurements; by default none does."""
    harness: str = HARNESS_VERSION
    """Version of the tools that corpora show; by default the one of `pacer.harness`."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"prepare.sources: expected each name once, got {name!r} twice")
        if self.sources and not any(source.weight for source in self.sources):
            raise ConfigError("prepare.sources: expected a weight above 0")

    def check_new(self, *, has_model: bool) -> None:
        """Check that a new run says what it starts from; one that was prepared has it.

        Args:
            has_model: Whether it starts from a checkpoint, which has a tokenizer.

        Raises:
            ConfigError: It has no source of tasks, or nothing that makes a tokenizer.

        """
        if not self.all_sources:
            text = 'expected a source of tasks, e.g. kind = "own" and make = "module:name"'
            raise ConfigError(f"prepare.sources: {text}; or a folder, prepare.tasks")
        if self.corpora is None and not has_model:
            text = 'expected own code that makes tokenizer and corpora, make = "module:name"'
            raise ConfigError(f"prepare.corpora: {text}; or model.checkpoint")

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        """The sources; with `tasks`, that folder alone."""
        if not self.tasks:
            return self.sources
        kind = SourceKind.FOLDER
        return (SourceConfig(name=kind.value, kind=kind, path=self.tasks),)
