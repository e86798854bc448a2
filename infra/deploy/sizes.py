"""Memory, processors and storage of a deployed run, from its configuration and measured constants.

SPECIFICATION.md says how each constant was measured. All were measured on CPUs; what is computed
for GPUs assumes that the same arrays lie in device memory.
"""

import math

import msgspec

from penstock.actors.policy.config import PolicyConfig
from penstock.infra.config.settings import RunConfig
from penstock.infra.deploy.layout import Kind, Workload, num_pods_max, workloads
from penstock.messages.streams import STREAMS

MIB = 1 << 20
GIB = 1 << 30

PROCESS_MIB = 96
"""Of a process that holds no weights (measured)."""
POLICY_PROCESS_MIB = 640
"""Of a process with torch in it, besides what it holds for each parameter (measured)."""
TRAINER_BYTES = 93
"""Of a local trainer for each parameter, at its peak: a checkpoint is being written (measured)."""
LAUNCHER_BYTES = 79
"""Of the launcher for each parameter, while it replays (measured)."""
GENERATOR_BYTES = 32
"""Of a generator for each parameter: the engine's weights, the receiver's copy (measured)."""
VLLM_BYTES = 4
"""The same of a generator with vLLM, whose weights are on a GPU: the receiver's copy, and what is
staged from it (computed)."""
RELAY_BYTES = 2
"""Of a relay for each parameter (measured: 2.7 of two)."""
RANK_BYTES = 16
"""Of all ranks together for each parameter: master weights, gradient and two moments in float32
(computed)."""
PROCESS_SHARE = 0.1
"""Of a processor that a process without weights uses; measured were at most 0.03."""
MACHINE_SHARE = 0.125
"""Of a processor for each machine of a sandbox host (assumed: it depends on the tasks)."""
NATS_MIB = 1024
"""Of a NATS server, besides its streams in memory (assumed)."""
STORE_MARGIN = 1.1
"""Of a volume over what streams reserve: the file system's own (assumed)."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod requests."""

    memory_mib: int
    processors: float


class PodSize(Size, frozen=True, kw_only=True):
    """A workload's pods, each of this size."""

    name: str
    num_pods: int
    num_pods_max: int
    """Where it is scaled."""
    num_gpus: int


class RunSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs, its sandbox hosts counted once."""

    parameters: int
    snapshot_gib: float
    """Size of one policy version in bfloat16, as a region's store and each replica hold it."""
    pods: list[PodSize]
    memory_gib: float
    """Memory of all pods at the start."""
    processors: float
    num_gpus: int
    nats_servers: int
    nats_volume_gib: int
    """Volume of each server."""


def run_size(config: RunConfig, *, replays: bool) -> RunSize:
    """Return what the pods of a run request, and its NATS servers.

    Raises:
        ConfigError: The run cannot be deployed.

    """
    launcher = launcher_size(config, replays=replays)
    pods = [_pods("launcher", launcher)]
    for one in workloads(config):
        number, num_max = one.num_pods, num_pods_max(one, config)
        size, gpus = pod_size(one, config), num_gpus(one, config)
        pods.append(_pods(one.name, size, num_pods=number, num_pods_max=num_max, num_gpus=gpus))
    parameters = num_params(config.policy)
    return RunSize(
        parameters=parameters,
        snapshot_gib=2 * parameters / GIB,
        pods=pods,
        memory_gib=sum(each.num_pods * each.memory_mib for each in pods) * MIB / GIB,
        processors=sum(each.num_pods * each.processors for each in pods),
        num_gpus=sum(each.num_pods * each.num_gpus for each in pods),
        nats_servers=config.bus.num_replicas,
        nats_volume_gib=volume_gib(store_bytes(config)),
    )


def _pods(
    name: str, size: Size, *, num_pods: int = 1, num_pods_max: int = 1, num_gpus: int = 0
) -> PodSize:
    return PodSize(
        name=name,
        memory_mib=size.memory_mib,
        processors=size.processors,
        num_pods=num_pods,
        num_pods_max=num_pods_max,
        num_gpus=num_gpus,
    )


def num_params(policy: PolicyConfig) -> int:
    """Return the number of parameters of a policy, of its MTP head, too."""
    hidden, width = policy.hidden_size, policy.ffn_width
    attention = hidden * (2 * policy.query_dim + 2 * policy.key_value_dim)
    attention += 2 * policy.head_dim * policy.has_qk_norm
    attention += (policy.query_dim + 2 * policy.key_value_dim) * policy.has_qkv_bias
    router = policy.num_experts * hidden
    layer = attention + router + 3 * max(1, policy.num_experts) * hidden * width + 2 * hidden
    head = policy.mtp_num_heads * (2 * hidden * hidden + 3 * hidden)
    embeddings = policy.vocab_size * hidden * (1 if policy.tie_word_embeddings else 2)
    return embeddings + policy.num_hidden_layers * layer + hidden + head


def pod_size(workload: Workload, config: RunConfig) -> Size:
    """Return what a pod of a workload requests."""
    params, roles, pool = num_params(config.policy), workload.role_names, config.sandbox_host.pool
    if workload.kind is Kind.RANK:
        return _with_policy(params * RANK_BYTES / workload.num_pods, 1)
    if workload.kind is Kind.REPLICA:
        each = VLLM_BYTES if config.generator.engine == "vllm" else GENERATOR_BYTES
        return _with_policy(params * each, config.generator.num_threads)
    if "trainer" in roles and not has_ranks(config):
        num_bytes = params * TRAINER_BYTES + config.trainer.turns_bytes_max
        return _with_policy(num_bytes, config.trainer.num_workers)
    if "trainer" in roles:
        return _with_policy(config.trainer.turns_bytes_max, 1)
    memory_mib, processors = float(PROCESS_MIB), PROCESS_SHARE
    if "relay" in roles:
        memory_mib += workload.num_of("relay") * params * RELAY_BYTES / MIB
    if workload.kind is Kind.NODE:
        memory_mib += pool.live_max * machine_mib(config)
        processors += pool.live_max * pool.processors * MACHINE_SHARE
    return Size(memory_mib=math.ceil(memory_mib), processors=processors)


def launcher_size(config: RunConfig, *, replays: bool) -> Size:
    """Return what the launcher's pod requests; at the end it may replay the run in one process."""
    if not replays:
        return Size(memory_mib=POLICY_PROCESS_MIB, processors=PROCESS_SHARE)
    params = num_params(config.policy)
    return _with_policy(params * LAUNCHER_BYTES, config.trainer.num_workers)


def _with_policy(num_bytes: float, processors: int) -> Size:
    memory_mib = POLICY_PROCESS_MIB + math.ceil(num_bytes / MIB)
    return Size(memory_mib=memory_mib, processors=float(processors))


def num_gpus(workload: Workload, config: RunConfig) -> int:
    """Return how many GPUs a pod of a workload needs."""
    if workload.kind is Kind.REPLICA:
        return int(config.generator.device == "cuda")
    trains = workload.kind is Kind.RANK or (
        "trainer" in workload.role_names and not has_ranks(config)
    )
    return int(trains and config.trainer.device == "cuda")


def has_ranks(config: RunConfig) -> bool:
    """Whether the trainer's weights are in processes of their own."""
    return any(spec.startswith("rank:") for specs in config.processes.values() for spec in specs)


def machine_mib(config: RunConfig) -> int:
    """Return the memory of one machine, as `[sandbox_host.pool]` or its backend says."""
    from penstock.envs.backends import backend_class

    pool = config.sandbox_host.pool
    return pool.memory_mib or backend_class(pool.backend).memory_mib


def store_bytes(config: RunConfig) -> int:
    """Return the disk of each NATS server: what the streams reserve, which is refused otherwise."""
    bound = config.bus.max_bytes
    files = [spec.max_bytes for spec in STREAMS.values() if not spec.in_memory]
    return sum(min(bound, each) if bound else each for each in files)


def memory_store_bytes() -> int:
    """Return the memory of each NATS server for streams that are kept there."""
    return sum(spec.max_bytes for spec in STREAMS.values() if spec.in_memory)


def volume_gib(num_bytes: int) -> int:
    """Return the size of a volume for so many bytes, in GiB."""
    return math.ceil(num_bytes * STORE_MARGIN / GIB)
