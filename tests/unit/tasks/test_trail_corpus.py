"""Demonstrations of trails as documents, and the shipped configuration."""

import itertools
import threading
from pathlib import Path

import msgspec
import pytest

from penstock.actors.policy.special_tokens import USER
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.actors.trainer.midtraining.corpus import decode_corpus
from penstock.examples.quickstart import trail_corpora
from penstock.infra.config.file import load_config
from penstock.infra.corpora.builder import MIDTRAIN_HELDOUT_KEY, MIDTRAIN_KEY
from penstock.infra.models.settings import CorpusConfig, ModelSection
from penstock.infra.run import prepare as preparing
from penstock.messages.errors import ConfigError

CONFIG = Path(__file__).resolve().parents[3] / "infra" / "configs" / "self-summary.toml"
NUM_NAMES = 5
SMALL = (
    "prepare.corpora.settings.num_demonstrations=40",
    "prepare.corpora.settings.drill_tokens=0",
    "prepare.num_train_tasks=3",
    "prepare.num_heldout_tasks=2",
)


@pytest.fixture(scope="module")
def config():
    return load_config(CONFIG, SMALL)


def corpus(config):
    return preparing.build(config, threading.Event())


@pytest.mark.parametrize("num_demonstrations", [0, 1])
def test_too_few_demonstrations_are_refused_by_their_setting(num_demonstrations):
    few = f"prepare.corpora.settings.num_demonstrations={num_demonstrations}"
    with pytest.raises(ConfigError, match=r"settings\.num_demonstrations: expected at least 2"):
        corpus(load_config(CONFIG, [*SMALL, few]))


def test_trails_and_texts_of_a_users_own_are_refused_together(config):
    model = ModelSection(corpora=(CorpusConfig(path="notes.txt"),))
    with pytest.raises(ConfigError, match=r"model\.corpora: expected none with trails"):
        corpus(msgspec.structs.replace(config, model=model))


@pytest.fixture(scope="module")
def documents(config):
    objects = corpus(config)
    tokenizer = Tokenizer.from_json(objects[TOKENIZER_KEY].decode(), "tokenizer")
    texts = []
    for key in (MIDTRAIN_KEY, MIDTRAIN_HELDOUT_KEY):
        found, start = decode_corpus(objects[key]), 0
        for length in found.lengths:
            ids = found.tokens[start : start + length].tolist()
            texts.append((ids, tokenizer.decode(ids)))
            start += length
    return tokenizer, texts


def test_each_segment_is_a_document_that_fits_its_window(config, documents):
    tokenizer, texts = documents
    window = config.prepare.limits.window_tokens_max
    whole = [ids for ids, text in texts if "Summar" not in text]
    parts = [(ids, text) for ids, text in texts if "Summar" in text]
    assert len(parts) > 100 and len(whole) > 5
    assert all(len(ids) <= window for ids, _ in parts)
    assert all(len(ids) > 3 * window for ids in whole)
    assert all(ids[0] == tokenizer.special_id(USER) for ids, _ in texts)


def test_what_a_summary_says_is_what_the_next_segment_reads(documents):
    _, texts = documents
    for (_, before), (_, after) in itertools.pairwise(texts):
        if before.count("Summary:") == 1 and "\n\nSummary " in after:
            noted = before.rpartition("Summary: ")[2].removesuffix("<|end|>")
            assert f":\n{noted}<|end|>" in after


def test_some_summaries_leave_a_number_out(config, documents):
    """The policy that imitates them has something to gain, and can."""
    _, texts = documents
    answers = [
        text.rpartition("<content>")[2].partition("</content>")[0].split()
        for _, text in texts
        if "<content>" in text
    ]
    complete = sum(len(answer) == 1 + 2 * NUM_NAMES for answer in answers)
    assert 0.3 < complete / len(answers) < 1.0


def test_a_window_that_holds_no_stop_is_refused(config):
    limits = msgspec.structs.replace(config.prepare.limits, window_tokens_max=48)
    section = msgspec.structs.replace(config.prepare, limits=limits)
    narrow = msgspec.structs.replace(config, prepare=section)
    request = preparing.corpus_request(narrow, section.corpora, threading.Event())
    with pytest.raises(ConfigError, match="a demonstration ends by"):
        trail_corpora(request)


def test_the_same_settings_build_the_same_objects(config):
    first, second = (corpus(config) for _ in range(2))
    assert first == second
    assert {"tasks/train", "hidden_tests/heldout"} <= first.keys()
