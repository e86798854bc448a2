"""Registry of sandbox backends, which opens them by name.

A backend's module is imported only when the backend is opened, so listing them is cheap. No backend
silently stands in for another one. To add a backend, add a line to `backends`.
"""

import importlib
import logging
from typing import Any

from penstock.envs.sandbox import BackendUnavailable, SandboxBackend

log = logging.getLogger(__name__)

backends: dict[str, str] = {
    "firecracker": "penstock.envs.microvm.firecracker.backend:FirecrackerBackend",
    "qemu-kvm": "penstock.envs.microvm.qemu.backend:QemuKvmBackend",
    "uml": "penstock.envs.microvm.uml:UmlBackend",
    "qemu-tcg": "penstock.envs.microvm.qemu.backend:QemuTcgBackend",
    "process": "penstock.envs.microvm.process:ProcessBackend",
}
"""Backend name -> "module:class"."""
EXPERIMENTAL: dict[str, str] = {"firecracker": "has never driven a real Firecracker"}
"""Backend name -> reason not to rely on that backend yet."""


def open_backend(name: str, *, allow_process: bool = False, **options: Any) -> SandboxBackend:
    """Return the backend called `name`.

    Args:
        name: Key of `backends`.
        allow_process: Consent to `process`, which does not contain hostile code.
        options: Keyword arguments of the backend's class.

    Raises:
        BackendUnavailable: The backend is unknown, not installed, or not allowed.

    """
    if name not in backends:
        raise BackendUnavailable(
            f"sandbox backend {name!r} is unknown: choose one of {sorted(backends)} "
            f"(experimental: {', '.join(EXPERIMENTAL)})"
        )
    # Explicit consent: code that breaks out of its namespaces attacks the host's kernel directly.
    if name == "process" and not allow_process:
        raise BackendUnavailable(
            "sandbox backend 'process' runs guest code on the host's kernel: "
            "allow it explicitly (allow_process=True), or use 'uml'"
        )
    backend: SandboxBackend = backend_class(name)(**options)
    if name in EXPERIMENTAL:
        log.warning("sandbox backend %r is experimental: it %s", name, EXPERIMENTAL[name])
    return backend


def backend_class(name: str) -> Any:
    """Return the class of a backend, whose declarations can be read without opening it."""
    module, _, cls = backends[name].partition(":")
    return getattr(importlib.import_module(module), cls)
