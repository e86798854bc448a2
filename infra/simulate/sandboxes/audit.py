"""Compares what clients hold with what hosts hold after a burst, group by group."""

from collections import Counter
from typing import Any

from penstock.infra.simulate.sandboxes.settings import BurstScenario


def audit(
    scenario: BurstScenario, held: dict[str, Any], on_hosts: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures of a burst's end.

    Args:
        scenario: What was simulated.
        held: As `BurstClients.hold` returns it.
        on_hosts: As `Hosts.run` returns it.

    """
    num_hosts_of = Counter(group for groups in on_hosts["groups"].values() for group in groups)
    where = {group: host for host, groups in on_hosts["groups"].items() for group in groups}
    held_on: dict[str, str] = held["host_of"]
    return {
        "machines_live": on_hosts["live"],
        "hosts_died": len(on_hosts["dead"]),
        "machines_died": on_hosts["lost"],
        "groups_requested_again": held["requested_again"],
        "groups_lost": scenario.num_groups - sum(where.get(g) == h for g, h in held_on.items()),
        "groups_twice": sum(count > 1 for count in num_hosts_of.values()),
        "machines_created": on_hosts["created"],
        "machines_reaped": on_hosts["expired"],
        "fetched_tb": scenario.terabytes(on_hosts["fetched"]),
        "host_load_max_over_mean": on_hosts["load_max_over_mean"],
    }
