import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.config import MidtrainConfig, OptimizerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.midtraining.corpus import (
    Corpus,
    MidtrainCorpora,
    decode_corpus,
    encode_corpus,
    segments,
)
from penstock.actors.trainer.midtraining.midtrain import Midtrainer, even_parts, packed_runs, rate
from penstock.messages.errors import CorruptDataError

POLICY = PolicyConfig(
    vocab_size=16, hidden_size=16, num_hidden_layers=1, head_dim=8, moe_intermediate_size=8
)
CONFIG = MidtrainConfig(
    num_tokens=6000, sequence_tokens=16, batch_tokens=128, learning_rate=1e-2, report_steps=50
)


def counting_corpus(num_documents=60, num_unlearnable=0):
    """Documents that count upwards from a start: the next token is certain but for the first."""
    rng = np.random.default_rng(0)
    documents = [(int(rng.integers(16)) + np.arange(int(rng.integers(4, 12)))) % 16
                 for _ in range(num_documents)]  # fmt: skip
    tokens = np.concatenate(documents).astype(np.int32)
    return Corpus(tokens=tokens, lengths=np.array([d.size for d in documents], np.int32))


def run(config=CONFIG, corpus=None, seed=0):
    torch.set_num_threads(1)
    policy = Policy(POLICY, seed=3)
    corpus = corpus or counting_corpus()
    trainer = Midtrainer(
        Learner(policy, OptimizerConfig()), config, MidtrainCorpora(corpus, corpus), seed
    )
    while trainer.spent(0.0) < 1.0:
        trainer.run(0.0)
    return policy, trainer.report(1.0)


def test_it_learns_what_is_certain():
    policy, report = run()
    assert report.heldout_loss < 0.2
    assert report.loss_last < 0.3 < 1.0 < report.loss_first
    assert report.heldout_perplexity == pytest.approx(math.exp(report.heldout_loss))
    assert 6000 <= report.num_tokens < 6000 + 128
    ids = torch.tensor([5, 6, 7])
    assert policy.logits(policy(ids, [3]).hidden).argmax(-1).tolist() == [6, 7, 8]


def test_the_second_head_learns_the_token_after_next():
    policy, _ = run()
    hidden = policy(torch.tensor([5, 6]), [2]).hidden[:1]
    logits = policy.logits(policy.mtp_hidden(hidden, torch.tensor([6])))
    assert logits.argmax(-1).tolist() == [7]


def test_the_same_seed_gives_the_same_bits():
    config = MidtrainConfig(num_tokens=500, sequence_tokens=16, batch_tokens=128)
    first, second, other = (run(config, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first.embedding, second.embedding)
    assert not torch.equal(first.embedding, other.embedding)


def test_the_number_of_workers_changes_no_bit():
    policies = []
    for num_workers in (1, 3):
        config = MidtrainConfig(
            num_tokens=500,
            sequence_tokens=16,
            batch_tokens=128,
            pass_tokens=40,
            num_workers=num_workers,
        )
        policies.append(run(config)[0])
    first, second = (dict(policy.named_parameters()) for policy in policies)
    assert all(torch.equal(first[name], second[name]) for name in first)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_steps_passes_are_few_and_even_and_hold_each_piece_once(lengths):
    pieces = np.array([(n * 100, length) for n, length in enumerate(lengths)])
    parts = even_parts(pieces, 40)
    assert sorted(np.concatenate(parts).tolist()) == pieces.tolist()
    sizes = [int(part[:, 1].sum()) for part in parts]
    assert max(sizes) <= 40
    assert max(sizes) - min(sizes) <= max(lengths)
    one_after_the_other = list(packed_runs(pieces, 40))
    assert len(parts) <= max(len(one_after_the_other), math.ceil(sum(lengths) / 40))


def test_no_pieces_and_those_that_fit_no_pass_are_refused():
    with pytest.raises(ValueError, match="pieces: expected at least one, got none"):
        even_parts(np.zeros((0, 2), np.int64), 40)
    with pytest.raises(ValueError, match="pieces: expected at most 40 tokens in each, got 41"):
        even_parts(np.array([(0, 3), (3, 41)]), 40)


def test_thousands_of_pieces_are_dealt_out_within_a_steps_time():
    lengths = [1100] * 4000  # Two do not share a pass: half of them by size, one each in truth.
    began = time.process_time()
    parts = even_parts(np.array([(n, length) for n, length in enumerate(lengths)]), 2048)
    assert len(parts) == len(lengths)
    assert time.process_time() - began < 5.0


def test_tokens_of_no_weight_are_not_learned():
    plain = counting_corpus()
    weights = np.ones(plain.tokens.size, np.float32)
    weights[plain.tokens == 9] = 0.0
    corpus = Corpus(tokens=plain.tokens, lengths=plain.lengths, weights=weights)
    policy, _ = run(corpus=corpus)
    logits = policy.logits(policy(torch.tensor([6, 7, 8]), [3]).hidden)
    assert logits[:2].argmax(-1).tolist() == [7, 8]
    assert logits[2].detach().softmax(-1)[9].item() < 0.2


def test_a_budget_by_the_clock_ends_with_the_clock():
    corpus = counting_corpus()
    config = MidtrainConfig(seconds=10.0, sequence_tokens=16, batch_tokens=128, report_steps=2)
    trainer = Midtrainer(
        Learner(Policy(POLICY, seed=3), OptimizerConfig()),
        config,
        MidtrainCorpora(corpus, corpus),
        0,
    )
    trainer.run(5.0)
    assert (trainer.spent(5.0), len(trainer.losses)) == (0.5, 2)
    trainer.run(10.0)
    assert (trainer.spent(10.0), len(trainer.losses)) == (1.0, 2)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("wsd", {0.0: 0.01, 0.025: 0.5, 0.05: 1.0, 0.7: 1.0, 0.85: 0.55, 1.0: 0.1}),
        ("cosine", {0.0: 0.01, 0.05: 1.0, 0.525: 0.55, 1.0: 0.1}),
    ],
)
def test_schedules(schedule, expected):
    config = MidtrainConfig(schedule=schedule, warmup_fraction=0.05, decay_fraction=0.3)
    assert {at: rate(config, at) for at in expected} == pytest.approx(expected)


def test_segments_cut_documents_and_leave_single_tokens_out():
    corpus = Corpus(tokens=np.arange(12), lengths=np.array([5, 1, 6]))
    assert segments(corpus, 4).tolist() == [[0, 4], [6, 4], [10, 2]]
    assert segments(Corpus(tokens=np.arange(9)), 4).tolist() == [[0, 4], [4, 4]]


def test_a_corpus_round_trips():
    corpus = Corpus(
        tokens=np.arange(6, dtype=np.int32),
        lengths=np.array([2, 4], np.int32),
        weights=np.linspace(0, 1, 6, dtype=np.float32),
    )
    back = decode_corpus(encode_corpus(corpus))
    for name in ("tokens", "lengths", "weights"):
        assert np.array_equal(getattr(back, name), getattr(corpus, name))
    assert decode_corpus(encode_corpus(Corpus(tokens=np.arange(3)))).lengths is None


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        (Corpus(tokens=np.zeros(3)), "flat integer array"),
        (Corpus(tokens=np.arange(4), lengths=np.array([3])), "expected a sum of 4, got 3"),
        (Corpus(tokens=np.arange(4), weights=np.ones(3)), r"expected shape \(4,\)"),
    ],
)
def test_a_bad_corpus_is_refused(corpus, message):
    with pytest.raises(CorruptDataError, match=message):
        encode_corpus(corpus)


def test_bytes_that_are_no_corpus_are_refused():
    with pytest.raises(CorruptDataError, match="not a safetensors file"):
        decode_corpus(b"nonsense")
    with pytest.raises(CorruptDataError, match="at least 2 tokens"):
        segments(Corpus(tokens=np.arange(2), lengths=np.array([1, 1])), 8)
