"""The sandbox backends; each is imported when it is opened, so listing is free.

No backend silently replaces another: one is opened by name. To add one: a line in `backends`.
"""

import importlib
import logging
from typing import Any

from penstock.envs.sandbox import BackendUnavailable, SandboxBackend

_log = logging.getLogger(__name__)

backends: dict[str, str] = {
    "firecracker": "penstock.envs.microvm.firecracker.backend:FirecrackerBackend",
    "qemu-kvm": "penstock.envs.microvm.qemu.backend:QemuKvmBackend",
    "uml": "penstock.envs.microvm.uml:UmlBackend",
    "qemu-tcg": "penstock.envs.microvm.qemu.backend:QemuTcgBackend",
    "process": "penstock.envs.microvm.process:ProcessBackend",
}
"""Name -> "module:class"."""
EXPERIMENTAL: dict[str, str] = {"firecracker": "has never driven a real Firecracker"}
"""Name -> the reason not to rely on it yet."""


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
        raise BackendUnavailable(
            f"sandbox backend {name!r}: choose one of {sorted(backends)} "
            f"(experimental: {', '.join(EXPERIMENTAL)})"
        )
    if name == "process" and not allow_process:
        raise BackendUnavailable(
            "sandbox backend 'process' shares the host's kernel with the guest's code; "
            "allow it explicitly (allow_process=True), or use 'uml'"
        )
    backend: SandboxBackend = backend_class(name)(**options)
    if name in EXPERIMENTAL:
        _log.warning("sandbox backend %r is experimental: it %s", name, EXPERIMENTAL[name])
    return backend


def backend_class(name: str) -> Any:
    """Return the class of a backend; its declarations can be read without opening it."""
    module, _, cls = backends[name].partition(":")
    return getattr(importlib.import_module(module), cls)
