"""What own code is asked for that makes the corpora of mid-training (`[prepare.corpora]`)."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.actors.policy.summaries import SummaryConfig
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.infra.corpora.builder import CorpusBuilder, until
from penstock.infra.corpora.own import sample_texts
from penstock.infra.models.settings import CorpusConfig
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import read_settings
from penstock.messages.task import Limits

FIELD = "prepare.corpora.settings"
_NUM_TOKENIZED = 200
"""Documents of each of `model.corpora` that a tokenizer learns from."""
T = TypeVar("T")


@dataclass(frozen=True)
class Corpora:
    """What the policy learns from first."""

    tokenizer: Tokenizer
    train: CorpusBuilder
    heldout: CorpusBuilder
    """Documents that only measure the loss."""


@dataclass(frozen=True)
class CorpusRequest:
    """The corpora that a run asks own code for; equal requests must give equal bytes."""

    seed: int
    vocab_size: int
    """Tokens that the tokenizer must have."""
    harness: str
    """Version of the tools that the agents will have."""
    limits: Limits
    """`prepare.limits`."""
    summary: SummaryConfig
    """How rollouts are asked for summaries."""
    given: Mapping[str, Any]
    """The table `prepare.corpora.settings`, unchecked."""
    sources: Mapping[str, Mapping[str, Any]]
    """Settings of the run's sources of own tasks, unchecked, by name."""
    corpora: Sequence[CorpusConfig]
    """`model.corpora`, whose documents are added after those of own code."""
    stopped: threading.Event
    """Ends the work: nobody waits for it any more."""
    field: str = FIELD
    """Where the table `given` stands, for errors."""

    def settings(self, kind: type[T]) -> T:
        """Return the settings of `[prepare.corpora]` as a struct.

        Raises:
            ConfigError: They are not of that kind; the text names the key.

        """
        return read_settings(self.given, kind, self.field)

    def source_settings(self, name: str, kind: type[T]) -> T:
        """Return the settings of a source of own tasks; with an empty name, of the first one.

        Raises:
            ConfigError: There is no such source, or they are not of that kind.

        """
        name = name or next(iter(self.sources), "")
        if name not in self.sources:
            names = ", ".join(self.sources) or "a source of kind own, and there is none"
            raise ConfigError(f"{self.field}.source: expected {names}, got {name!r}")
        return read_settings(self.sources[name], kind, f"prepare.sources.{name}.settings")

    def texts(self) -> Iterator[str]:
        """Yield the first texts of each of `model.corpora`, for the tokenizer to learn from."""
        yield from sample_texts(self.corpora, _NUM_TOKENIZED)

    def until_stopped(self, items: Iterable[T]) -> Iterator[T]:
        """Iterate while somebody waits for the result.

        Raises:
            PreparationStoppedError: The run was stopped.

        """
        return until(self.stopped, items)
