"""Backends are opened by name and declare what they can do, and never stand in for another."""

import logging

import pytest

from penstock.envs import backends as registry
from penstock.envs.backends import EXPERIMENTAL, backend_class, backends, open_backend
from penstock.envs.sandbox import BackendUnavailable, Capability, CapabilityMissing, require


def test_nothing_stands_in_for_what_is_missing():
    with pytest.raises(CapabilityMissing, match="'uml' has no checkpoint"):
        require(backend_class("uml"), [Capability.CHECKPOINT])
    with pytest.raises(BackendUnavailable, match=r"choose one of .*experimental: firecracker"):
        open_backend("xen")


@pytest.mark.parametrize("name", sorted(backends))
def test_an_experimental_backend_warns_when_it_is_opened(name, monkeypatch, caplog):
    monkeypatch.setattr(registry, "backend_class", lambda name: lambda **_: name)
    with caplog.at_level(logging.WARNING):
        assert open_backend(name, allow_process=True) == name
    assert ("experimental" in caplog.text) == (name in EXPERIMENTAL)


def test_each_backend_declares_itself():
    for name in backends:
        declared = backend_class(name)
        assert declared.name == name
        assert Capability.COLD_BOOT in declared.capabilities
        assert (Capability.FORK in declared.capabilities) == hasattr(declared, "restore")
