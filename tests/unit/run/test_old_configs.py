"""Configurations of runs that earlier versions wrote still describe the same run."""

import threading
from pathlib import Path

import pytest
import tomli_w

from penstock.infra.config.file import load_config, read_toml
from penstock.infra.config.former_names import with_present_prepare
from penstock.infra.run import prepare as preparing
from penstock.infra.run.command import parse_new
from penstock.messages.errors import ConfigError

QUICKSTART = Path("examples/quickstart/config.toml")
NEW = read_toml(QUICKSTART)
SIZES = {"num_train_tasks": 3, "num_heldout_tasks": 2}
SELECTION = {"categories": ["operator"], "families": ["ceil_div", "percent", "ring"]}
FEW = {"num_demonstrations": 4, "code_tokens": 300, "drill_tokens": 80}
OLD_LADDER = SIZES | FEW | {"selection": SELECTION, "habits": {"looks": 0.7}, "endings": 0.3}
OLD_TRAIL = SIZES | {
    "num_demonstrations": 30, "drill_tokens": 0,
    "trail": {"num_stops": 3, "num_names": 2, "habits": {"drops": 0.1}},
    "limits": {"num_turns_max": 9, "num_tokens_max": 512, "turn_tokens_max": 96},
}  # fmt: skip


def written(folder, **tables):
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(NEW | tables))
    return path


def made_of(config):
    sources = [(one.name, one.make.partition(":")[2], one.settings) for one in config.sources]
    return sources, config.corpora.make.partition(":")[2], config.corpora.settings


def test_the_ladder_was_the_default(tmp_path):
    config = load_config(written(tmp_path, prepare={}))
    expected = ([("ladder", "ladder_tasks", {"prefix": ""})], "ladder_corpora", {"selection": {}})
    assert made_of(config.prepare) == expected


def test_settings_of_the_ladder_are_those_of_its_own_code(tmp_path):
    config = load_config(written(tmp_path, prepare=OLD_LADDER))
    sources, make, settings = made_of(config.prepare)
    assert sources == [("ladder", "ladder_tasks", SELECTION | {"prefix": ""})]
    assert make == "ladder_corpora"
    expected = FEW | {"selection": SELECTION, "habits": {"looks": 0.7}, "endings": 0.3}
    assert settings == expected


def test_sources_of_the_old_kinds_and_trails(tmp_path):
    old = [
        {"name": "easy", "kind": "ladder", "weight": 3.0},
        {"name": "long", "kind": "trail", "trail": {"num_stops": 4}},
        {"name": "mined", "kind": "folder", "path": "tasks"},
    ]
    config = load_config(written(tmp_path, prepare={"sources": old, "selection": SELECTION}))
    sources, make, _ = made_of(config.prepare)
    assert sources == [
        ("easy", "ladder_tasks", SELECTION), ("long", "trail_tasks", {"num_stops": 4}),
        ("mined", "", {}),
    ]  # fmt: skip
    assert make == "ladder_corpora" and config.prepare.sources[0].weight == 3.0
    config = load_config(written(tmp_path, prepare=OLD_TRAIL))
    sources, make, settings = made_of(config.prepare)
    assert sources == [("trail", "trail_tasks", OLD_TRAIL["trail"] | {"prefix": ""})]
    assert make == "trail_corpora" and settings["trail"] == OLD_TRAIL["trail"]


@pytest.mark.parametrize("prepare", [OLD_LADDER, OLD_TRAIL], ids=["ladder", "trail"])
def test_an_old_run_can_still_be_prepared(tmp_path, prepare):
    config = load_config(written(tmp_path, prepare=prepare), ["trainer.midtrain.uses_cache=false"])
    assert set(preparing.TASK_KEYS) <= set(preparing.build(config, threading.Event()))


def test_old_users_are_the_quickstart_s_and_new_runs_name_theirs(tmp_path):
    path = written(tmp_path, users={"num_requests": 2})
    assert load_config(path).users.run == "penstock.examples.quickstart:users"
    with pytest.raises(ConfigError, match=r"users\.run: expected own code"):
        parse_new(read_toml(path), "test")


def test_what_is_new_already_stays():
    assert with_present_prepare(dict(NEW)) == NEW


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ({}, r"prepare\.sources: expected a source of tasks"),
        ({"tasks": "folder"}, r"prepare\.corpora: expected own code"),
        ({"selection": SELECTION}, "unknown field `selection`"),
    ],
)
def test_a_new_run_says_what_it_starts_from(prepare, message):
    with pytest.raises(ConfigError, match=message):
        parse_new(NEW | {"prepare": prepare}, "test")
