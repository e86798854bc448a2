"""The pod of a workload: its command line, probes, secrets and requests."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.actors.runtime.host import REST_S_MAX
from penstock.infra.bus.settings import FILES
from penstock.infra.config.settings import RunConfig
from penstock.infra.deploy.layout import Kind, Workload
from penstock.infra.deploy.sizes import Size, launcher_size, num_gpus, pod_size
from penstock.infra.run.hosts import READS_CONTENT
from penstock.infra.run.liveness import START_S_MAX

Manifest = dict[str, Any]

CONFIG_DIR = "/etc/penstock/config"
BUS_DIR = "/etc/penstock/bus"
MASTER_KEY_DIR = "/etc/penstock/master-key"
KEYS_DIR = "/etc/penstock/gateway"
GATEWAY_TLS_DIR = "/etc/penstock/gateway-tls"
RANKS_SECRET = "ranks"  # noqa: S105 - the name of a Secret.
WORK_DIR = "/var/lib/penstock"
HEALTH_PORT = 8081
RENDEZVOUS_PORT = 29500
GPU = "nvidia.com/gpu"
USER_ID = 1000
DRAIN_S = 5
"""Of consumed events after a stop, as `ActorHost`."""
PRE_STOP_S = 5
"""Until proxies of the cluster know that a stopping pod takes no more requests."""
SAVE_S = 30
"""For what is saved at a stop, and for connections to close."""
PROBE_S = 5
HUNG_S = 300
"""Silence of an event loop before its process is restarted: an engine may take minutes to load."""
HARDWARE_BACKENDS = frozenset({"qemu-kvm", "firecracker"})


@dataclass(frozen=True)
class Deployment:
    """A run as it is to be deployed."""

    run_id: str
    config: RunConfig
    image: str
    namespace: str
    nats_account: str
    replays: bool = True
    """Whether the launcher replays the run at its end."""
    gateway: str = ""
    """Name of the workload that reports queue times; empty: none does."""

    def name(self, part: str) -> str:
        """Return the name of an object."""
        return f"{self.run_id}-{part}"

    @property
    def meeting_place(self) -> str:
        """Name of the pod at which ranks meet."""
        name = self.name("ranks")
        return f"{name}-rank-0-0.{name}"

    def labels(self, part: str = "") -> dict[str, str]:
        """Return the labels of all objects of the run, or of one part of it."""
        own = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": self.run_id}
        return own | ({"app.kubernetes.io/component": part} if part else {})

    def metadata(self, part: str) -> Manifest:
        """Return the metadata of an object."""
        name = {"name": self.name(part), "namespace": self.namespace}
        return name | {"labels": self.labels(part)}

    def image_of(self, suffix: str) -> str:
        """Return the image `REPOSITORY[-SUFFIX]:TAG`."""
        path, slash, last = self.image.rpartition("/")
        name, mark, version = last.partition(":")
        return f"{path}{slash}{name}{suffix and f'-{suffix}'}{mark}{version}"


def image_suffix(workload: Workload, config: RunConfig) -> str:
    """Return which image a workload needs; empty for the one of most."""
    if workload.kind is Kind.NODE:
        return "sandbox"
    if workload.kind is Kind.REPLICA and config.generator.engine == "vllm":
        return "vllm"
    return "ranks" if workload.kind is Kind.RANK or num_gpus(workload, config) else ""


def secret_files(config: RunConfig) -> dict[str, str]:
    """Return the fields of `[bus]` that name files, each with its key in the Secret of the bus."""
    keys = {"tls_ca": "ca.crt", "tls_cert": "tls.crt", "tls_key": "tls.key"}
    given = [field for field in FILES if getattr(config.bus, field)]
    return {field: keys.get(field, field.removesuffix("_file")) for field in given}


def actor_pod(deployment: Deployment, workload: Workload) -> Manifest:
    """Return the pod template of a workload."""
    config, kind = deployment.config, workload.kind
    command = [
        *("actor", *workload.roles, "--run", deployment.run_id),
        *("--config", f"{CONFIG_DIR}/host.toml", "--health-port", str(HEALTH_PORT)),
    ]
    suffix = image_suffix(workload, config)
    container: Manifest = _container(deployment, suffix, workload.name, command) | {
        "name": "actor",
        "ports": [{"name": "health", "containerPort": HEALTH_PORT}],
        "startupProbe": _probe("/healthz", math.ceil(1.25 * START_S_MAX / PROBE_S)),
        "livenessProbe": _probe("/healthz", HUNG_S // PROBE_S),
        "readinessProbe": _probe("/readyz", 2),
        "resources": _resources(pod_size(workload, config), num_gpus(workload, config)),
    }
    container["env"] += _rank_environment(deployment, workload) if kind is Kind.RANK else []
    if "gateway" in workload.role_names:
        container["ports"].append({"name": "http", "containerPort": config.gateway.port})
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}}
    reads = bool(workload.role_names & READS_CONTENT)
    pod = _pod(deployment, container, workload.name, reads_content=reads)
    if kind is Kind.NODE:
        _add_machines(pod, config)
    pod["spec"]["terminationGracePeriodSeconds"] = grace_s(workload, config)
    return pod


def launcher_pod(deployment: Deployment) -> Manifest:
    """Return the pod template of the launcher, which starts no process itself."""
    command = [
        *("run", "--config", f"{CONFIG_DIR}/run.toml", "--run-id", deployment.run_id),
        *("--or-resume", "--processes", ""),
        *(() if deployment.replays else ("--no-replay",)),
    ]
    container = _container(deployment, "", "launcher", command)
    resources = _resources(launcher_size(deployment.config, replays=deployment.replays))
    container |= {"name": "launcher", "resources": resources}
    pod = _pod(deployment, container, "launcher", reads_content=True)
    pod["spec"]["terminationGracePeriodSeconds"] = 120
    return pod


def grace_s(workload: Workload, config: RunConfig) -> int:
    """Return how long a pod may take to stop: handlers, then open requests, then saving."""
    requests = (
        PRE_STOP_S + config.gateway.drain_s_max + 5 if "gateway" in workload.role_names else 0
    )
    return math.ceil(REST_S_MAX + DRAIN_S + requests + SAVE_S)


def _container(deployment: Deployment, image: str, part: str, command: list[str]) -> Manifest:
    environment: list[Manifest] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "HOME", "value": WORK_DIR},
    ]
    container: Manifest = {
        "name": "",
        "image": deployment.image_of(image),
        "command": ["penstock", "--runs-dir", f"{WORK_DIR}/runs"],
        "args": command,
        "workingDir": WORK_DIR,
        "env": environment,
        "envFrom": [{"secretRef": {"name": deployment.name(f"store-{part}")}}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    return container


def _pod(
    deployment: Deployment, container: Manifest, part: str, *, reads_content: bool
) -> Manifest:
    """Return a pod with its volumes; secrets are mounted where they are read, and nowhere else."""
    config = deployment.config
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": deployment.name("config")}},
        {"name": "work", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "work", "mountPath": WORK_DIR},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
    ]
    secrets: list[tuple[str, str, Mapping[str, str]]] = []
    if files := secret_files(config):
        secrets.append((f"bus-{part}", BUS_DIR, {key: key for key in files.values()}))
    if reads_content and config.store.master_key_file:
        secrets.append(("master-key", MASTER_KEY_DIR, {"master_key": "master_key"}))
    has_gateway = any(port["name"] == "http" for port in container.get("ports", []))
    if has_gateway and config.gateway.keys_file:
        secrets.append(("gateway-keys", KEYS_DIR, {"keys.toml": "keys.toml"}))
    if has_gateway and config.gateway.tls_cert:
        keys = {name: name for name in ("tls.crt", "tls.key")}
        secrets.append(("gateway-tls", GATEWAY_TLS_DIR, keys))
    for name, folder, keys in secrets:
        items = [{"key": key, "path": path} for key, path in keys.items()]
        source = {"secretName": deployment.name(name), "defaultMode": 0o440, "items": items}
        volumes.append({"name": name, "secret": source})
        mounts.append({"name": name, "mountPath": folder, "readOnly": True})
    container["volumeMounts"] = mounts
    return {
        "metadata": {"labels": deployment.labels(part)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                **{"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID},
                "fsGroup": USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        },
    }


def _probe(path: str, num_failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "health"},
        **{"periodSeconds": PROBE_S, "timeoutSeconds": PROBE_S, "failureThreshold": num_failures},
    }


def _resources(size: Size, gpus: int = 0) -> Manifest:
    memory, cpu = f"{size.memory_mib}Mi", f"{math.ceil(size.processors * 1000)}m"
    requests = {"requests": {"memory": memory, "cpu": cpu}}
    return requests | ({"limits": {GPU: str(gpus)}} if gpus else {})


def _rank_environment(deployment: Deployment, workload: Workload) -> list[Manifest]:
    """Return what torchrun would set; the first pod of the JobSet is the meeting place."""
    field = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    values = {
        "WORLD_SIZE": str(workload.num_pods),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": deployment.meeting_place,
        "MASTER_PORT": str(RENDEZVOUS_PORT),
    }
    rank = {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": field}}}
    key = {"secretKeyRef": {"name": deployment.name(RANKS_SECRET), "key": "secret"}}
    secret = {"name": "PENSTOCK_RANKS_SECRET", "valueFrom": key}
    return [rank, secret, *({"name": key, "value": value} for key, value in values.items())]


def _add_machines(pod: Manifest, config: RunConfig) -> None:
    """Let a pod start machines: as root, with namespaces of its own, and KVM where it is needed."""
    spec = pod["spec"]
    (container,) = spec["containers"]
    spec["nodeSelector"] = {"penstock.dev/sandbox": "true"}
    unconfined = {"type": "Unconfined"}
    spec["securityContext"] = {"seccompProfile": unconfined, "appArmorProfile": unconfined}
    needs_kvm = config.sandbox_host.pool.backend in HARDWARE_BACKENDS
    own = {"privileged": True} if needs_kvm else {"capabilities": {"add": ["SYS_ADMIN"]}}
    container["securityContext"] = own | {"readOnlyRootFilesystem": True}
    requests = container["resources"]["requests"]
    container["resources"]["limits"] = {"memory": requests["memory"]}
