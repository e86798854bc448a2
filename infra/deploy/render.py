"""A run's configuration to a folder of manifests.

The manifests of a workload, one function for each kind.

Values for NATS's official chart (nats-io/k8s, `helm install nats nats/nats -f`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tomli_w
import yaml

from penstock.actors.runtime.files import write_atomic
from penstock.infra.bus.server.server import MAX_PAYLOAD_BYTES
from penstock.infra.config.settings import RunConfig
from penstock.infra.deploy.layout import Kind, Workload, check_label, workloads
from penstock.infra.deploy.pods import (
    BUS_DIR,
    GATEWAY_TLS_DIR,
    HEALTH_PORT,
    KEYS_DIR,
    MASTER_KEY_DIR,
    RANKS_SECRET,
    Deployment,
    Manifest,
    actor_pod,
    launcher_pod,
    secret_files,
)
from penstock.infra.deploy.scaling import OPERATOR_KEY, by_lag, by_queue_time, operator_key
from penstock.infra.deploy.sizes import MIB, NATS_MIB, memory_store_bytes, store_bytes, volume_gib
from penstock.infra.run.hosts import OWN_TABLES
from penstock.messages.errors import ConfigError

HTTP_PORT, HTTPS_PORT = 80, 443
SPOOL_GIB_MIN = 1
GIB = 1 << 30


def manifests(deployment: Deployment, workload: Workload) -> list[Manifest]:
    """Return all manifests of a workload."""
    return _OF_KIND[workload.kind](deployment, workload)


def launcher(deployment: Deployment) -> Manifest:
    """Return the Job that prepares the run, opens it, and closes it when it is complete."""
    pod = launcher_pod(deployment)
    pod["spec"]["restartPolicy"] = "OnFailure"
    spec = {"backoffLimit": deployment.config.run.restarts_max, "template": pod}
    return _manifest("batch/v1", "Job", deployment.metadata("launcher"), spec)


def _single(deployment: Deployment, workload: Workload) -> list[Manifest]:
    return [_deployment(deployment, workload, {"type": "Recreate"})]


def _shared(deployment: Deployment, workload: Workload) -> list[Manifest]:
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}
    return [
        _deployment(deployment, workload, rolling),
        _budget(deployment, workload),
        by_lag(deployment, workload),
    ]


def _node(deployment: Deployment, workload: Workload) -> list[Manifest]:
    spec = {
        "selector": _selector(deployment, workload),
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
        "template": actor_pod(deployment, workload),
    }
    return [_manifest("apps/v1", "DaemonSet", deployment.metadata(workload.name), spec)]


def _replica(deployment: Deployment, workload: Workload) -> list[Manifest]:
    return [
        _stateful_set(deployment, workload),
        _service(deployment, workload, "health", HEALTH_PORT, headless=True),
        _budget(deployment, workload),
        *([by_queue_time(deployment, workload)] if deployment.gateway else []),
    ]


def _gateway(deployment: Deployment, workload: Workload) -> list[Manifest]:
    """Return a StatefulSet with a volume, where records of replies wait for the log."""
    gateway = deployment.config.gateway
    found = _stateful_set(deployment, workload)
    size = max(SPOOL_GIB_MIN, math.ceil(2 * gateway.spool_bytes_max / GIB))
    claim = {
        "metadata": {"name": "work"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{size}Gi"}},
        },
    }
    found["spec"]["volumeClaimTemplates"] = [claim]
    pod = found["spec"]["template"]["spec"]
    pod["volumes"] = [one for one in pod["volumes"] if one["name"] != "work"]
    objects = [found, _service(deployment, workload, "http", gateway.port, headless=False)]
    return [*objects, _budget(deployment, workload)] if workload.num_pods > 1 else objects


def _rank(deployment: Deployment, workload: Workload) -> list[Manifest]:
    """Return a JobSet of one indexed Job: a pod for each rank, which find each other by name.

    A rank that ends has all ranks start again, without a bound here: the trainer counts what fails
    (`trainer.ranks.restarts_max`), and has them start again itself when it does.
    """
    pod = actor_pod(deployment, workload)
    pod["spec"]["restartPolicy"] = "Never"
    job = {
        **{"completionMode": "Indexed", "completions": workload.num_pods},
        **{"parallelism": workload.num_pods, "backoffLimit": 0},
        "template": pod,
    }
    again = {"name": "startAgain", "action": "RestartJobSetAndIgnoreMaxRestarts"}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"restartStrategy": "BlockingRecreate", "rules": [again]},
        "replicatedJobs": [{"name": "rank", "replicas": 1, "template": {"spec": job}}],
    }
    metadata = deployment.metadata(workload.name)
    return [_manifest("jobset.x-k8s.io/v1alpha2", "JobSet", metadata, spec)]


_OF_KIND = {
    Kind.SINGLE: _single,
    Kind.SHARED: _shared,
    Kind.NODE: _node,
    Kind.REPLICA: _replica,
    Kind.GATEWAY: _gateway,
    Kind.RANK: _rank,
}


def network_policies(deployment: Deployment, found: list[Workload]) -> list[Manifest]:
    """Return who may connect to the run's pods, and where pods that run strangers' code may not.

    Probes come from a pod's own node, which policies do not concern.
    """
    instance = {"matchLabels": deployment.labels()}
    closed = {"podSelector": instance, "policyTypes": ["Ingress"]}
    policies = [_policy(deployment, "closed", closed)]
    for name in ["launcher", *(one.name for one in found)]:
        kind = next((one.kind for one in found if one.name == name), None)
        pods = {"podSelector": {"matchLabels": deployment.labels(name)}}
        rules = [{"ports": _ports_out(deployment.config)}]
        spec: Manifest = pods | {"policyTypes": ["Egress"], "egress": rules}
        if kind is Kind.GATEWAY:
            rule = {"ports": [{"protocol": "TCP", "port": deployment.config.gateway.port}]}
            spec |= {"policyTypes": ["Ingress", "Egress"], "ingress": [rule]}
        elif kind is Kind.RANK:
            spec |= {"policyTypes": ["Ingress", "Egress"], "ingress": [{"from": [pods]}]}
            rules.append({"to": [pods]})
        elif kind is Kind.NODE:
            # Strangers' code: no address inside, such as the API server's and NATS' monitor's.
            rules.append({"to": [{"ipBlock": {"cidr": c, "except": no}} for c, no in _OUTSIDE]})
        else:
            # Judges' services, registries and sinks; of machines the rule above has them.
            rules.append({"ports": [{"protocol": "TCP", "port": 443}]})
        policies.append(_policy(deployment, name, spec))
    return policies


_OUTSIDE = (
    ("0.0.0.0/0", ["10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12",
                   "192.168.0.0/16"]),
    ("::/0", ["fc00::/7", "fe80::/10"]),
)  # fmt: skip


def _ports_out(config: RunConfig) -> list[Manifest]:
    """Return the ports of names, servers and buckets, which every pod asks."""
    endpoints = [config.store.endpoint, *(region.endpoint for region in config.regions)]
    found = {urlsplit(server).port for server in config.bus.servers}
    for endpoint in endpoints:
        parts = urlsplit(endpoint or "https://")  # Amazon S3
        found.add(parts.port or (80 if parts.scheme == "http" else 443))
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return names + [{"protocol": "TCP", "port": port} for port in sorted(filter(None, found))]


def config_map(deployment: Deployment, files: dict[str, str]) -> Manifest:
    """Return the ConfigMap of the configuration's files."""
    metadata = deployment.metadata("config")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files}


def _policy(deployment: Deployment, part: str, spec: Manifest) -> Manifest:
    return _manifest("networking.k8s.io/v1", "NetworkPolicy", deployment.metadata(part), spec)


def _manifest(version: str, kind: str, metadata: Manifest, spec: Manifest) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _selector(deployment: Deployment, workload: Workload) -> Manifest:
    return {"matchLabels": deployment.labels(workload.name)}


def _deployment(deployment: Deployment, workload: Workload, strategy: Manifest) -> Manifest:
    spec = {
        "replicas": workload.num_pods,
        "strategy": strategy,
        "selector": _selector(deployment, workload),
        "template": actor_pod(deployment, workload),
    }
    return _manifest("apps/v1", "Deployment", deployment.metadata(workload.name), spec)


def _stateful_set(deployment: Deployment, workload: Workload) -> Manifest:
    spec = {
        "serviceName": deployment.name(workload.name),
        "replicas": workload.num_pods,
        "podManagementPolicy": "Parallel",
        "selector": _selector(deployment, workload),
        "template": actor_pod(deployment, workload),
    }
    return _manifest("apps/v1", "StatefulSet", deployment.metadata(workload.name), spec)


def _budget(deployment: Deployment, workload: Workload) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": _selector(deployment, workload)}
    metadata = deployment.metadata(workload.name)
    return _manifest("policy/v1", "PodDisruptionBudget", metadata, spec)


def _service(
    deployment: Deployment, workload: Workload, port: str, number: int, *, headless: bool
) -> Manifest:
    own = {"clusterIP": "None"} if headless else {}
    outside = HTTPS_PORT if deployment.config.gateway.tls_cert else HTTP_PORT
    ports = [{"name": port, "port": number if headless else outside, "targetPort": port}]
    spec = own | {"selector": deployment.labels(workload.name), "ports": ports}
    return _manifest("v1", "Service", deployment.metadata(workload.name), spec)


MAX_PENDING_BYTES = 256 << 20
"""Of a client that reads slowly, as the embedded server has it."""
# Names of Secrets.
TLS_SECRET, ROUTES_SECRET = "nats-tls", "nats-routes-tls"


def nats_values(config: RunConfig) -> Manifest:
    """Return the values for servers that can keep the run's streams.

    JetStream counts what streams reserve against the size of the volume, so a smaller one refuses
    the run at its start.
    """
    num = config.bus.num_replicas
    memory_mib = -(-memory_store_bytes() // MIB)
    has_tls = any(server.startswith("tls://") for server in config.bus.servers)
    # Routes are authenticated on both sides by an authority of their own, which signs nobody else.
    routes = {
        "enabled": True,
        "secretName": ROUTES_SECRET,
        "merge": {"verify": True, "ca_file": "/etc/nats-certs/cluster/ca.crt"},
    }
    clients = {"enabled": True, "secretName": TLS_SECRET} if has_tls else {}
    return {
        "config": {
            "cluster": {"enabled": num > 1, "replicas": max(3, num), "tls": routes},
            "jetstream": {
                "enabled": True,
                "fileStore": {"pvc": {"size": f"{volume_gib(store_bytes(config))}Gi"}},
                "memoryStore": {"enabled": True, "maxSize": f"{memory_mib}Mi"},
                "merge": {"sync_interval": "always"},
            },
            "nats": {"tls": clients},
            "monitor": {"enabled": True},
            "merge": {"max_payload": MAX_PAYLOAD_BYTES, "max_pending": MAX_PENDING_BYTES},
        },
        "container": {
            "env": {"GOMEMLIMIT": f"{NATS_MIB}MiB"},
            "merge": {
                "resources": {
                    "requests": {"cpu": "1", "memory": f"{NATS_MIB + memory_mib}Mi"},
                    "limits": {"memory": f"{2 * (NATS_MIB + memory_mib)}Mi"},
                }
            },
        },
        "podTemplate": {
            "topologySpreadConstraints": {
                "kubernetes.io/hostname": {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
            }
        },
    }


Table = dict[str, Any]
IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?")
AMBIGUOUS = re.compile(r"[yYnN]|[-+]?\d+[eE][-+]?\d+|0o[0-7]+")
"""Texts that are numbers or truth values to the parser of kubectl, but not to PyYAML."""
NAME_CHARACTERS_MAX = 52
"""Of an object: Kubernetes gives a StatefulSet's pods a label of its name and a hash, of 63."""
VALUES = "nats-values.yaml"
KUSTOMIZATION = "kustomization.yaml"


def render(data: Table, config: RunConfig, deployment: Deployment) -> dict[str, str]:
    """Return the files of a deployment, by name.

    Args:
        data: The tables of the run's configuration, completed and checked (`parse_new`).
        config: The same, typed.
        deployment: Names and image.

    Raises:
        ConfigError: A table cannot be deployed; the text names the field.

    """
    check_label(deployment.run_id, "--run-id")
    check_label(deployment.namespace, "--namespace")
    if not deployment.run_id[0].isalpha():
        text = "expected a letter first, as names of Services have"
        raise ConfigError(f"--run-id: {text}, got {deployment.run_id!r}")
    if IMAGE.fullmatch(deployment.image) is None:
        text = "expected NAME:TAG (no digest: the other images have others)"
        raise ConfigError(f"--image: {text}, got {deployment.image!r}")
    found = workloads(config)
    for one in found:
        name = deployment.name(one.name)
        if len(name) > NAME_CHARACTERS_MAX:
            expected = f"expected at most {NAME_CHARACTERS_MAX} characters with the workload's name"
            raise ConfigError(f"--run-id: {expected}, got {name!r}")
    deployment = _with_gateway(deployment, found)
    files = {"config.yaml": [config_map(deployment, _config_files(data, deployment))]}
    files["launcher.yaml"] = [launcher(deployment)]
    files |= {f"{one.name}.yaml": manifests(deployment, one) for one in found}
    files["network-policies.yaml"] = network_policies(deployment, found)
    if deployment.gateway and any(one.kind is Kind.REPLICA for one in found):
        files["operator-key.yaml"] = [operator_key(deployment)]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": deployment.namespace,
        "resources": sorted(files),
    }
    texts = {name: "---\n".join(_yaml(one) for one in objects) for name, objects in files.items()}
    head = "".join(f"# {line}\n" for line in secrets_needed(deployment))
    return texts | {KUSTOMIZATION: head + _yaml(kustomization), VALUES: _yaml(nats_values(config))}


def write(files: Mapping[str, str], folder: Path) -> None:
    """Write the files; a folder's other files stay.

    Raises:
        OSError: The folder cannot be written.

    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(folder / name, text.encode(), mode=0o644)


def secrets_needed(deployment: Deployment) -> list[str]:
    """Return the commands that make the Secrets to which the manifests refer."""
    config = deployment.config
    create = f"kubectl --namespace {deployment.namespace} create secret generic"
    lines = ["The pods refer to these Secrets:"]
    keys = " ".join(f"--from-file={key}=FILE" for key in secret_files(config).values())
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
    values = " ".join(f"--from-literal={name}=VALUE" for name in names)
    # Each part's own, so that none has another's rights.
    for part in ("launcher", *(one.name for one in workloads(config))):
        if keys:
            lines.append(f"  {create} {deployment.name(f'bus-{part}')} {keys}")
        lines.append(f"  {create} {deployment.name(f'store-{part}')} {values}")
    if config.store.master_key_file:
        lines.append(f"  {create} {deployment.name('master-key')} --from-file=master_key=FILE")
    if config.gateway.keys_file:
        lines.append(f"  {create} {deployment.name('gateway-keys')} --from-file=keys.toml=FILE")
    if config.gateway.tls_cert:
        create_tls = create.replace(" generic", " tls")
        name = deployment.name("gateway-tls")
        lines.append(f"  {create_tls} {name} --cert=FILE --key=FILE (KEDA trusts its authority)")
    if any(one.kind is Kind.RANK for one in workloads(config)):
        lines.append(f"  {create} {deployment.name(RANKS_SECRET)} --from-literal=secret=RANDOM")
    if deployment.gateway:
        name = deployment.name(OPERATOR_KEY)
        lines.append(f"  {create} {name} --from-literal=token=KEY (of an operator, for KEDA)")
    return lines


def _with_gateway(deployment: Deployment, found: list[Workload]) -> Deployment:
    """Return the deployment with the workload that reports queue times: a gateway, to a monitor."""
    roles = {role for one in found for role in one.role_names}
    names = [one.name for one in found if one.kind is Kind.GATEWAY]
    if not names or "monitor" not in roles:
        return deployment
    return replace(deployment, gateway=names[0])


def _config_files(data: Table, deployment: Deployment) -> dict[str, str]:
    """Return the run's configuration and a host's, with the paths of mounted Secrets."""
    config = deployment.config
    bus = data["bus"] | {name: f"{BUS_DIR}/{key}" for name, key in secret_files(config).items()}
    store = dict(data["store"])
    if config.store.master_key_file:
        store["master_key_file"] = f"{MASTER_KEY_DIR}/master_key"
    tables = data | {"bus": bus, "store": store}
    if config.gateway.keys_file:
        tables["gateway"] = tables["gateway"] | {"keys_file": f"{KEYS_DIR}/keys.toml"}
    if config.gateway.tls_cert:
        files = {f"tls_{end}": f"{GATEWAY_TLS_DIR}/tls.{name}" for end, name in _TLS_FILES}
        tables["gateway"] = tables["gateway"] | files
    if any(one.kind is Kind.RANK for one in workloads(config)):
        # The network policy of ranks lets nobody else reach them.
        own = data["trainer"].get("ranks", {}) | {"allow_plain_text": [deployment.meeting_place]}
        tables["trainer"] = data["trainer"] | {"ranks": own}
    own = {name: tables[name] for name in OWN_TABLES}
    return {"run.toml": tomli_w.dumps(tables), "host.toml": tomli_w.dumps(own)}


_TLS_FILES = (("cert", "crt"), ("key", "key"))


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats what is the same object."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if AMBIGUOUS.fullmatch(text) else None
    tag = "tag:yaml.org,2002:str"
    return dumper.represent_scalar(tag, text, style=style)  # pyright: ignore[reportUnknownMemberType]


_Dumper.add_representer(str, _text)


def _yaml(manifest: Manifest) -> str:
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=1000)
