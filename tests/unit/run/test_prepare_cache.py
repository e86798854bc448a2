"""Corpora of an earlier run with the same inputs are taken from the cache."""

import threading

import msgspec
import pytest
from tests.ladder import MAKE as QUICKSTART
from tests.unit.run.test_prepare_objects import run_config, with_corpora

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.runtime import products
from penstock.infra.config.settings import RunConfig
from penstock.infra.corpora.kept import FOLDER, kept_corpora
from penstock.infra.run import prepare as preparing


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    return tmp_path / FOLDER


SMALL = {"num_demonstrations": 2, "code_tokens": 200}


def settings(*, uses_cache: bool = True, seed: int = 3, **changes) -> RunConfig:
    small = with_corpora(**SMALL | changes)
    small = msgspec.structs.replace(small, num_train_tasks=1, num_heldout_tasks=1)
    config = run_config(small, seed)
    config = msgspec.structs.replace(config, policy=PolicyConfig(vocab_size=400))
    midtrain = msgspec.structs.replace(config.trainer.midtrain, uses_cache=uses_cache)
    trainer = msgspec.structs.replace(config.trainer, midtrain=midtrain, steps_max=7)
    return msgspec.structs.replace(config, trainer=trainer)


def build(config: RunConfig) -> tuple[dict[str, bytes], list[str]]:
    cached: list[str] = []
    return preparing.build(config, threading.Event(), cached.append), cached


def test_the_second_build_takes_the_same_bytes_from_the_cache():
    whole, none = build(settings(uses_cache=False))
    first, built = build(settings())
    again, cached = build(msgspec.structs.replace(settings(), pacer=settings().pacer))
    assert whole == first == again
    assert (none, built, cached) == ([], [], ["tokenizer and corpora of mid-training"])


def test_other_settings_or_another_seed_are_other_corpora():
    build(settings())
    for other in (settings(seed=4), settings(drill_tokens=800), settings(context_weight=0.5)):
        assert build(other)[1] == []


def test_a_damaged_entry_is_built_again(folder):
    whole, _ = build(settings())
    [entry] = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert build(settings()) == (whole, [])
    assert build(settings())[1]


def test_other_code_of_a_conversation_makes_other_corpora(tmp_path, monkeypatch):
    source = tmp_path / "code" / "actors" / "rollout_worker" / "conversation.py"
    source.parent.mkdir(parents=True)
    monkeypatch.setattr(products, "_PACKAGE", tmp_path / "code")
    found = []
    for text in ("one", "one", "two"):
        source.write_text(text)
        products.source_digest.cache_clear()
        found.append(kept_corpora({}, f"{QUICKSTART}ladder_corpora", lambda: {"a": b"b"}))
    products.source_digest.cache_clear()
    assert found == [({"a": b"b"}, is_kept) for is_kept in (False, True, False)]


def test_other_own_code_makes_other_corpora(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for text in ("one = 1", "one = 1", "one = 2"):
        (tmp_path / "own_corpora.py").write_text(text)
        found.append(kept_corpora({}, "own_corpora:make", lambda: {"a": b"b"})[1])
    assert found == [False, True, False]
