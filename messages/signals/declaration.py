"""One declared signal and the score of its values. Pure."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat


class SignalKind(StrEnum):
    """What a signal's value says."""

    EVENT = "event"
    """Whether something happened: true or false (1, 0; -1 is false)."""
    FRACTION = "fraction"
    """How much, from 0 to 1."""
    COMMENT = "comment"
    """Words; they carry no reward."""
    CORRECTION = "correction"
    """What the reply should have been; it carries no reward."""

    @property
    def is_text(self) -> bool:
        """Whether it has a text in place of a value."""
        return self in {SignalKind.COMMENT, SignalKind.CORRECTION}


class SignalLevel(StrEnum):
    """What a signal is about."""

    REQUEST = "request"
    """The reply to one request."""
    SESSION = "session"
    """All replies of the request's session."""


class SignalDirection(StrEnum):
    """Which end of a signal is good."""

    UP = "up"
    DOWN = "down"


_NAME = r"^[a-z0-9_-]{1,64}\Z"


class SignalSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One declared signal: `[[feedback.signals]]`."""

    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    kind: SignalKind = SignalKind.EVENT
    level: SignalLevel = SignalLevel.REQUEST
    direction: SignalDirection = SignalDirection.UP
    """`down`: a large value, or the event itself, is bad."""
    maturity_s: NonNegativeFloat = 0.0
    """Seconds after its request before which it is not believed; one that comes sooner waits."""
    weight: NonNegativeFloat = 1.0
    """In the mean of all signals; 0 records it without reward."""
    trusted_only: bool = False
    """Only keys with `is_trusted` may send it; else those of the request's tenant, too."""

    def score(self, value: float) -> float:
        """Return what a value is worth, from -1 to 1; an event that did not happen is its opposite.

        Example:
            `undo` (an event, down) gives -1 for true and 1 for false.

        """
        if self.kind.is_text:
            return 0.0
        if self.kind is SignalKind.EVENT:
            upward = 1.0 if value > 0 else -1.0
        else:
            upward = 2.0 * min(1.0, max(0.0, value)) - 1.0
        return upward if self.direction is SignalDirection.UP else -upward

    def expected(self, value: float) -> str:
        """Return what was expected in place of a value, or an empty string if it is right."""
        if self.kind is SignalKind.EVENT and value not in {0.0, 1.0, -1.0}:
            return f"expected true or false (1 or 0) for {self.name!r}"
        if self.kind is SignalKind.FRACTION and not 0 <= value <= 1:
            return f"expected a number from 0 to 1 for {self.name!r}"
        return ""


def by_name(signals: Iterable[SignalSpec]) -> dict[str, SignalSpec]:
    """Return a declaration by name.

    Raises:
        ConfigError: A name is declared twice.

    """
    found: dict[str, SignalSpec] = {}
    for spec in signals:
        if spec.name in found:
            raise ConfigError(f"feedback.signals.{spec.name}: declared twice")
        found[spec.name] = spec
    return found
