"""Preferences from corrections and clear judgments, for losses such as DPO and KTO.

These events hold references and no content: the request's record has the context and the reply,
the feedback has the correction. Both are sealed with their user's key, so erasing a key makes the
pair unusable. They are only written with consent to train on the request.
"""

from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.settings import NonNegativeFloat


class PreferencePair(Event, frozen=True, kw_only=True):
    """Feedback join -> trainer, export: a user wrote a correction, preferred to the reply."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    keyed_by: ClassVar[tuple[str, ...]] = ("feedback",)
    feedback: str
    """Key of the feedback that holds the correction."""
    root: str
    """Key of the original feedback if this is an amendment; the newest amendment counts."""
    request_id: str
    """Id of the request, whose record holds the context and the rejected reply."""
    tenant: str
    user: str
    """Pseudonym of the user who sent the request."""
    author: str = ""
    """Author of the correction, `<tenant>/<user>`, whose key seals it."""
    policy_version: int
    """Oldest version that sampled a token of the reply."""
    key_id: str = ""
    """Id of the bearer key that made the request."""
    recorded_at: NonNegativeFloat = 0.0
    """Time of the request in Unix seconds, on the gateway's clock."""


class Label(Event, frozen=True, kw_only=True):
    """Feedback join -> trainer, export: a user judged a single reply."""

    stream: ClassVar[Stream] = Stream.FEEDBACK
    keyed_by: ClassVar[tuple[str, ...]] = ("feedback",)
    feedback: str
    """Key of the feedback."""
    root: str
    """Key of the original feedback if this is an amendment; the newest amendment counts."""
    request_id: str
    name: str
    """Name of the signal."""
    is_desirable: bool
    weight: NonNegativeFloat
    """The signal's declared weight times the feedback's own."""
    tenant: str
    user: str
    """Pseudonym of the user who sent the request."""
    policy_version: int
    """Oldest version that sampled a token of the reply."""
    key_id: str = ""
    """Id of the bearer key that made the request."""
    recorded_at: NonNegativeFloat = 0.0
    """Time of the request in Unix seconds, on the gateway's clock."""


def preference_name(event: PreferencePair | Label) -> str:
    """Return the name of a preference that is unique in a run, as in `PreferenceEntry.name`."""
    kind = PreferenceKind.LABEL if isinstance(event, Label) else PreferenceKind.PAIR
    return f"{kind}.{event.feedback}"


class PreferenceKind(StrEnum):
    """Kind of preference that a user expressed."""

    PAIR = "pair"
    """Correction, preferred to the reply; trained with DPO."""
    LABEL = "label"
    """Judgment of a single reply; trained with KTO."""


class PreferenceFate(StrEnum):
    """Final fate of a correction or judgment; each has exactly one."""

    TRAINED = "trained"
    RETRACTED = "retracted"
    SUPERSEDED = "superseded"
    """The author amended it before it was trained."""
    ERASED = "erased"
    """The user who sent the request or wrote the correction was erased."""
    CAPPED = "capped"
    """Too many were waiting."""
    UNREADABLE = "unreadable"
    """The log lacks the request or the correction, or has them in a form the policy cannot read."""


class PreferenceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Correction or judgment in a batch manifest, either trained or left out for a reason."""

    kind: PreferenceKind
    fate: PreferenceFate
    feedback: str
    """Key of the `PreferencePair` or `Label`."""
    request_id: str
    """Id of the request, whose record holds context and reply."""
    tenant: str
    user: str
    """Pseudonym of the user who sent the request."""
    author: str = ""
    """Author of the correction, `<tenant>/<user>`; empty for a judgment."""
    is_desirable: bool = False
    """Whether a judged reply was good; unused for corrections."""
    weight: NonNegativeFloat = 1.0
    """Weight of a judgment; unused for corrections."""

    @property
    def name(self) -> str:
        """Name that is unique in a run."""
        return f"{self.kind}.{self.feedback}"

    @property
    def owners(self) -> set[str]:
        """Owners (`<tenant>/<user>`) of the content keys needed to read it."""
        return {f"{self.tenant}/{self.user}", *([self.author] if self.author else [])}


class PreferencesProgressed(Event, frozen=True, kw_only=True):
    """Trainer -> command line: progress of preference training before RL."""

    stream: ClassVar[Stream] = Stream.METRICS
    num_steps: int
    num_steps_total: int
    loss: float
    figures: dict[str, float] = {}
    """Metrics of the newest step: `num_pairs`, `dpo_loss`, `dpo_accuracy`, `dpo_margin`,
    `num_labels`, `kto_loss`, `kto_kl`."""

    def key(self) -> str:
        """Return the key: only the newest event counts."""
        return "preferences"


class PreferencesTrained(Event, frozen=True, kw_only=True):
    """Trainer -> everyone: preference training before RL is done; version 0 includes it."""

    stream: ClassVar[Stream] = Stream.TRAINING
    num_pairs: int
    num_labels: int
    num_heldout: int
    """Number of pairs and labels that were held out of training."""
    num_steps: int
    loss_first: float
    loss_last: float
    """Mean loss over the last tenth of the steps (`loss_first`: over the first tenth)."""
    heldout_before: dict[str, float] = {}
    """Held-out `loss` and metrics as in `PreferencesProgressed.figures` before training; empty if
    nothing was held out."""
    heldout_after: dict[str, float] = {}
    """The same after training."""
    weights_digest: str
    wall_s: float

    def key(self) -> str:
        """Return the key: one event per run."""
        return "preferences"
