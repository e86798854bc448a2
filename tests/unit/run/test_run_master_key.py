"""The key under which users' content keys are wrapped: one file for all hosts of a run."""

import pytest
from tests.e2e.launched import TINY

from penstock.infra.run.hosts import check_remote
from penstock.infra.run.runs import RunDir, master_key
from penstock.messages.errors import ConfigError

REACH = f"""
base = "{TINY}"
[bus]
servers = ["nats://10.0.0.1:4222"]
[store]
kind = "jetstream"
"""


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "r1"
    folder.mkdir()
    (folder / "config.toml").write_text(REACH)
    return RunDir(folder)


def test_two_hosts_that_name_one_file_have_one_key(run, tmp_path):
    shared = tmp_path / "shared"
    shared.write_text("5e" * 32 + "\n")
    own = master_key(run)
    assert own == master_key(run) and (run.path / "master_key").exists()
    run.config.write_text(REACH + f'master_key_file = "{shared}"\n')
    assert master_key(run) == bytes.fromhex("5e" * 32) != own


@pytest.mark.parametrize("text", [None, "short", "5E" * 32])
def test_a_file_that_holds_no_key_is_refused_and_never_made(run, tmp_path, text):
    shared = tmp_path / "shared"
    if text is not None:
        shared.write_text(text)
    run.config.write_text(REACH + f'master_key_file = "{shared}"\n')
    with pytest.raises(ConfigError, match=r"store\.master_key_file: .*shared"):
        master_key(run)
    assert shared.exists() == (text is not None)


@pytest.mark.parametrize("role", ["trainer", "gateway", "gateway:b"])
def test_roles_that_read_content_need_it_on_a_host_of_their_own(run, monkeypatch, role):
    monkeypatch.setattr("penstock.infra.run.hosts.check_stores", lambda config: None)
    with pytest.raises(ConfigError, match=rf"store\.master_key_file: role {role}"):
        check_remote(run, [role])
    check_remote(run, ["rollout_worker"])
