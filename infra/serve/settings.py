"""Derives the configuration of a service from the configuration of its run.

```
 config.toml ──▶ service ──▶ service.toml, which the service's processes read
     │
     └─ unchanged: it describes the steps of the run; manifests record those of the service
```

A service that learns has gates between training and users by default:

```
 regions of the run      ─▶ everything except `live`: simulated tasks, evaluations
 region `live-stable`    ─▶ users, with the version that passed the gates
 region `live-candidate` ─▶ users in the candidate arm, during its test
```
Users get separate regions because a replica that serves evaluations holds the version under
evaluation, which has not passed the gates.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import msgspec

from penstock.actors.trainer.config import DECAYED_RATE, EpochConfig, TrainerConfig
from penstock.infra.config.checks import check_config
from penstock.infra.config.regions import region_of_role
from penstock.infra.config.settings import RegionSection, RunConfig, UsersSection
from penstock.messages.errors import ConfigError
from penstock.messages.gates import Arm
from penstock.messages.task import Purpose

EVALUATING = frozenset({"pacer", "evaluator", "rollout_worker", "sandbox_host", "judge"})
"""Roles that a gatekeeper needs for evaluations on tasks."""
_IDLE = "idle"


def region_name(arm: Arm) -> str:
    """Return the name of the region that serves the users of an arm."""
    return f"live-{arm}"


def has_gates(run: RunConfig) -> bool:
    """Return whether a configuration has a gatekeeper."""
    return "gatekeeper" in _roles(run)


def stable_config(run: RunConfig) -> RunConfig:
    """Return a configuration that serves users the stable version, without training.

    If no channel was ever moved, the stable version is the newest. An idle region takes training
    and evaluations, which such a service does not have.
    """
    regions = [
        msgspec.structs.replace(region, serves=[Purpose.LIVE], channel=Arm.STABLE.value)
        for region in run.regions
        if Purpose.LIVE in region.serves
    ]
    return msgspec.structs.replace(
        run,
        regions=[*regions, RegionSection(name=_IDLE, serves=[Purpose.TRAIN, Purpose.EVAL])],
        gateway=msgspec.structs.replace(run.gateway, channel=Arm.STABLE.value),
    )


def gated_config(run: RunConfig) -> RunConfig:
    """Return a configuration with gates between trainer and users.

    If no process can evaluate versions, guards and the test on users are the only gates.

    Args:
        run: Configuration of a run without gates.

    Raises:
        ConfigError: A region of the run has the name of one that is added.

    """
    arms = list(Arm)
    taken = {region_name(arm) for arm in arms} & {region.name for region in run.regions}
    if taken:
        text = f"expected other names than {', '.join(sorted(taken))}"
        raise ConfigError(f"regions: {text}, which serve.gated adds")
    gatekeeper = run.gatekeeper
    if not _can_evaluate(run):
        offline = msgspec.structs.replace(gatekeeper.offline, num_tasks=0)
        gatekeeper = msgspec.structs.replace(gatekeeper, offline=offline, quality_bar=0.0)
    others = {region.name: [p for p in region.serves if p is not Purpose.LIVE]
              for region in run.regions}  # fmt: skip
    regions = [
        msgspec.structs.replace(region, serves=others[region.name])
        for region in run.regions
        if others[region.name]
    ]
    gone = {name for name, serves in others.items() if not serves}
    processes = {
        name: kept
        for name, specs in run.processes.items()
        if (kept := [spec for spec in specs if not _is_of(spec, gone)])
    }
    for arm in arms:
        region = region_name(arm)
        regions.append(RegionSection(name=region, serves=[Purpose.LIVE], channel=arm.value))
        processes[f"generator-{region}"] = [f"generator:{region}"]
    relays = [f"relay:{region_name(arm)}" for arm in arms]
    processes["gates"] = [*relays, "gatekeeper"]
    return msgspec.structs.replace(
        run,
        regions=regions,
        processes=processes,
        gatekeeper=gatekeeper,
        gateway=msgspec.structs.replace(run.gateway, channel=Arm.STABLE.value),
    )


def _can_evaluate(run: RunConfig) -> bool:
    """Return whether the processes of a run can attempt and judge held-out tasks."""
    regions = run.regions_serving(Purpose.EVAL)
    specs = [spec for specs in run.processes.values() for spec in specs]
    has_engine = any(s.startswith("generator:") and region_of_role(s) in regions for s in specs)
    return has_engine and _roles(run) >= EVALUATING


def _roles(run: RunConfig) -> set[str]:
    return {spec.partition(":")[0] for specs in run.processes.values() for spec in specs}


def _is_of(spec: str, regions: set[str]) -> bool:
    role, _, place = spec.partition(":")
    if role not in {"generator", "relay"}:
        return False
    return (region_of_role(spec) if role == "generator" else place) in regions


STEPS_MAX = 1_000_000_000
"""Number of steps that no service reaches, so that training never ends."""
WAIT_S_MAX = 1e9
"""Seconds that a service may wait for samples: practically forever."""
SERVING = frozenset({"gateway", "monitor", "generator", "relay", "compactor"})
LEARNING = SERVING | {"trainer", "rank", "feedback", "gatekeeper"}


def service_config(run: RunConfig, *, learns: bool) -> RunConfig:
    """Return the configuration of a service on a run.

    Args:
        run: Configuration of the run.
        learns: Whether the service trains on user feedback.

    Raises:
        ConfigError: The run has no generator that serves users.

    """
    if run.serve.gated and not has_gates(run):
        run = gated_config(run) if learns else stable_config(run)
    has_tasks = learns and run.serve.simulates
    trainer = _endless(run.trainer)
    if not learns:
        trainer = msgspec.structs.replace(trainer, engine="local")
    if not has_tasks:
        epoch = EpochConfig(num_samples=run.serve.epoch_samples, s_max=run.serve.epoch_s_max)
        num_max = max(trainer.live.num_samples_max, epoch.num_samples)
        live = msgspec.structs.replace(trainer.live, num_samples_max=num_max)
        trainer = msgspec.structs.replace(trainer, epoch=epoch, live=live)
    config = msgspec.structs.replace(
        run,
        trainer=trainer,
        pacer=msgspec.structs.replace(run.pacer, steps_max=trainer.steps_max if has_tasks else 0),
        processes=_processes(run, learns=learns, has_tasks=has_tasks),
        users=UsersSection(),
    )
    check_config(config)
    return config


def _endless(trainer: TrainerConfig) -> TrainerConfig:
    """Return trainer settings without a last step, at the final learning rate of the run."""
    optimizer = trainer.optimizer
    if optimizer.decay_fraction > 0:
        rate = optimizer.learning_rate * DECAYED_RATE
        optimizer = msgspec.structs.replace(optimizer, learning_rate=rate, decay_fraction=0.0)
    return msgspec.structs.replace(
        trainer,
        optimizer=optimizer,
        steps_max=STEPS_MAX,
        pass_rate_stop=0.0,
        infrastructure_share_max=1.0,
        batch_wait_s_max=WAIT_S_MAX,
    )


def _processes(run: RunConfig, *, learns: bool, has_tasks: bool) -> dict[str, list[str]]:
    """Return the processes of the run that a service needs, with those that it adds."""
    if has_tasks:
        kept = {name: list(specs) for name, specs in run.processes.items()}
    else:
        roles = LEARNING if learns else SERVING
        regions = run.regions_serving(Purpose.LIVE)
        if learns and has_gates(run) and run.gatekeeper.offline.num_tasks:
            roles |= EVALUATING | {"scheduler"}
            regions += run.regions_serving(Purpose.EVAL)
        kept = {
            name: chosen
            for name, specs in run.processes.items()
            if (chosen := [spec for spec in specs if _is_needed(spec, roles, regions)])
        }
    found = {spec.partition(":")[0] for specs in kept.values() for spec in specs}
    if "generator" not in found:
        raise ConfigError("processes: expected a generator of a region that serves live")
    added = ["gateway", *(("trainer", "feedback") if learns else ())]
    return kept | {role: [role] for role in added if role not in found}


def _is_needed(spec: str, roles: frozenset[str], regions: list[str]) -> bool:
    role, _, place = spec.partition(":")
    if role in {"generator", "relay"}:
        return (region_of_role(spec) if role == "generator" else place) in regions
    return role in roles


def service_tables(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as TOML tables; None is left out, since TOML has no null."""
    return _without_none(msgspec.to_builtins(config))


def _without_none(value: Any) -> Any:
    if _is_table(value):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    if _is_array(value):
        return [_without_none(one) for one in value]
    return value


def _is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_array(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)
