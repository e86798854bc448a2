"""A service between whose training and whose users gates stand.

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


def region_name(arm: Arm) -> str:
    """Return the region that serves an arm's users."""
    return f"live-{arm}"


def gated_config(run: RunConfig, *, learns: bool) -> RunConfig:
    """Return a run's configuration with gates between its trainer and its users.

    Args:
        run: Without gates.
        learns: Whether there will be candidates; else users are served by the stable version.

    Raises:
        ConfigError: A region of the run has the name of one that is added.

    """
    arms = list(Arm) if learns else [Arm.STABLE]
    taken = {region_name(arm) for arm in arms} & {region.name for region in run.regions}
    if taken:
        text = f"expected other names than {', '.join(sorted(taken))}"
        raise ConfigError(f"regions: {text}, which serve.gated adds")
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
    processes["gates"] = [*relays, *(["gatekeeper"] if learns else [])]
    return msgspec.structs.replace(
        run,
        regions=regions,
        processes=processes,
        gateway=msgspec.structs.replace(run.gateway, channel=Arm.STABLE.value),
    )


def _is_of(spec: str, regions: set[str]) -> bool:
    role, _, place = spec.partition(":")
    if role not in {"generator", "relay"}:
        return False
    return (region_of_role(spec) if role == "generator" else place) in regions
