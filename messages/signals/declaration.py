"""Declaration of a signal, and the score of its values. Pure."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat


class SignalKind(StrEnum):
    """Kind of value that a signal has."""

    EVENT = "event"
    """Whether something happened: true (1) or false (0 or -1)."""
    FRACTION = "fraction"
    """Degree from 0 to 1."""
    COMMENT = "comment"
    """Free text, without reward."""
    CORRECTION = "correction"
    """Text that the reply should have been, without reward."""

    @property
    def is_text(self) -> bool:
        """Whether the signal has a text in place of a value."""
        return self in {SignalKind.COMMENT, SignalKind.CORRECTION}


class SignalLevel(StrEnum):
    """Replies that a signal applies to."""

    REQUEST = "request"
    """The reply to one request."""
    SESSION = "session"
    """All replies in the request's session."""


class SignalDirection(StrEnum):
    """Whether high values (`up`) or low values (`down`) of a signal are good."""

    UP = "up"
    DOWN = "down"


_NAME = r"^[a-z0-9_-]{1,64}\Z"


class SignalSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a declared signal (`[[feedback.signals]]`)."""

    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    kind: SignalKind = SignalKind.EVENT
    level: SignalLevel = SignalLevel.REQUEST
    direction: SignalDirection = SignalDirection.UP
    """Direction; with `down`, a high value or the event itself is bad."""
    maturity_s: NonNegativeFloat = 0.0
    """Seconds after the request before which the signal does not count; earlier ones wait."""
    weight: NonNegativeFloat = 1.0
    """Weight in the mean of all signals; 0 records the signal without reward."""
    trusted_only: bool = False
    """Whether only keys with `is_trusted` may send it; otherwise the tenant's own keys may, too."""

    def score(self, value: float) -> float:
        """Return the score of a value, from -1 to 1.

        An event that did not happen scores the opposite of one that did.

        Example:
            `undo` (an event, down) scores -1 for true and 1 for false.

        """
        if self.kind.is_text:
            return 0.0
        if self.kind is SignalKind.EVENT:
            # 0 and -1 both mean that it did not happen.
            upward = 1.0 if value > 0 else -1.0
        else:
            upward = 2.0 * min(1.0, max(0.0, value)) - 1.0
        return upward if self.direction is SignalDirection.UP else -upward

    def expected(self, value: float) -> str:
        """Return a description of valid values if a value is invalid, otherwise an empty string."""
        if self.kind is SignalKind.EVENT and value not in {0.0, 1.0, -1.0}:
            return f"expected true or false (1 or 0) for {self.name!r}"
        if self.kind is SignalKind.FRACTION and not 0 <= value <= 1:
            return f"expected a number from 0 to 1 for {self.name!r}"
        return ""


def by_name(signals: Iterable[SignalSpec]) -> dict[str, SignalSpec]:
    """Return declarations by name.

    Raises:
        ConfigError: A name is declared twice.

    """
    found: dict[str, SignalSpec] = {}
    for spec in signals:
        # The later one would silently replace the earlier one.
        if spec.name in found:
            raise ConfigError(f"feedback.signals.{spec.name}: declared twice")
        found[spec.name] = spec
    return found
