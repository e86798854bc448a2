"""Harbor's `task.toml`, schema 1.4: its fields, and the values of those with an effect.

Source: `TaskConfig` of Harbor 0.25.0.
"""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from penstock.messages.errors import PenstockError

AGENT_S_MAX = 86_400.0
"""Maximum, and the limit of a task that names none, since Harbor has no default."""
VERIFIER_S = 600.0
"""Default of Harbor."""
STEPS_MAX = 32
_NetworkMode = Literal["no-network", "public", "allowlist"]
_PackageName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
]
_SIZE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)([GMKgmk])\s*")
_PORTS = (443, 80)
"""An allowed host of Harbor's has no port."""
_HOSTS = (
    *("pypi.org", "files.pythonhosted.org", "registry.npmjs.org", "deb.debian.org"),
    *("security.debian.org", "archive.ubuntu.com", "security.ubuntu.com", "astral.sh"),
    *("github.com", "*.githubusercontent.com", "static.crates.io", "index.crates.io"),
    *("proxy.golang.org", "sum.golang.org"),
)
INTERNET = tuple(f"{host}:{port}" for host in _HOSTS for port in _PORTS)
"""What a task may reach that asks for the internet and names no hosts: registries of packages."""


class HarborFieldError(PenstockError, ValueError):
    """A field of `task.toml` has a wrong value, or one that no machine can satisfy."""


class _Author(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    email: str | None = None


class _Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _PackageName | None = None
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
        memory_mib = _size_mib(given.memory_mb, given.memory, "memory")
        _size_mib(given.storage_mb, given.storage, "storage")
        _check_finite(given.cpus or 0)
        return {} if memory_mib is None else {"memory_mib": memory_mib}

    def egress(self, internet: Sequence[str]) -> list[str]:
        """Return the hosts that an episode may reach, as rules of `envs/egress/rules.py`.

        Args:
            internet: Those that stand for the internet.

        """
        given = self.environment
        mode, hosts = given.network_mode, given.allowed_hosts
        if mode is None and given.allow_internet:
            mode = "public"
        if self.agent.network_mode is not None:
            mode, hosts = self.agent.network_mode, self.agent.allowed_hosts
        return _rules(mode, hosts, internet)

    def verifier_egress(self, internet: Sequence[str]) -> list[str]:
        """Return the hosts that the verifier may reach: its own, else those of the environment."""
        given, own = self.environment, self.verifier
        mode, hosts = given.network_mode, given.allowed_hosts
        if mode is None and given.allow_internet:
            mode = "public"
        if own.network_mode is not None:
            mode, hosts = own.network_mode, own.allowed_hosts
        return _rules(mode, hosts, internet)

    @property
    def adapted(self) -> list[str]:
        """What is kept without effect, or has another one here than in a container."""
        given = self.environment
        sizes = {"cpus": given.cpus, "storage_mb": given.storage_mb, "storage": given.storage}
        told = {
            "cpus": "a limit: machines have the processors that their host gives",
            "storage_mb": "a limit: written files may take 70% of the machine's memory",
        }
        told["storage"] = told["storage_mb"]
        return [f"environment.{name}: {told[name]}" for name, value in sizes.items() if value]


def _rules(mode: str | None, hosts: list[str] | None, internet: Sequence[str]) -> list[str]:
    if mode == "public":
        return list(internet)
    names = [host.strip().lower().rstrip(".") for host in hosts or []]
    return [f"{name}:{port}" for name in names for port in _PORTS] if mode == "allowlist" else []


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


def _check_finite(value: float) -> None:
    if not math.isfinite(value):
        raise HarborFieldError(f"environment.cpus: expected a finite number, got {value}")
