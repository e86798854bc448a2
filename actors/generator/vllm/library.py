"""Lazy import of vLLM, so that environments without it can import the other modules."""

import importlib
from typing import Any

from penstock.messages.errors import ConfigError


def import_from_vllm(name: str) -> Any:
    """Import an object of vLLM by its full name, e.g. `v1.outputs.SamplerOutput`.

    Raises:
        ConfigError: vLLM is not installed, or its version is not the pinned one.

    """
    module, _, attribute = f"vllm.{name}".rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        text = "expected vLLM as `make vllm-env` installs it in the generator's environment"
        raise ConfigError(f"generator.engine vllm: {text}: {error}") from error
