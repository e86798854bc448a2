"""Checks across the tables of a run's configuration; each error names the field.

To add a check: a function here that raises `ConfigError`, and its call in `check_config`.
"""

import re

from penstock.actors.judge.config import REPORTED, JudgeConfig
from penstock.envs.backends import backend_class, backends
from penstock.envs.sandbox import Capability
from penstock.infra.bus.jetstream.access import OWNER
from penstock.infra.config.adapter_checks import check_adapter
from penstock.infra.config.prepare import SourceKind
from penstock.infra.config.ranks_checks import check_model, check_publishers, check_ranks
from penstock.infra.config.regions import region_of_role, replica_name
from penstock.infra.config.settings import RegionSection, RunConfig, is_gateway
from penstock.messages.errors import ConfigError
from penstock.messages.generation import MOVED_CHANNELS, NEWEST, pinned, pinned_version
from penstock.messages.task import Limits, Purpose

HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""A token of a subject, and a folder's name."""
_PROCESS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SHARED_SERVICE = "acquire"
"""`sandbox.acquire` is the service of all hosts."""


def check_config(config: RunConfig) -> None:
    """Check what concerns several tables.

    Raises:
        ConfigError: A table contradicts another one.

    """
    _check_pacer(config)
    _check_context(config)
    config.generator.check_policy(config.policy)
    sources = [source.name for source in config.prepare.all_sources]
    config.evaluator.check_sets(sources, config.pacer.eval_temperature)
    _check_model(config)
    _check_devices(config)
    _check_sandbox_hosts(config)
    if config.rollout_worker.places_groups:
        _check_group_fits(config)
    _check_capabilities(config)
    check_publishers(config)
    check_ranks(config)
    check_model(config)
    check_adapter(config)
    has_compactor = any("compactor" in specs for specs in config.processes.values())
    if has_compactor == config.store.retain_for_replay:
        raise ConfigError(
            "the role compactor requires store.retain_for_replay = false, and vice versa"
        )
    for purpose in Purpose:
        if not config.regions_serving(purpose):
            raise ConfigError(f"regions: none serves {purpose.value!r}")
    _check_regions(config)
    _check_gateway_channel(config)
    _check_gatekeeper(config)
    _check_gateways(config)
    _check_judges(config)
    _check_rollouts(config)
    _check_process_names(config)


def _check_process_names(config: RunConfig) -> None:
    """Check that each process can be a user of the embedded server."""
    for name in config.processes:
        if not _PROCESS_NAME.fullmatch(name) or name == OWNER:
            text = f"expected letters, digits, _ and -, at most 64, and not {OWNER!r}"
            raise ConfigError(f"processes.{name}: {text}")


def _check_rollouts(config: RunConfig) -> None:
    """Check that what rollouts of outside programs cannot do is not asked of them."""
    is_external = config.rollouts.is_external
    if config.judge.judge == REPORTED and not is_external:
        text = "expected with it rollouts.is_external = true: no rollout worker reports a reward"
        raise ConfigError(f"judge.judge: {REPORTED!r}: {text}")
    kinds = {source.kind for source in config.prepare.all_sources}
    if SourceKind.PROMPTS in kinds and config.judge.judge == JudgeConfig().judge:
        text = "expected another judge than hidden tests, which a prompt has none of"
        raise ConfigError(f"judge.judge: {text}, e.g. {REPORTED!r}")
    if is_external and config.pacer.tree is not None:
        text = "expected none with rollouts.is_external: no machine can be copied"
        raise ConfigError(f"pacer.tree: {text}")


def _check_devices(config: RunConfig) -> None:
    """Check that what is set to a GPU computes there: ranks of transformers models, and vLLM."""
    trainer, generator = config.trainer, config.generator
    is_ranked = trainer.engine == "ranks" and trainer.ranks.model == "transformers"
    for setting, device, has_gpus, instead in (
        (
            "trainer.device",
            trainer.device,
            is_ranked,
            'trainer.engine = "ranks" with trainer.ranks.model = "transformers"',
        ),
        ("generator.device", generator.device, generator.engine == "vllm", 'engine = "vllm"'),
    ):
        if device != "cpu" and not has_gpus:
            text = f"the built-in engine computes on CPUs alone; on GPUs use {instead}"
            raise ConfigError(f"{setting}: expected 'cpu', got {device!r}: {text} (docs/models.md)")


def check_host_name(name: str, field: str) -> None:
    """Check the name of a sandbox host.

    Raises:
        ConfigError: No host can have it; the text begins with `field`.

    """
    if HOST_NAME.fullmatch(name) is None or name == SHARED_SERVICE:
        expected = f"a host's name, {HOST_NAME.pattern} and not {SHARED_SERVICE!r}"
        raise ConfigError(f"{field}: expected {expected}, got {name!r}")


def _check_pacer(config: RunConfig) -> None:
    """Check that the pacer grants what the trainer takes: of users alone, nothing."""
    num_steps = config.trainer.steps_max if config.trainer.epoch is None else 0
    pairs = (
        ("groups_per_batch", config.pacer.groups_per_batch, config.trainer.groups_per_batch),
        ("staleness_max", config.pacer.staleness_max, config.trainer.staleness_max),
        ("steps_max", config.pacer.steps_max, num_steps),
    )
    for name, granted, trained in pairs:
        if granted != trained:
            text = f"pacer.{name} and trainer.{name} must be equal, got {granted} and {trained}"
            raise ConfigError(text)


def _check_context(config: RunConfig) -> None:
    """Check that no episode, reply or document is longer than what has to compute it."""
    context = ("generator.num_tokens_max", config.generator.num_tokens_max)
    positions = ("policy.max_position_embeddings", config.policy.max_position_embeddings)
    document = config.trainer.midtrain.sequence_tokens
    pairs = [
        (context, positions),
        (("trainer.midtrain.sequence_tokens", document), positions),
        (("gateway.context_tokens_max", config.gateway.context_tokens_max), context),
    ]
    for (name, value), (bound_name, bound) in pairs:
        if value > bound:
            raise ConfigError(f"{name}: expected at most {bound_name} {bound}, got {value}")
    if not config.prepare.tasks:  # Tasks of a folder bring their own: see `prepare`.
        check_window(config.prepare.limits, config, "prepare.limits")
    for source in config.prepare.sources:
        if source.limits is not None:
            check_window(source.limits, config, f"prepare.sources.{source.name}.limits")


def check_window(limits: Limits, config: RunConfig, field: str) -> None:
    """Check that a context of an episode fits the engine, with room for a summary if it needs one.

    Args:
        limits: Of the episode.
        config: Of the run.
        field: Where they stand, for errors.

    Raises:
        ConfigError: It does not; the text begins with the field.

    """
    window, has_segments = limits.window_tokens_max, limits.num_segments_max > 1
    if has_segments and not window:
        text = f"expected one, as num_segments_max is {limits.num_segments_max}"
        raise ConfigError(f"{field}.window_tokens_max: {text}")
    name = "window_tokens_max" if window else "num_tokens_max"
    longest, context = window or limits.num_tokens_max, config.generator.num_tokens_max
    if longest > context:
        text = f"expected at most generator.num_tokens_max {context}, got {longest}"
        raise ConfigError(f"{field}.{name}: {text}")
    summary = config.rollout_worker.summary
    room = int((1 - summary.trigger) * window)
    if has_segments and summary.is_asked and summary.num_tokens_max >= room:
        text = f"expected less than {room}, what rollout_worker.summary.trigger {summary.trigger:g}"
        raise ConfigError(
            f"rollout_worker.summary.num_tokens_max: {text} leaves of {field}.window_tokens_max "
            f"{window}, got {summary.num_tokens_max}"
        )


def _check_model(config: RunConfig) -> None:
    """Check that a run from a checkpoint mid-trains exactly if it has something to read."""
    budget = config.trainer.midtrain.num_tokens > 0 or config.trainer.midtrain.seconds > 0
    if config.model.checkpoint and budget != config.model.has_corpus:
        raise ConfigError(
            "trainer.midtrain.num_tokens: with model.checkpoint, expected a budget and "
            "model.corpora to spend it on, or neither"
        )


def _check_sandbox_hosts(config: RunConfig) -> None:
    """Check that hosts have distinct names, and that a scheduler exists where one is required."""
    check_host_name(config.sandbox_host.host, "sandbox_host.host")
    seen: dict[str, str] = {}
    for process, specs in config.processes.items():
        for spec in specs:
            if spec.partition(":")[0] not in {"sandbox_host", "scheduler"}:
                continue
            actor = _actor(spec, config.sandbox_host.host, f"processes.{process}")
            if actor in seen:
                text = f"{spec!r} is in processes.{seen[actor]} already, as {actor}"
                raise ConfigError(f"processes.{process}: {text}")
            seen[actor] = process
    places_groups = config.rollout_worker.places_groups or config.judge.places_machines
    if places_groups and not ("scheduler" in seen and config.sandbox_host.reports_to_scheduler):
        needed = 'the role "scheduler" in a process, and sandbox_host.reports_to_scheduler = true'
        raise ConfigError(f"rollout_worker.places_groups: expected with it {needed}")


def _actor(spec: str, host: str, field: str) -> str:
    """Return the name of the actor that `sandbox`, `sandbox:NAME` or `scheduler` specifies."""
    role, colon, name = spec.partition(":")
    if role == "scheduler":
        if colon:
            raise ConfigError(f"{field}: expected 'scheduler', got {spec!r}")
        return role
    if colon:
        check_host_name(name, f"{field}: {spec!r}")
    return f"sandbox.{name or host}"


def _check_group_fits(config: RunConfig) -> None:
    """Check that a training group, which is placed whole, fits a host and its quota."""
    group_size, sandbox = config.pacer.group_size, config.sandbox_host
    quota = sandbox.quotas.get(Purpose.TRAIN, sandbox.quota)
    bounds = {
        "sandbox_host.pool.live_max": config.sandbox_host.pool.live_max,
        "sandbox_host.quotas.train, or sandbox_host.quota": quota,
    }
    for field, bound in bounds.items():
        if 0 < bound < group_size:
            text = f"expected at least pacer.group_size {group_size}, got {bound}"
            raise ConfigError(f"{field}: {text}: rollout_worker.places_groups places groups whole")


def _check_capabilities(config: RunConfig) -> None:
    """Check that the sandbox backend has the capabilities that other tables require."""
    required: dict[str, Capability] = {}
    if config.pacer.tree is not None:
        required["pacer.tree"] = Capability.FORK
    if config.rollout_worker.checkpoint_turns > 0:
        required["rollout_worker.checkpoint_turns"] = Capability.CHECKPOINT
    for field, capability in required.items():
        able = [name for name in backends if capability in backend_class(name).capabilities]
        if config.sandbox_host.pool.backend not in able:
            raise ConfigError(
                f"{field}: needs machines with the capability {capability.value!r}; "
                f"sandbox_host.pool.backend {config.sandbox_host.pool.backend!r} lacks it, "
                f"choose one of {', '.join(able)}"
            )


def _check_regions(config: RunConfig) -> None:
    """Check that no two replicas, relays or regions share a name."""
    seen: dict[str, str] = {}
    for region in config.regions:
        if HOST_NAME.fullmatch(region.name) is None:
            text = f"expected a name, {HOST_NAME.pattern}, got {region.name!r}"
            raise ConfigError(f"regions: {text}")
        _check_channel(region)
        if sum(other.name == region.name for other in config.regions) > 1:
            raise ConfigError(f"regions: expected each name once, got {region.name!r} twice")
    for process, specs in config.processes.items():
        for spec in specs:
            role, _, place = spec.partition(":")
            if role not in {"generator", "relay"}:
                continue
            config.region(region_of_role(spec) if role == "generator" else place)
            actor = f"{role}-{replica_name(spec)}"
            if actor in seen:
                text = f"{spec!r} is in processes.{seen[actor]} already; name one of them otherwise"
                raise ConfigError(f"processes.{process}: {text}")
            seen[actor] = process


def _check_channel(region: RegionSection) -> None:
    """Check that training and evaluations get the versions they need."""
    field = f"regions.{region.name}.channel"
    try:
        version = pinned_version(region.channel)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    if Purpose.TRAIN in region.serves and region.channel != NEWEST:
        raise ConfigError(f"{field}: expected {NEWEST}, as it serves train, got {region.channel!r}")
    if Purpose.EVAL in region.serves and version is not None:
        text = f"expected none that is fixed, as it serves eval, got {region.channel!r}"
        raise ConfigError(f"{field}: {text}: evaluations choose the version")


def _check_gateway_channel(config: RunConfig) -> None:
    """Check that some region follows the channel that users are answered from."""
    channel = config.gateway.channel
    followed = {region.channel for region in config.regions if Purpose.LIVE in region.serves}
    if pinned_version(channel) is None and channel not in followed:
        text = f"the channel of a region that serves live, {', '.join(sorted(followed))}"
        raise ConfigError(f"gateway.channel: expected {text}, got {channel!r}")


def _check_gatekeeper(config: RunConfig) -> None:
    """Check that a gatekeeper finds what it decides between, and who evaluates it."""
    roles = {spec.partition(":")[0] for specs in config.processes.values() for spec in specs}
    if "gatekeeper" not in roles:
        return
    for channel in MOVED_CHANNELS:
        if not any(r.channel == channel and Purpose.LIVE in r.serves for r in config.regions):
            text = f'expected one that serves live on the channel "{channel}"'
            raise ConfigError(f"regions: {text}, as the role gatekeeper divides users")
    if config.gateway.channel != "stable":
        text = f'expected "stable" with the role gatekeeper, got {config.gateway.channel!r}'
        raise ConfigError(f"gateway.channel: {text}")
    for region in config.regions:
        if region.channel in MOVED_CHANNELS and Purpose.EVAL in region.serves:
            text = "expected none that serves eval, which holds the version under evaluation"
            raise ConfigError(f"regions.{region.name}: with the role gatekeeper, {text}")
    if config.gatekeeper.offline.num_tasks and "evaluator" not in roles:
        text = "expected the role evaluator in a process (serve.simulates = true in a service)"
        raise ConfigError(f"gatekeeper.offline.num_tasks: {text}, or 0 for no evaluation")


def _check_gateways(config: RunConfig) -> None:
    """Check that several gateways have distinct names, and share what keys have left."""
    specs = [spec for specs in config.processes.values() for spec in specs if is_gateway(spec)]
    for spec in specs:
        if specs.count(spec) > 1:
            text = f"expected each gateway once, as gateway:NAME, got {spec!r} twice"
            raise ConfigError(f"processes: {text}")


def _check_judges(config: RunConfig) -> None:
    """Check that replicas which judge hold their version for good."""
    held = {region.channel for region in config.regions if Purpose.LIVE in region.serves}
    for judge in config.judge.judges:
        if judge.policy_version is not None and pinned(judge.policy_version) not in held:
            channel = pinned(judge.policy_version)
            text = f'expected a region with channel = "{channel}" that serves live, to answer it'
            raise ConfigError(f"judge.judges.{judge.name}.policy_version: {text}")
