"""The fields of Harbor's `task.toml`, schema 1.4: each acts, or is refused by its name.

What has no effect here is accepted only where it has none in an episode either: who wrote a task,
its keywords, how long its image may take to build.

Source: `TaskConfig` of Harbor 0.25.0.
"""

import math
import re
from typing import Annotated, Any, Literal

import msgspec

from penstock.messages.errors import PenstockError

AGENT_S_MAX = 86_400.0
"""Longest, and that of a task that names no limit: Harbor's default is none."""
VERIFIER_S = 600.0
"""Harbor's default."""
WORK_FOLDERS = ("/app", "/work")
_NetworkMode = Literal["no-network", "public", "allowlist"]
_PackageName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
]
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?\Z", re.DOTALL)
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`\Z", re.DOTALL)
_SIZE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)([GMKgmk])\s*")
_PORTS = (443, 80)
"""An allowed host of Harbor's has no port."""


class HarborFieldError(PenstockError, ValueError):
    """A field of `task.toml` has a wrong value, or one that no machine here can give."""


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


class _Verifier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout_sec: Any = VERIFIER_S
    env: dict[str, str] = {}
    user: Any = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Any = None
    collect: list[Any] = []
    network_mode: _NetworkMode | None = None
    allowed_hosts: list[str] | None = None


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
    """All of them."""

    version: str | None = None
    schema_version: str | None = None
    task: _Package | None = None
    metadata: dict[str, Any] = {}
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[Any] | None = None
    artifacts: list[Any] = []

    @property
    def agent_s(self) -> float:
        """How long the programs of an episode may run, in seconds."""
        return _seconds(self.agent.timeout_sec, "agent.timeout_sec", AGENT_S_MAX, AGENT_S_MAX)

    @property
    def verifier_s(self) -> float:
        """How long the verifier may run, in seconds."""
        return _seconds(self.verifier.timeout_sec, "verifier.timeout_sec", VERIFIER_S, 3_600.0)

    @property
    def machine(self) -> dict[str, int]:
        """What the machine must have, by the names of `MachineNeeds`."""
        given = self.environment
        sizes = {
            "memory_mib": _size_mib(given.memory_mb, given.memory, "memory"),
            "disk_mib": _size_mib(given.storage_mb, given.storage, "storage"),
            "processors": None if given.cpus is None else _ceiling(given.cpus),
        }
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def egress(self) -> list[str]:
        """The hosts that an episode may reach, as rules of `envs/egress/rules.py`."""
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


def parse_fields(settings: dict[str, Any]) -> HarborFields:
    """Return the fields of a task's settings.

    Raises:
        HarborFieldError: A field is unknown, of a wrong type, or asks for what no machine has.

    """
    try:
        fields = msgspec.convert(settings, HarborFields)
    except (msgspec.ValidationError, RecursionError) as error:
        raise HarborFieldError(_named(str(error))) from error
    refusals = _refusals(fields)
    for field, (is_asked, text) in refusals.items():
        if is_asked:
            raise HarborFieldError(f"{field}: {text}")
    return fields


def _refusals(fields: HarborFields) -> dict[str, tuple[object, str]]:
    """Return what is refused where it is asked for: field -> whether it is, and why."""
    agent, verifier, environment = fields.agent, fields.verifier, fields.environment
    user = "expected none: everything runs as the machine's own user"
    hosts = "expected with network_mode = 'allowlist' alone"
    return {
        "steps": (fields.steps, "expected none: an episode has one instruction and one verifier"),
        "multi_step_reward_strategy": (fields.multi_step_reward_strategy, "expected with steps"),
        "artifacts": (fields.artifacts, "expected none: only files of /app leave a machine"),
        "solution.env": (fields.solution.env, "expected none: solve.sh gets no variables"),
        "agent.user": (agent.user is not None, user),
        "agent.allowed_hosts": (
            agent.allowed_hosts is not None and agent.network_mode != "allowlist", hosts
        ),
        "verifier.user": (verifier.user is not None, user),
        "verifier.environment_mode": (
            verifier.environment_mode == "separate",
            "expected 'shared': for a verifier apart from the code, metadata.penstock.separated",
        ),
        "verifier.environment": (
            verifier.environment is not None, "expected none: it runs in the task's own image"
        ),
        "verifier.collect": (verifier.collect, "expected none: there are no compose services"),
        "verifier.network_mode": (
            verifier.network_mode in {"public", "allowlist"},
            "expected 'no-network': verifiers have no network",
        ),
        "verifier.allowed_hosts": (verifier.allowed_hosts is not None, "expected none"),
        "environment.os": (environment.os.lower() != "linux", "expected 'linux'"),
        "environment.gpus": (environment.gpus, "expected none: no machine has one"),
        "environment.gpu_types": (environment.gpu_types, "expected none: no machine has one"),
        "environment.tpu": (environment.tpu is not None, "expected none: no machine has one"),
        "environment.mcp_servers": (environment.mcp_servers, "expected none: agents have none"),
        "environment.env": (environment.env, "expected none: tools set no variables"),
        "environment.skills_dir": (environment.skills_dir, "expected none: agents read no skills"),
        "environment.healthcheck": (
            environment.healthcheck is not None, "expected none: nothing is started in a machine"
        ),
        "environment.workdir": (
            environment.workdir not in {None, *WORK_FOLDERS},
            f"expected one of {', '.join(WORK_FOLDERS)}, which are one folder",
        ),
        "environment.allowed_hosts": (
            environment.allowed_hosts is not None and environment.network_mode != "allowlist", hosts
        ),
    }  # fmt: skip


def _named(error: str) -> str:
    """Return a decoder's error with the field first."""
    if found := _UNKNOWN.match(error):
        place = f"{found[2]}." if found[2] else ""
        return f"{place}{found[1]}: no field of Harbor 1.4"
    if found := _PLACE.match(error):
        return f"{found[2]}: {found[1]}"
    return error


def _seconds(value: Any, field: str, default: float, maximum: float) -> float:
    if value is None and default == maximum:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= maximum:
        raise HarborFieldError(f"{field}: expected seconds, 0 < x <= {maximum:g}, got {value!r}")
    return float(value)


def _size_mib(mebibytes: int | None, text: str | None, name: str) -> int | None:
    """Return a size that is given as a number, or as a text such as `2G`, which is older."""
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
