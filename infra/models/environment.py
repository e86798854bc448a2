"""Which Python runs a process: the run's own, or that of the generators' engine."""

import sys
from collections.abc import Iterable
from pathlib import Path

from penstock.actors.generator.config import GeneratorConfig
from penstock.messages.errors import ConfigError

VLLM_ENVIRONMENTS = {"cpu": ".venv-vllm", "cuda": ".venv-gpu"}
"""By device; `make vllm-env` and `make gpu-env` make them."""


def python_of(settings: GeneratorConfig, specs: Iterable[str]) -> str:
    """Return the interpreter of a process with these roles."""
    default = VLLM_ENVIRONMENTS[settings.device] if settings.engine == "vllm" else ""
    folder = settings.environment or default
    has_engine = any(spec.partition(":")[0] == "generator" for spec in specs)
    return str(Path(folder).absolute() / "bin/python") if folder and has_engine else sys.executable


def check_environments(settings: GeneratorConfig, processes: Iterable[Iterable[str]]) -> None:
    """Check that the interpreters of processes that are to run here exist.

    Raises:
        ConfigError: One does not.

    """
    for specs in processes:
        python = python_of(settings, specs)
        if not Path(python).exists():
            raise ConfigError(
                "generator.environment: expected a virtual environment with vLLM (make vllm-env, on"
                f" a GPU make gpu-env), found no {python}"
            )
