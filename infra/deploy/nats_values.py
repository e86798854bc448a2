"""Values for NATS's official chart (nats-io/k8s, `helm install nats nats/nats -f`)."""

from penstock.infra.bus.server.server import MAX_PAYLOAD_BYTES
from penstock.infra.deploy.pods import Manifest
from penstock.infra.deploy.sizes import MIB, NATS_MIB, memory_store_bytes, store_bytes, volume_gib
from penstock.infra.run.config import RunConfig

MAX_PENDING_BYTES = 256 << 20
"""Of a client that reads slowly, as the embedded server has it."""
TLS_SECRET = "nats-tls"  # noqa: S105 - the name of a Secret.


def nats_values(config: RunConfig) -> Manifest:
    """Return the values for servers that can keep the run's streams.

    JetStream counts what streams reserve against the size of the volume, so a smaller one refuses
    the run at its start.
    """
    num = config.bus.num_replicas
    memory_mib = -(-memory_store_bytes() // MIB)
    has_tls = any(server.startswith("tls://") for server in config.bus.servers)
    return {
        "config": {
            "cluster": {"enabled": num > 1, "replicas": max(3, num)},
            "jetstream": {
                "enabled": True,
                "fileStore": {"pvc": {"size": f"{volume_gib(store_bytes(config))}Gi"}},
                "memoryStore": {"enabled": True, "maxSize": f"{memory_mib}Mi"},
                "merge": {"sync_interval": "always"},
            },
            "nats": {"tls": {"enabled": True, "secretName": TLS_SECRET} if has_tls else {}},
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
