"""Configurations of former releases are read under the present names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.config.file import apply_overrides, load_config, read_toml
from penstock.infra.config.former_names import present_key, present_role, with_present_names
from penstock.messages.errors import ConfigError

FORMER = """
regions = [{ name = "here", serves = ["train", "eval", "live"] }]
[processes]
trainer = ["trainer"]
generator = ["generator:here"]
machines = ["sandbox:a", "judge", "rollout_worker"]
control = ["pacer", "evaluator", "feedback_join", "relay:here"]
[prepare]
tasks = "tasks"
[sandbox]
quota = 9
[pool]
live_max = 7
[feedback_join]
reward_wait_s = 3.0
[weights]
num_publisher_ranks = 1
"""
PRESENT = (
    FORMER.replace("[sandbox]", "[sandbox_host]")
    .replace("[pool]", "[sandbox_host.pool]")
    .replace("feedback_join", "feedback")
    .replace("sandbox:a", "sandbox_host:a")
    .replace("[weights]", "[relay]")
)


def test_a_former_file_is_the_present_one(tmp_path):
    (tmp_path / "former.toml").write_text(FORMER)
    (tmp_path / "present.toml").write_text(PRESENT)
    former, present = (load_config(tmp_path / f"{name}.toml") for name in ("former", "present"))
    assert former == present
    assert (former.sandbox_host.quota, former.sandbox_host.pool.live_max) == (9, 7)
    assert former.processes["machines"][0] == "sandbox_host:a"


def test_a_file_may_stand_over_a_former_base_and_former_overrides_over_both(tmp_path):
    (tmp_path / "base.toml").write_text(FORMER)
    (tmp_path / "own.toml").write_text('base = "base.toml"\n[sandbox_host.pool]\nlive_max = 8\n')
    assert load_config(tmp_path / "own.toml").sandbox_host.pool.live_max == 8
    data = apply_overrides(read_toml(tmp_path / "own.toml"), ["pool.live_max=9"])
    assert data["sandbox_host"]["pool"]["live_max"] == 9


@pytest.mark.parametrize(
    "tables",
    [
        {"pool": {"size": 1}, "sandbox_host": {"pool": {"size": 2}}},
        {"feedback": {"late_s_max": 1.0}, "feedback_join": {"late_s_max": 1.0}},
        {"sandbox": 3, "sandbox_host": {}},
    ],
)
def test_a_setting_under_both_names_is_refused_by_name(tables):
    with pytest.raises(ConfigError, match="its present name"):
        with_present_names(tables)


def test_two_names_of_one_section_add_up_and_the_tables_given_stay():
    tables = {"sandbox": {"quota": 1}, "sandbox_host": {"host": "a"}, "pool": {"size": 2}}
    found = with_present_names(tables)
    assert found == {"sandbox_host": {"host": "a", "quota": 1, "pool": {"size": 2}}}
    assert tables["sandbox_host"] == {"host": "a"}


@given(st.text(max_size=12))
def test_renaming_twice_is_renaming_once(text):
    assert present_role(present_role(text)) == present_role(text)
    assert present_key(present_key(text)) == present_key(text)


def test_former_publishing_ranks_are_ignored_by_readers_and_refused_by_a_start(tmp_path):
    file = tmp_path / "former.toml"
    file.write_text(
        FORMER.replace("ranks = 1", "ranks = 2").replace(
            "[prepare]", 'publisher-0 = ["publisher:0"]\npublisher-1 = ["publisher:1"]\n[prepare]'
        )
    )
    assert load_config(file).processes.keys() == {"trainer", "generator", "machines", "control"}
    with pytest.raises(ConfigError, match=r"relay\.num_publisher_ranks: no longer a setting"):
        load_config(file, is_start=True)
    file.write_text(FORMER.replace("num_publisher_ranks", "other"))
    with pytest.raises(ConfigError, match="unknown field `relay`"):
        load_config(file)


def test_plain_text_of_an_older_run_is_read_and_refused_by_a_start(tmp_path):
    file = tmp_path / "former.toml"
    file.write_text(FORMER + '[gateway]\nhost = "0.0.0.0"\n')
    assert load_config(file).gateway.host == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"gateway\.host: expected TLS"):
        load_config(file, is_start=True)
    file.write_text(
        FORMER.replace('"live"] }', '"live"], bucket = "b", endpoint = "http://minio:9000" }')
    )
    assert load_config(file).region("here").bucket == "b"
    with pytest.raises(ConfigError, match=r"regions\.here\.endpoint: expected TLS"):
        load_config(file, is_start=True)
