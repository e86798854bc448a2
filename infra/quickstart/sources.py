"""The `[[prepare.sources]]` of a run: where its tasks come from, in which shares."""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.envs.ladder.generate import Selection
from penstock.envs.trail.config import TrailConfig
from penstock.messages.errors import ConfigError
from penstock.messages.settings import REFERENCE, PositiveInt
from penstock.messages.task import Limits

WEIGHT_MAX = 1e6


class EpisodeLimits(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits as settings: an unknown key is refused."""


class SourceKind(StrEnum):
    """How a source's tasks are made."""

    LADDER = "ladder"
    TRAIL = "trail"
    FOLDER = "folder"
    OWN = "own"


class SourceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source of tasks."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]{1,32}\Z")]
    kind: SourceKind
    weight: Annotated[float, Meta(ge=0, le=WEIGHT_MAX)] = 1.0
    """Share of the training groups, relative to the other sources' weights; 0: evaluation alone."""
    limits: EpisodeLimits | None = None
    """Limits of its episodes; by default `prepare.limits`, and of a folder's tasks their own."""
    num_train_tasks: PositiveInt | None = None
    """How many, by default `prepare.num_train_tasks`. Of a folder: at most so many, drawn by the
    run's seed; by default all. Likewise of own ones."""
    num_heldout_tasks: PositiveInt | None = None
    """As `num_train_tasks`, of held-out tasks."""
    selection: Selection | None = None
    """Of the ladder: categories and families, by default `prepare.selection`."""
    trail: TrailConfig | None = None
    """Of trails: their size; by default `prepare.trail`, or its defaults."""
    path: str = ""
    """Of a folder of Harbor tasks (`penstock tasks make`, or others')."""
    make: Annotated[str, Meta(pattern=rf"^({REFERENCE})?\Z")] = ""
    """Of the kind `own`: own code, `module:name`, a function of the run's seed that returns
    `TaskCandidate`s (docs/extend.md)."""
    origins: tuple[str, ...] = ()
    """Of a folder: only tasks that were made from these (`library`, `package`, `commits` ...; of
    others' tasks `harbor`); by default all."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        where = f"prepare.sources.{self.name}"
        is_folder = self.kind is SourceKind.FOLDER
        if is_folder != bool(self.path):
            text = "expected the folder" if is_folder else f"expected none with kind {self.kind}"
            raise ConfigError(f"{where}.path: {text}, got {self.path!r}")
        if (self.kind is SourceKind.OWN) != bool(self.make):
            text = "expected module:name with kind own, and with no other"
            raise ConfigError(f"{where}.make: {text}, got {self.make!r}")
        owners = {
            "selection": SourceKind.LADDER, "trail": SourceKind.TRAIL, "origins": SourceKind.FOLDER,
        }  # fmt: skip
        for field, kind in owners.items():
            if getattr(self, field) and self.kind is not kind:
                text = f"expected none with kind {self.kind}: it is of kind {kind}"
                raise ConfigError(f"{where}.{field}: {text}")
