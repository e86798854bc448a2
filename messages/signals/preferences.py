"""What a correction or a clear judgment says for losses over preferences: names, and no content.

The request's record has the context and the reply, its feedback the correction; both are sealed
under their user's key, so that a pair ends with the key. Written only where the request may be
trained.
"""

from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.settings import NonNegativeFloat


class PreferencePair(Event, frozen=True, kw_only=True):
    """Feedback join -> trainer, export: a user wrote what the reply should have been."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    feedback: str
    """Log key of the feedback that holds the correction, which is preferred."""
    root: str
    """Log key of the first where it amends one: the newest counts."""
    request_id: str
    """Its record holds the context and the reply, which is not."""
    tenant: str
    user: str
    """Who asked."""
    author: str = ""
    """Who wrote the correction, `<tenant>/<user>`, under whose key it is sealed."""
    policy_version: int
    """Oldest that sampled a token of the reply."""

    def key(self) -> str:
        """One per piece of feedback."""
        return self.feedback


class Label(Event, frozen=True, kw_only=True):
    """Feedback join -> trainer, export: a user judged a reply by itself, without another one."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    feedback: str
    """Log key."""
    root: str
    """Log key of the first where it amends one: the newest counts."""
    request_id: str
    name: str
    """Of the signal."""
    is_desirable: bool
    weight: NonNegativeFloat
    """The signal's declared weight times the feedback's own."""
    tenant: str
    user: str
    """Who asked."""
    policy_version: int
    """Oldest that sampled a token of the reply."""

    def key(self) -> str:
        """One per piece of feedback."""
        return self.feedback


def preference_name(event: PreferencePair | Label) -> str:
    """Return what names a correction or judgment in a run, as `PreferenceEntry.name`."""
    kind = PreferenceKind.LABEL if isinstance(event, Label) else PreferenceKind.PAIR
    return f"{kind}.{event.feedback}"


class PreferenceKind(StrEnum):
    """What a user said of a reply."""

    PAIR = "pair"
    """A correction: it is preferred to the reply. Trained by DPO."""
    LABEL = "label"
    """A judgment of the reply by itself. Trained by KTO."""


class PreferenceFate(StrEnum):
    """The one accounted end of every correction and judgment."""

    TRAINED = "trained"
    RETRACTED = "retracted"
    SUPERSEDED = "superseded"
    """Its author amended it before it was trained."""
    ERASED = "erased"
    """Who asked, or who wrote the correction, was erased."""
    CAPPED = "capped"
    """Too many waited."""
    UNREADABLE = "unreadable"
    """The log lacks its request or its correction, or has them as this policy cannot read them."""


class PreferenceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A correction or a judgment in a batch, or left out of it, and why."""

    kind: PreferenceKind
    fate: PreferenceFate
    feedback: str
    """Key of its `PreferencePair` or `Label`."""
    request_id: str
    """Its record holds context and reply."""
    tenant: str
    user: str
    """Who asked."""
    author: str = ""
    """Who wrote the correction: `<tenant>/<user>`."""
    is_desirable: bool = False
    """Of a label."""
    weight: NonNegativeFloat = 1.0
    """Of a label."""

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"{self.kind}.{self.feedback}"

    @property
    def owners(self) -> set[str]:
        """Whose content keys it needs: `<tenant>/<user>` each."""
        return {f"{self.tenant}/{self.user}", *([self.author] if self.author else [])}


class PreferencesProgressed(Event, frozen=True, kw_only=True):
    """Trainer -> command line: the phase on preferences before RL."""

    stream: ClassVar[Stream] = Stream.METRICS
    num_steps: int
    num_steps_total: int
    loss: float
    figures: dict[str, float] = {}
    """Of the newest step: `num_pairs`, `dpo_loss`, `dpo_accuracy`, `dpo_margin`, `num_labels`,
    `kto_loss`, `kto_kl`."""

    def key(self) -> str:
        """Name all alike; the latest wins."""
        return "preferences"


class PreferencesTrained(Event, frozen=True, kw_only=True):
    """Trainer -> everyone: what the phase on preferences before RL gave; version 0 has it."""

    stream: ClassVar[Stream] = Stream.TRAINING
    num_pairs: int
    num_labels: int
    num_heldout: int
    """Of both, those that were not trained."""
    num_steps: int
    loss_first: float
    loss_last: float
    """Means over the first and the last tenth of the steps."""
    heldout_before: dict[str, float] = {}
    """`loss`, and as in `PreferencesProgressed.figures`; empty where nothing was held out."""
    heldout_after: dict[str, float] = {}
    weights_digest: str
    wall_s: float

    def key(self) -> str:
        """One per run."""
        return "preferences"
