"""How workloads are scaled: KEDA's ScaledObjects."""

import re
from collections.abc import Sequence

from penstock.infra.bus.jetstream.provision import stream_name
from penstock.infra.deploy.layout import Workload, num_concurrent, num_pods_max
from penstock.infra.deploy.pods import Deployment, Manifest
from penstock.infra.run.roles import work_queues

MONITOR_PORT = 8222
"""Of a NATS server, as its chart has it."""
QUEUE_S = 1.0
"""Queue time of requests above which a region gets more generators."""
CALM_S = 600
"""A region loses generators only when its queue was short for so long: each brings a cache."""
OPERATOR_KEY = "operator-key"


def by_lag(deployment: Deployment, workload: Workload) -> Manifest:
    """Return the ScaledObject of pods that share work, by what waits and what is in progress.

    The launcher makes the consumers before any pod is up, so the lag is there from the start.
    """
    config = deployment.config
    queues = work_queues(config)
    triggers: list[Manifest] = []
    for role in sorted(workload.role_names):
        metadata = {
            "natsServerMonitoringEndpoint": monitoring_endpoint(config.bus.servers),
            "account": deployment.nats_account,
            "stream": stream_name(queues[role][0].stream),
            "consumer": f"{deployment.run_id}-{role}",
            "lagThreshold": str(num_concurrent(config, role)),
        }
        triggers.append({"type": "nats-jetstream", "metadata": metadata})
    return _scaled(deployment, workload, "Deployment", triggers)


def by_queue_time(deployment: Deployment, workload: Workload) -> Manifest:
    """Return the ScaledObject of a region's generators, by queue time as the gateway reports it."""
    host = f"{deployment.name(deployment.gateway)}.{deployment.namespace}.svc.cluster.local"
    scheme = deployment.config.gateway.scheme
    metadata = {
        "url": f"{scheme}://{host}/v1/monitor/state",
        "valueLocation": f"regions.{workload.region}.queue_s",
        "targetValue": f"{QUEUE_S:g}",
        "authMode": "bearer",
    }
    trigger = {
        "type": "metrics-api",
        "metricType": "Value",
        "metadata": metadata,
        "authenticationRef": {"name": deployment.name(OPERATOR_KEY)},
    }
    found = _scaled(deployment, workload, "StatefulSet", [trigger])
    calm = {"scaleDown": {"stabilizationWindowSeconds": CALM_S}}
    found["spec"]["advanced"] = {"horizontalPodAutoscalerConfig": {"behavior": calm}}
    return found


def operator_key(deployment: Deployment) -> Manifest:
    """Return how KEDA proves to the gateway that it is an operator's."""
    target = {"parameter": "token", "name": deployment.name(OPERATOR_KEY), "key": "token"}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "TriggerAuthentication",
        "metadata": deployment.metadata(OPERATOR_KEY),
        "spec": {"secretTargetRef": [target]},
    }


def monitoring_endpoint(servers: Sequence[str]) -> str:
    """Return where NATS servers report their consumers: what their names have in common.

    KEDA puts the name of a stream's leader before it.

    Example: `["nats://n-0.nats:4222", "nats://n-1.nats:4222"]` gives `nats:8222`.
    """
    hosts = [server.partition("://")[2].rpartition(":")[0] for server in servers]
    shared = {host.partition(".")[2] for host in hosts if re.search(r"[A-Za-z]", host)}
    is_shared = len(hosts) > 1 and len(shared) == 1 and "" not in shared
    return f"{shared.pop() if is_shared else hosts[0]}:{MONITOR_PORT}"


def _scaled(
    deployment: Deployment, workload: Workload, kind: str, triggers: list[Manifest]
) -> Manifest:
    spec = {
        "scaleTargetRef": {"kind": kind, "name": deployment.name(workload.name)},
        "minReplicaCount": workload.num_pods,
        "maxReplicaCount": num_pods_max(workload, deployment.config),
        "triggers": triggers,
    }
    metadata = deployment.metadata(workload.name)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata,
        "spec": spec,
    }
