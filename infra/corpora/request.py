"""The request to custom code that makes the corpora of mid-training (`[prepare.corpora]`)."""

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
"""Documents of each of `model.corpora` that train the tokenizer."""
T = TypeVar("T")


@dataclass(frozen=True)
class Corpora:
    """A tokenizer and the corpora of mid-training."""

    tokenizer: Tokenizer
    train: CorpusBuilder
    heldout: CorpusBuilder
    """Documents for measuring the loss, which are not trained."""


@dataclass(frozen=True)
class CorpusRequest:
    """A run's request for corpora; equal requests have to give equal bytes."""

    seed: int
    vocab_size: int
    """Required vocabulary size of the tokenizer."""
    harness: str
    """Version of the agents' tools."""
    limits: Limits
    """`prepare.limits`."""
    summary: SummaryConfig
    """Settings for summaries in rollouts."""
    given: Mapping[str, Any]
    """The table `prepare.corpora.settings`, unchecked."""
    sources: Mapping[str, Mapping[str, Any]]
    """Unchecked settings of the run's custom task sources by name."""
    corpora: Sequence[CorpusConfig]
    """`model.corpora`, whose documents are added after the custom ones."""
    stopped: threading.Event
    """Set when the result is no longer needed."""
    field: str = FIELD
    """Name of the table `given` for errors."""

    def settings(self, kind: type[T]) -> T:
        """Return the settings of `[prepare.corpora]` as a struct.

        Raises:
            ConfigError: The settings do not fit the struct; the text names the key.

        """
        return read_settings(self.given, kind, self.field)

    def source_settings(self, name: str, kind: type[T]) -> T:
        """Return the settings of a custom task source, by default of the first one.

        Raises:
            ConfigError: The source does not exist, or its settings do not fit the struct.

        """
        # Most runs have one custom source, which then needs no name.
        name = name or next(iter(self.sources), "")
        if name not in self.sources:
            names = ", ".join(self.sources) or "a source of kind own, and there is none"
            raise ConfigError(f"{self.field}.source: expected {names}, got {name!r}")
        return read_settings(self.sources[name], kind, f"prepare.sources.{name}.settings")

    def texts(self) -> Iterator[str]:
        """Yield the first texts of each of `model.corpora`, for training the tokenizer."""
        yield from sample_texts(self.corpora, _NUM_TOKENIZED)

    def until_stopped(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items while the result is needed.

        Raises:
            PreparationStoppedError: The run was stopped.

        """
        return until(self.stopped, items)
