"""Which processes of a run become which kind of workload."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from penstock.infra.config.regions import region_of_role
from penstock.infra.config.settings import RunConfig
from penstock.infra.run.hosts import check_apart
from penstock.infra.stores.settings import StoreKind
from penstock.messages.errors import ConfigError
from penstock.messages.task import Purpose

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
"""Part of a name of Kubernetes: an object's name has two of them, and a pod's a suffix."""
POD = "$(POD_NAME)"
"""Kubernetes puts the pod's name here."""
RANK = "$(RANK)"
RESERVED = (
    *("launcher", "config", "closed", "operator-key"),
    *("kustomization", "network-policies", "nats-values"),
)
"""Names that no process may have: of other objects and files."""
SHARED_ROLES = frozenset({"rollout_worker", "judge"})


class Kind(StrEnum):
    """Kinds of workload."""

    SINGLE = "single"
    """One pod: a Deployment."""
    SHARED = "shared"
    """Any number of pods, by their lag: a Deployment."""
    NODE = "node"
    """A pod on each node for sandboxes: a DaemonSet."""
    REPLICA = "replica"
    """Generators of a region: a StatefulSet, by queue time."""
    GATEWAY = "gateway"
    """A StatefulSet, because records of replies wait on disk for the log."""
    RANK = "rank"
    """All ranks of the trainer: a JobSet."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Pods that run the same command line."""

    name: str
    kind: Kind
    roles: list[str]
    """Arguments of `penstock actor`."""
    num_pods: int = 1
    """Number of pods at the start."""
    region: str = ""
    """Region, for generators; else empty."""

    @property
    def role_names(self) -> set[str]:
        """The roles without what follows the colon."""
        return {_role(spec) for spec in self.roles}

    def num_of(self, role: str) -> int:
        """Return how often a pod runs a role."""
        return sum(_role(spec) == role for spec in self.roles)


def workloads(config: RunConfig) -> list[Workload]:
    """Return the workloads of a run's processes, the launcher's left out.

    Raises:
        ConfigError: A table of the configuration cannot be deployed; the text names the field.

    """
    _check_tables(config)
    found = [*_generators(config), *_gateways(config), *_ranks(config)]
    for name, specs in config.processes.items():
        if not _is_grouped(specs, config):
            found.append(_workload(name, specs))
    names = Counter([*RESERVED, *(one.name for one in found)])
    for one in found:
        field = f"processes.{one.name}"
        check_label(one.name, field)
        if names[one.name] > 1:
            text = "expected another name: another workload or a file of the manifests has this one"
            raise ConfigError(f"{field}: {text}")
    return sorted(found, key=lambda one: one.name)


def check_label(name: str, field: str) -> None:
    """Check a part of a name of Kubernetes.

    Raises:
        ConfigError: It is none; the text begins with the field.

    """
    if LABEL.fullmatch(name) is None:
        expected = "expected at most 32 of a-z, 0-9 and '-', the first and last no '-'"
        raise ConfigError(f"{field}: {expected}, as names of Kubernetes are, got {name!r}")


def _check_tables(config: RunConfig) -> None:
    check_apart(config)
    if config.store.kind is not StoreKind.S3:
        text = f'expected "s3", as its size cannot be known before, got {config.store.kind.value!r}'
        raise ConfigError(f"store.kind: {text}")
    for region in config.regions:
        field = f"regions.{region.name}"
        if not region.bucket:
            text = "expected one: relay and generators of a region are in pods of their own"
            raise ConfigError(f"{field}.bucket: {text}")
    if config.users.num_requests:
        raise ConfigError("users.num_requests: expected 0: the launcher's pod has no gateway")
    roles = {_role(spec) for specs in config.processes.values() for spec in specs}
    if "gateway" in roles and config.gateway.is_local:
        text = f'expected "0.0.0.0", which a Service reaches, got {config.gateway.host!r}'
        raise ConfigError(f"gateway.host: {text}")
    if "gateway" in roles and not config.gateway.port:
        raise ConfigError("gateway.port: expected one for its Service, got 0")
    if roles & {"trainer", "gateway"} and not config.store.master_key_file:
        text = "expected a file: trainer and gateway have pods of their own, with the same key"
        raise ConfigError(f"store.master_key_file: {text}")


def _is_grouped(specs: Sequence[str], config: RunConfig) -> bool:
    """Whether a process is one of a group: generators, several gateways, ranks."""
    roles = {_role(spec) for spec in specs}
    return bool(roles & {"generator", "rank"}) or (
        "gateway" in roles and len(_entries(config, "gateway")) > 1
    )


def _entries(config: RunConfig, role: str) -> Mapping[str, list[str]]:
    return {
        name: specs
        for name, specs in config.processes.items()
        if any(_role(spec) == role for spec in specs)
    }


def _check_alone(name: str, specs: Sequence[str], why: str) -> None:
    if len(specs) > 1:
        raise ConfigError(f"processes.{name}: {why}: expected {specs[0]!r} alone, got {specs}")


def _generators(config: RunConfig) -> list[Workload]:
    number: Counter[str] = Counter()
    for name, specs in _entries(config, "generator").items():
        first = next(spec for spec in specs if _role(spec) == "generator")
        _check_alone(name, [first, *(s for s in specs if s != first)], "replicas scale alone")
        number[region_of_role(first)] += 1
    return [
        Workload(
            name=f"generator-{region}",
            kind=Kind.REPLICA,
            roles=[f"generator:{region}/{POD}"],
            num_pods=num,
            region=region,
        )
        for region, num in number.items()
    ]


def _gateways(config: RunConfig) -> list[Workload]:
    entries = _entries(config, "gateway")
    if len(entries) < 2:
        return []
    for name, specs in entries.items():
        _check_alone(name, sorted(specs), "several gateways are one StatefulSet")
    roles = [f"gateway:{POD}"]
    return [Workload(name="gateway", kind=Kind.GATEWAY, roles=roles, num_pods=len(entries))]


def _ranks(config: RunConfig) -> list[Workload]:
    entries = _entries(config, "rank")
    for name, specs in entries.items():
        _check_alone(name, sorted(specs), "each rank has a device of its own")
    if not entries:
        return []
    return [Workload(name="ranks", kind=Kind.RANK, roles=[f"rank:{RANK}"], num_pods=len(entries))]


def _workload(name: str, specs: Sequence[str]) -> Workload:
    roles = [_role(spec) for spec in specs]
    others = [spec for spec in specs if _role(spec) not in SHARED_ROLES | {"sandbox_host"}]
    if "sandbox_host" not in roles:
        kind = Kind.SINGLE if others else Kind.SHARED
        kind = Kind.GATEWAY if "gateway" in roles else kind
        return Workload(name=name, kind=kind, roles=list(specs))
    if others or roles.count("sandbox_host") > 1:
        text = "a sandbox host runs on each node: expected one, beside rollout_worker and judge"
        raise ConfigError(f"processes.{name}: {text} at most, got {list(specs)}")
    named = [f"sandbox_host:{POD}" if _role(spec) == "sandbox_host" else spec for spec in specs]
    return Workload(name=name, kind=Kind.NODE, roles=named)


def _role(spec: str) -> str:
    return spec.partition(":")[0]


def num_open_rollouts(config: RunConfig, purpose: Purpose) -> int:
    """Return how many rollouts, or users' requests, can be open at once."""
    if purpose is Purpose.TRAIN:
        pacer = config.pacer
        return (pacer.staleness_max + 1) * pacer.groups_per_batch * pacer.group_size
    if purpose is Purpose.EVAL:
        return max(
            (one.num_tasks * one.num_samples for one in config.evaluator.all_sets), default=0
        )
    return config.gateway.num_requests_max * max(1, len(_entries(config, "gateway")))


def num_concurrent(config: RunConfig, role: str) -> int:
    """Return how many pieces of work a pod of a shared role has in progress."""
    return {"rollout_worker": config.rollout_worker, "judge": config.judge}[role].num_concurrent


def num_pods_max(workload: Workload, config: RunConfig) -> int:
    """Return how many pods of a workload can have work at once."""
    needed = 0
    if workload.kind is Kind.REPLICA:
        serves = config.region(workload.region).serves
        open_ones = sum(num_open_rollouts(config, purpose) for purpose in serves)
        needed = math.ceil(open_ones / config.generator.num_running_max)
    elif workload.kind is Kind.SHARED:
        open_ones = sum(num_open_rollouts(config, one) for one in (Purpose.TRAIN, Purpose.EVAL))
        each = min(num_concurrent(config, role) for role in workload.role_names)
        needed = math.ceil(open_ones / each)
    return max(workload.num_pods, needed)
