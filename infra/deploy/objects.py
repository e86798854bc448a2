"""The manifests of a workload, one function for each kind."""

import math

from penstock.infra.deploy.layout import Kind, Workload
from penstock.infra.deploy.pods import HEALTH_PORT, Deployment, Manifest, actor_pod, launcher_pod
from penstock.infra.deploy.scaling import by_lag, by_queue_time

HTTP_PORT = 80
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
    for one in found:
        pods = {"podSelector": {"matchLabels": deployment.labels(one.name)}}
        if one.kind is Kind.GATEWAY:
            rule = {"ports": [{"protocol": "TCP", "port": deployment.config.gateway.port}]}
            spec = pods | {"policyTypes": ["Ingress"], "ingress": [rule]}
        elif one.kind is Kind.RANK:
            spec = pods | {"policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}
        elif one.kind is Kind.NODE:
            blocks = [("0.0.0.0/0", ["169.254.0.0/16"]), ("::/0", ["fe80::/10"])]
            targets = [{"ipBlock": {"cidr": all_of, "except": no}} for all_of, no in blocks]
            spec = pods | {"policyTypes": ["Egress"], "egress": [{"to": targets}]}
        else:
            continue
        policies.append(_policy(deployment, one.name, spec))
    return policies


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
    ports = [{"name": port, "port": number if headless else HTTP_PORT, "targetPort": port}]
    spec = own | {"selector": deployment.labels(workload.name), "ports": ports}
    return _manifest("v1", "Service", deployment.metadata(workload.name), spec)
