"""Corpora of a run that starts from a checkpoint: its own texts and traces."""

import threading
from collections.abc import Iterable, Iterator

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools
from penstock.actors.trainer.midtraining.corpus import encode_corpus
from penstock.infra.corpora.builder import (
    HELDOUT_EVERY,
    MIDTRAIN_HELDOUT_KEY,
    MIDTRAIN_KEY,
    CorpusBuilder,
    Document,
    until,
)
from penstock.infra.corpora.text import read_texts
from penstock.infra.corpora.traces import read_traces
from penstock.infra.models.settings import ModelSection
from penstock.messages.errors import ConfigError


def corpus_objects(
    section: ModelSection,
    chat: ChatFormat,
    tools: OfferedTools,
    tokens_max: int,
    stopped: threading.Event,
) -> dict[str, bytes]:
    """Return both corpora by their keys; every twentieth document is held out.

    Args:
        section: names the files.
        chat: the policy's format.
        tools: of traces that name none.
        tokens_max: longest document; longer texts are cut.
        stopped: ends the reading.

    Raises:
        ConfigError: Files that are not there or broken, or too few documents.
        PreparationStoppedError: `stopped` was set meanwhile.

    """
    train, heldout = CorpusBuilder(), CorpusBuilder()
    num_documents = 0
    traces = read_traces(section.traces, chat, tools, tokens_max)
    texts = _pieces(read_texts(section.text), chat, tokens_max)
    for documents in (texts, traces):
        for index, (ids, weights) in enumerate(until(stopped, documents)):
            (train if index % HELDOUT_EVERY else heldout).add(ids, weights)
            num_documents += 1
    if train.is_empty or heldout.is_empty:
        text = f"expected at least two documents, got {num_documents}"
        raise ConfigError(f"model.text, model.traces: {text}")
    return {
        MIDTRAIN_KEY: encode_corpus(train.build()),
        MIDTRAIN_HELDOUT_KEY: encode_corpus(heldout.build()),
    }


def _pieces(texts: Iterable[str], chat: ChatFormat, tokens_max: int) -> Iterator[Document]:
    """Cut texts into documents of at most `tokens_max` tokens; single tokens predict nothing."""
    for text in texts:
        ids = chat.tokenizer.encode(text)
        for start in range(0, len(ids), tokens_max):
            piece = ids[start : start + tokens_max]
            if len(piece) > 1:
                yield piece, [1.0] * len(piece)
