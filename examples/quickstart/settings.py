"""Settings of the quickstart's corpora, the table `prepare.corpora.settings`."""

import msgspec

from penstock.messages.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, UnitInterval

from .ladder.generate import Selection
from .ladder.transcripts import Habits
from .trail.config import TrailConfig


class CorpusSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the corpora of the ladder and of trails have in common."""

    source: str = ""
    """Name of the source whose tasks are demonstrated; by default the run's first of own tasks."""
    num_demonstrations: NonNegativeInt = 8000
    """Episodes of mid-training, each on a task of its own."""
    context_weight: NonNegativeFloat = 0.1
    """Weight as a target of a token that the demonstrating actor reads; one that it says has 1."""
    drill_tokens: NonNegativeInt = 160_000
    """Tokens of repeated rows, from which copying is learned."""
    drill_half_tokens: PositiveInt = 20


class LadderCorpora(CorpusSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The standard library, and demonstrations of the ladder's tasks."""

    selection: Selection | None = None
    """Categories and families that are demonstrated; by default those of `source`."""
    habits: Habits = Habits()
    endings: UnitInterval = 1.0
    """Share of the demonstrations that are read to their ends. Others are cut after their last
    edits: what follows takes a third of the tokens, and little of it is hard to learn."""
    code_tokens: NonNegativeInt = 500_000
    """Standard-library tokens; 0: none, where `model.corpora` has others."""
    code_weight: NonNegativeFloat = 0.3
    """Weight of a code token as a target."""
    piece_tokens: PositiveInt = 256
    """Longest document of code."""


class TrailCorpora(CorpusSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Demonstrations of trails."""

    trail: TrailConfig | None = None
    """Size of the trails, and the habits of who walks them; by default those of `source`."""
