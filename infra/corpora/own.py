"""Corpora of a user: texts and conversations as documents of mid-training."""

import threading
from collections.abc import Iterator, Sequence
from itertools import islice

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools
from penstock.infra.corpora.builder import (
    HELDOUT_EVERY,
    CorpusBuilder,
    Document,
    corpora_built,
    until,
)
from penstock.infra.corpora.text import read_texts
from penstock.infra.corpora.traces import read_traces, trace_texts
from penstock.infra.models.settings import CorpusConfig
from penstock.messages.errors import ConfigError


def corpus_objects(
    corpora: Sequence[CorpusConfig],
    chat: ChatFormat,
    tools: OfferedTools,
    tokens_max: int,
    stopped: threading.Event,
) -> dict[str, bytes]:
    """Return the training and the held-out corpus by key; see `add_corpora`."""
    builders = CorpusBuilder(), CorpusBuilder()
    add_corpora(corpora, chat, tools, tokens_max, stopped, builders)
    return corpora_built(*builders, "model.corpora: expected at least one")


def add_corpora(  # noqa: PLR0913, PLR0917 - what is read, by whom, into what
    corpora: Sequence[CorpusConfig],
    chat: ChatFormat,
    tools: OfferedTools,
    tokens_max: int,
    stopped: threading.Event,
    builders: tuple[CorpusBuilder, CorpusBuilder],
) -> None:
    """Add every document; one of `HELDOUT_EVERY` of each corpus is held out.

    Args:
        tools: Tools of conversations that name none.
        tokens_max: Maximum tokens per document; longer texts are split.

    Raises:
        ConfigError: A file is missing or malformed, or a corpus has fewer than two documents.
        PreparationStoppedError: `stopped` was set.

    """
    for index, corpus in enumerate(corpora):
        num_documents = num_tokens = 0
        for ids, weights in until(stopped, _documents(corpus, index, chat, tools, tokens_max)):
            # The first document is held out, so that a corpus of two has one of each.
            builder = builders[0] if num_documents % HELDOUT_EVERY else builders[1]
            builder.add(ids, [corpus.weight * weight for weight in weights])
            num_documents += 1
            num_tokens += len(ids)
            if 0 < corpus.tokens_max <= num_tokens:
                break
        if num_documents < 2:
            text = f"expected at least two documents, one of them to hold out, got {num_documents}"
            raise ConfigError(f"{field_of(index)}: {corpus.path}: {text}")


def sample_texts(corpora: Sequence[CorpusConfig], num_max: int) -> Iterator[str]:
    """Yield the first texts of each corpus, for training a tokenizer; errors as `add_corpora`."""
    for index, corpus in enumerate(corpora):
        read = read_texts if corpus.kind == "text" else trace_texts
        yield from islice(read(corpus.path, field_of(index)), num_max)


def field_of(index: int) -> str:
    """Return the setting that names a corpus."""
    return f"model.corpora[{index}]"


def _documents(
    corpus: CorpusConfig, index: int, chat: ChatFormat, tools: OfferedTools, tokens_max: int
) -> Iterator[Document]:
    if corpus.kind == "messages":
        yield from read_traces(
            corpus.path, field_of(index), chat=chat, tools=tools, tokens_max=tokens_max
        )
        return
    for text in read_texts(corpus.path, field_of(index)):
        ids = chat.tokenizer.encode(text)
        for start in range(0, len(ids), tokens_max):
            piece = ids[start : start + tokens_max]
            if len(piece) > 1:  # A single token predicts nothing.
                yield piece, [1.0] * len(piece)
