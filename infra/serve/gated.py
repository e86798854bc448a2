"""A service between whose training and whose users gates stand: the default of one that learns.

```
 regions of the run      ─▶ what they serve but `live`: simulated tasks, evaluations
 region `live-stable`    ─▶ users, by the version that the gates let pass
 region `live-candidate` ─▶ users of the candidate's arm, while it is tested
```
Users get regions of their own, since a replica that serves evaluations holds the version under
evaluation, which is no version for users.
"""

import msgspec

from penstock.infra.regions.settings import region_of_role
from penstock.infra.run.config import RegionSection, RunConfig
from penstock.messages.errors import ConfigError
from penstock.messages.gates import Arm
from penstock.messages.task import Purpose

EVALUATING = frozenset({"pacer", "evaluator", "rollout_worker", "sandbox", "judge"})
"""Roles that a gatekeeper has versions evaluated by."""
_IDLE = "idle"


def region_name(arm: Arm) -> str:
    """Return the region that serves an arm's users."""
    return f"live-{arm}"


def has_gates(run: RunConfig) -> bool:
    """Return whether a configuration has a gatekeeper."""
    return "gatekeeper" in _roles(run)


def stable_config(run: RunConfig) -> RunConfig:
    """Return a run's configuration whose users are served by the stable version.

    Where no channel was ever moved, that is the newest. What the regions of users serve beside
    them, training and evaluations, is nobody's: such a service has neither.
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
    """Return a run's configuration with gates between its trainer and its users.

    Where nobody could evaluate a version, guards and the test over users are the only gates.

    Args:
        run: Without gates.

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
    """Return whether the run's processes attempt held-out tasks and judge them."""
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
