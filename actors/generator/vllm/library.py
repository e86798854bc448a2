"""vLLM, imported when it is needed: an environment without it never gets here."""

import importlib
from typing import Any

from penstock.messages.errors import ConfigError


def of_vllm(name: str) -> Any:
    """Return something of vLLM's by its full name, e.g. `v1.outputs.SamplerOutput`.

    Raises:
        ConfigError: vLLM is not installed, or is another version than the one that is pinned.

    """
    module, _, attribute = f"vllm.{name}".rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        text = "expected vLLM as `make vllm-env` installs it in the generator's environment"
        raise ConfigError(f"generator.engine vllm: {text}: {error}") from error
