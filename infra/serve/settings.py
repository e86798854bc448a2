"""A service's configuration, made of its run's.

```
 config.toml ──▶ service ──▶ service.toml, which the service's processes read
     │
     └─ as it was: it says how the run's own steps were taken; manifests hold the service's
```
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import msgspec

from penstock.actors.trainer.config import DECAYED_RATE, EpochConfig, TrainerConfig
from penstock.infra.regions.settings import region_of_role
from penstock.infra.run.config import RunConfig, UsersSection
from penstock.infra.run.config_checks import check_config
from penstock.infra.serve.gated import EVALUATING, gated_config, has_gates, stable_config
from penstock.messages.errors import ConfigError
from penstock.messages.task import Purpose

STEPS_MAX = 1_000_000_000
"""Versions of a service: no end that it could reach."""
WAIT_S_MAX = 1e9
"""For as long may a service have no users."""
SERVING = frozenset({"gateway", "monitor", "generator", "relay", "compactor"})
LEARNING = SERVING | {"trainer", "rank", "publisher", "feedback_join", "gatekeeper"}


def service_config(run: RunConfig, *, learns: bool) -> RunConfig:
    """Return the configuration of a service on a run.

    Args:
        run: The run's own.
        learns: Whether it trains on what users say.

    Raises:
        ConfigError: The run has nobody who could answer users.

    """
    if run.serve.gated and not has_gates(run):
        run = gated_config(run) if learns else stable_config(run)
    has_tasks = learns and run.serve.simulates
    trainer = _endless(run.trainer)
    weights = run.weights
    if not learns:
        weights = msgspec.structs.replace(weights, num_publisher_ranks=1)
        trainer = msgspec.structs.replace(trainer, engine="local")
    if not has_tasks:
        epoch = EpochConfig(num_samples=run.serve.epoch_samples, s_max=run.serve.epoch_s_max)
        num_max = max(trainer.live.num_samples_max, epoch.num_samples)
        live = msgspec.structs.replace(trainer.live, num_samples_max=num_max)
        trainer = msgspec.structs.replace(trainer, epoch=epoch, live=live)
    config = msgspec.structs.replace(
        run,
        trainer=trainer,
        weights=weights,
        pacer=msgspec.structs.replace(run.pacer, steps_max=trainer.steps_max if has_tasks else 0),
        processes=_processes(run, learns=learns, has_tasks=has_tasks),
        users=UsersSection(),
    )
    check_config(config)
    return config


def _endless(trainer: TrainerConfig) -> TrainerConfig:
    """Return settings without a last step, at the learning rate that the run ended with."""
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
    """Return the processes that a service needs of its run's."""
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
    added = ["gateway", *(("trainer", "feedback_join") if learns else ())]
    return kept | {role: [role] for role in added if role not in found}


def _is_needed(spec: str, roles: frozenset[str], regions: list[str]) -> bool:
    role, _, place = spec.partition(":")
    if role in {"generator", "relay"}:
        return (region_of_role(spec) if role == "generator" else place) in regions
    return role in roles


def service_tables(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as tables of TOML, which has no null."""
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
