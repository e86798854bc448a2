"""Weights that hold the trainer back: no replica may fall further behind than the budget allows.

```
 trainer at 6 ──▶ pacer: granted = allowed, as the slowest replica serves 3 and staleness_max is 2
                    └─ no new rollout, so no batch, until that replica serves 4
```
The pacer counts what the slowest replica of training serves; a trainer that is more than
`staleness_max` versions ahead of it has used up every rollout that it was granted.
"""

from penstock.actors.monitor.state import MonitorState, StallView

ROOT = "weights"


def hold_up(state: MonitorState) -> StallView | None:
    """Return `state.stall` with the cause before it, or None where weights hold nothing up."""
    head, budget = state.run.step, state.staleness
    served = budget.policy_version
    if budget.budget_max < 0 or head <= served + budget.budget_max:
        return None
    cause = (
        f"weights hold the trainer back: it is at version {head}, {_slowest(state, served)}"
        f" at {served}, and staleness_max is {budget.budget_max}"
    )
    stall = state.stall
    return StallView(
        is_stalled=stall.is_stalled,
        quiet_s=stall.quiet_s,
        chain=stall.chain,
        root=ROOT,
        words=f"{cause}; {stall.words}",
    )


def _slowest(state: MonitorState, served: int) -> str:
    """Name the replicas that serve this version; one that never served anything has no name."""
    names = sorted(
        f"{region}/{replica}"
        for region, view in state.regions.items()
        for replica, version in view.replicas.items()
        if version == served
    )
    return f"the slowest replica ({', '.join(names)})" if names else "the slowest replica"
