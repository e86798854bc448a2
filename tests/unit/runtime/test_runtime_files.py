"""Files that settings name: bounded, and refused by name where their reading may never end."""

import os

import pytest

from penstock.actors.judge.rubric.config import EndpointConfig
from penstock.actors.judge.rubric.endpoint import read_key
from penstock.actors.runtime.files import read_secret, read_small
from penstock.messages.errors import ConfigError


def test_a_pipe_a_device_and_a_long_file_are_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(bytes(11))
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(ConfigError, match=rf"^{path}: expected a file, got a folder, a pipe"):
            read_small(type(tmp_path)(path), 10)
    with pytest.raises(ConfigError, match="long: expected at most 10 bytes"):
        read_small(tmp_path / "long", 10)
    with pytest.raises(ConfigError, match="none: No such file"):
        read_small(tmp_path / "none", 10)
    (tmp_path / "link").symlink_to(tmp_path / "long")
    assert read_small(tmp_path / "link", 11) == bytes(11), "as Kubernetes mounts secrets"


def test_keys_and_secrets_in_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    endpoint = EndpointConfig(url="https://x", model="m", key_file=str(tmp_path / "pipe"))
    with pytest.raises(ConfigError, match=r"judge\.judges\.endpoint\.key_file .*a pipe"):
        read_key(endpoint, {})
    with pytest.raises(ConfigError, match="a pipe"):
        read_secret(tmp_path / "pipe")
