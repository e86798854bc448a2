"""Demonstrations of trails as documents, and the shipped configuration."""

import itertools
import threading
from pathlib import Path

import msgspec
import pytest

from penstock.actors.policy.special_tokens import USER
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.actors.trainer.midtraining.corpus import decode_corpus
from penstock.infra.config.file import load_config
from penstock.infra.corpora.builder import MIDTRAIN_HELDOUT_KEY, MIDTRAIN_KEY
from penstock.infra.corpora.trails import TrailCorpus
from penstock.infra.run.prepare import build
from penstock.messages.errors import ConfigError

CONFIG = Path(__file__).resolve().parents[3] / "infra" / "configs" / "self-summary.toml"
SMALL = (
    "prepare.num_demonstrations=40",
    "prepare.drill_tokens=0",
    "prepare.num_train_tasks=3",
    "prepare.num_heldout_tasks=2",
)


@pytest.fixture(scope="module")
def config():
    return load_config(CONFIG, SMALL)


def corpus(config, **limits):
    section = config.prepare
    if limits:
        limits = msgspec.structs.replace(section.limits, **limits)
        section = msgspec.structs.replace(section, limits=limits)
    made = TrailCorpus(
        section, section.trail, config.rollout_worker.summary, config.policy.vocab_size, 0
    )
    return made.objects(threading.Event())


@pytest.mark.parametrize("num_demonstrations", [0, 1])
def test_too_few_demonstrations_are_refused_by_their_setting(config, num_demonstrations):
    section = msgspec.structs.replace(config.prepare, num_demonstrations=num_demonstrations)
    with pytest.raises(ConfigError, match=r"prepare\.num_demonstrations: expected at least 2"):
        corpus(msgspec.structs.replace(config, prepare=section))


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
    complete = sum(len(answer) == 1 + 2 * config.prepare.trail.num_names for answer in answers)
    assert 0.3 < complete / len(answers) < 1.0


def test_a_window_that_holds_no_stop_is_refused(config):
    with pytest.raises(ConfigError, match="a demonstration ends by"):
        corpus(config, window_tokens_max=48)


def test_the_same_settings_build_the_same_objects(config):
    first, second = (build(config, threading.Event()) for _ in range(2))
    assert first == second
    assert {"tasks/train", "hidden_tests/heldout"} <= first.keys()
