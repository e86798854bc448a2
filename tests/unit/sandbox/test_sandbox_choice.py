"""Backends are chosen by what they declare, in one order, and never in silence."""

import pytest

from penstock.envs import backends as registry
from penstock.envs.backends import backend_class, backends, choose_backend
from penstock.envs.sandbox import BackendUnavailable, Capability, CapabilityMissing, require


@pytest.fixture
def opened(monkeypatch):
    """Opening yields the class itself: what is asked here is only which."""
    monkeypatch.setattr(registry, "open_backend", lambda name, **options: backend_class(name))


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("wanted", "available", "chosen"),
    [
        ([], {"firecracker", "uml", "qemu-tcg"}, "firecracker"),
        ([], {"uml", "qemu-tcg", "process"}, "uml"),
        ([Capability.FORK], {"uml", "qemu-tcg"}, "qemu-tcg"),
        ([Capability.CHECKPOINT], {"uml", "qemu-tcg", "qemu-kvm"}, "qemu-kvm"),
    ],
)
def test_the_first_that_can_do_it_all_is_taken(wanted, available, chosen):
    assert choose_backend(wanted, available).name == chosen


@pytest.mark.usefixtures("opened")
def test_nothing_stands_in_for_what_is_missing():
    with pytest.raises(BackendUnavailable, match="fork"):
        choose_backend([Capability.FORK], {"uml", "process"})
    with pytest.raises(BackendUnavailable, match="kernel of its own"):
        choose_backend([], {"process"})
    with pytest.raises(CapabilityMissing, match="'uml' has no checkpoint"):
        require(backend_class("uml"), [Capability.CHECKPOINT])


def test_each_backend_declares_itself():
    for name in backends:
        declared = backend_class(name)
        assert declared.name == name
        assert Capability.COLD_BOOT in declared.capabilities
        assert (Capability.FORK in declared.capabilities) == hasattr(declared, "restore")
