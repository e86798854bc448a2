"""Harbor's `task.toml`, schema 1.4: its fields, and the values of those with an effect.

Source: `TaskConfig` of Harbor 0.25.0.
"""

import math
import re
from typing import Annotated, Any, Literal

import msgspec

from penstock.messages.errors import PenstockError

AGENT_S_MAX = 86_400.0
"""Maximum, and the limit of a task that names none, since Harbor has no default."""
VERIFIER_S = 600.0
"""Default of Harbor."""
STEPS_MAX = 32
WORK_FOLDERS = ("/app", "/work")
_NetworkMode = Literal["no-network", "public", "allowlist"]
_PackageName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
]
_SIZE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)([GMKgmk])\s*")
_PORTS = (443, 80)
"""Ports of an allowed host, which has none in Harbor."""


class HarborFieldError(PenstockError, ValueError):
    """A field of `task.toml` has a wrong value, or one that no machine can satisfy."""


class _Author(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    email: str | None = None


class _Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _PackageName
    version: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    description: str = ""
    authors: list[_Author] = []
    keywords: list[str] = []


class _Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout_sec: Any = None
    user: Any = None
    network_mode: _NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class HarborVerifier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[verifier]` of the task or of a step."""

    timeout_sec: Any = VERIFIER_S
    env: dict[str, str] = {}
    user: Any = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Any = None
    collect: list[Any] = []
    network_mode: _NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class _StepVerifier(HarborVerifier, frozen=True, forbid_unknown_fields=True):
    timeout_sec: Any = None


class HarborStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `[[steps]]`."""

    name: str
    agent: _Agent = _Agent()
    verifier: _StepVerifier = _StepVerifier()
    min_reward: Any = None
    healthcheck: Any = None
    artifacts: list[Any] = []


class _Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: int | float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Any = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Any = None
    workdir: str | None = None
    network_mode: _NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None


class _Solution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    env: dict[str, str] = {}


class HarborFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All fields of `task.toml`."""

    version: str | None = None
    schema_version: str | None = None
    task: _Package | None = None
    metadata: dict[str, Any] = {}
    agent: _Agent = _Agent()
    verifier: HarborVerifier = HarborVerifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: Annotated[list[HarborStep], msgspec.Meta(max_length=STEPS_MAX)] | None = None
    artifacts: list[Any] = []

    @property
    def agent_s(self) -> float:
        """Maximum seconds that an episode's programs may run, over all steps."""
        field = "agent.timeout_sec"
        task_s = _seconds(self.agent.timeout_sec, field, AGENT_S_MAX, AGENT_S_MAX)
        given = [(n, step.agent.timeout_sec) for n, step in enumerate(self.steps or [])]
        each = [
            task_s if value is None else _seconds(value, f"steps[{n}].{field}", 0, AGENT_S_MAX)
            for n, value in given
        ]
        return min(sum(each), AGENT_S_MAX) if each else task_s

    @property
    def verifier_s(self) -> float:
        """Maximum seconds of the verifier."""
        return _seconds(self.verifier.timeout_sec, "verifier.timeout_sec", VERIFIER_S, 3_600.0)

    def step_verifier_s(self, step: int) -> float:
        """Return the maximum seconds of a step's verifier, by default the task's."""
        value = self._step(step).verifier.timeout_sec
        field = f"steps[{step}].verifier.timeout_sec"
        return self.verifier_s if value is None else _seconds(value, field, 0, 3_600.0)

    def min_reward(self, step: int) -> float | None:
        """Return the minimum reward of a step for later steps to count; None for any."""
        value = self._step(step).min_reward
        if isinstance(value, dict) and value.keys() == {"reward"}:
            value = value["reward"]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9:
            text = "expected a number, or one under the key 'reward': a step has one reward here"
            raise HarborFieldError(f"steps[{step}].min_reward: {text}, got {value!r}")
        return float(value)

    def _step(self, step: int) -> HarborStep:
        assert self.steps, "asked for a task of several steps"
        return self.steps[step]

    @property
    def machine(self) -> dict[str, int]:
        """Required size of the machine, by the names of `MachineNeeds`."""
        given = self.environment
        sizes = {
            "memory_mib": _size_mib(given.memory_mb, given.memory, "memory"),
            "disk_mib": _size_mib(given.storage_mb, given.storage, "storage"),
            "processors": None if given.cpus is None else _ceiling(given.cpus),
        }
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def egress(self) -> list[str]:
        """Hosts that an episode may reach, as rules of `envs/egress/rules.py`."""
        table, given = "environment", self.environment
        mode, hosts = given.network_mode, given.allowed_hosts
        if mode is None and given.allow_internet:
            text = "expected false: machines have no network but the hosts of an allow-list"
            raise HarborFieldError(f"environment.allow_internet: {text}")
        if self.agent.network_mode is not None:
            table, mode, hosts = "agent", self.agent.network_mode, self.agent.allowed_hosts
        if mode == "public":
            text = "expected 'no-network' or 'allowlist': no machine here has a network"
            raise HarborFieldError(f"{table}.network_mode: {text}, got 'public'")
        if mode != "allowlist":
            return []
        names = [host.strip().lower().rstrip(".") for host in hosts or []]
        return [f"{name}:{port}" for name in names for port in _PORTS]


def _seconds(value: Any, field: str, default: float, maximum: float) -> float:
    if value is None and default == maximum:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= maximum:
        raise HarborFieldError(f"{field}: expected seconds, 0 < x <= {maximum:g}, got {value!r}")
    return float(value)


def _size_mib(mebibytes: int | None, text: str | None, name: str) -> int | None:
    """Return a size given as a number, or in the older form of a text such as `2G`."""
    if text is None:
        return mebibytes
    found = _SIZE.fullmatch(text)
    if found is None:
        raise HarborFieldError(f"environment.{name}: expected a size such as '2G', got {text!r}")
    size = int(float(found[1]) * {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[found[2].upper()])
    if mebibytes not in {None, size}:
        text = f"expected the same as {name}_mb, {mebibytes} MiB, got {size}"
        raise HarborFieldError(f"environment.{name}: {text}")
    return size


def _ceiling(value: float) -> int:
    if not math.isfinite(value):
        raise HarborFieldError(f"environment.cpus: expected a finite number, got {value}")
    return math.ceil(value)
