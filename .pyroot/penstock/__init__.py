"""Penstock: reinforcement learning for coding agents as typed events on durable streams.

`penstock.infra.api.names` lists what this package offers programs; each name is imported when it
is first used.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from penstock.infra.api.names import NAMES

    if name not in NAMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    module, attribute = NAMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    from penstock.infra.api.names import NAMES

    return sorted([*globals(), *NAMES])
