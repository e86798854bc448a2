"""The sandbox backends; each is imported when it is opened, so listing is free.

No backend silently replaces another: one is opened by name, or the first with all capabilities.
To add one: a line in `backends`, in the order of preference.
"""

import importlib
from collections.abc import Container, Iterable
from typing import Any

from penstock.envs.sandbox import BackendUnavailable, Capability, SandboxBackend

backends: dict[str, str] = {
    "firecracker": "penstock.envs.microvm.firecracker.backend:FirecrackerBackend",
    "qemu-kvm": "penstock.envs.microvm.qemu.backend:QemuKvmBackend",
    "uml": "penstock.envs.microvm.uml:UmlBackend",
    "qemu-tcg": "penstock.envs.microvm.qemu.backend:QemuTcgBackend",
    "process": "penstock.envs.microvm.process:ProcessBackend",
}
"""Name -> "module:class", in the order of preference."""


def open_backend(name: str, *, allow_process: bool = False, **options: Any) -> SandboxBackend:
    """Return the backend called `name`.

    Args:
        name: A key of `backends`.
        allow_process: Must be set for `process`, which is no boundary against hostile code.
        options: Passed to the backend's class.

    Raises:
        BackendUnavailable: No such backend, it is not installed, or it was not allowed.

    """
    if name not in backends:
        raise BackendUnavailable(f"sandbox backend {name!r}: choose one of {sorted(backends)}")
    if name == "process" and not allow_process:
        raise BackendUnavailable(
            "sandbox backend 'process' shares the host's kernel with the guest's code; "
            "allow it explicitly (allow_process=True), or use 'uml'"
        )
    backend: SandboxBackend = backend_class(name)(**options)
    return backend


def backend_class(name: str) -> Any:
    """Return the class of a backend; its declarations can be read without opening it."""
    module, _, cls = backends[name].partition(":")
    return getattr(importlib.import_module(module), cls)


def choose_backend(
    required: Iterable[Capability], available: Container[str], **options: Any
) -> SandboxBackend:
    """Return the first backend, in the order of `backends`, that has all of `required`.

    Args:
        required: What the machines must be able to do.
        available: Names of backends that were seen to work here (`penstock doctor`, `probe`).
        options: Passed to the backend's class.

    Raises:
        BackendUnavailable: None of them has all of it. `process` is never chosen.

    """
    needed = frozenset(required)
    for name in backends:
        if name in available and name != "process" and needed <= backend_class(name).capabilities:
            return open_backend(name, **options)
    words = ", ".join(sorted(needed)) or "a kernel of its own"
    raise BackendUnavailable(f"no sandbox backend that works here has {words}")
