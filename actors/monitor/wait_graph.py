"""The wait-for graph: which actor waits for which, and which chain of waits holds up the run.

The target of a wait is an actor, a role, a service of a role (`generate.train`) or of one replica
(`generate.train.west.a`), or an object (`group 12`). A role stands for its slowest member, since
any member may be the one that answers. A chain that returns to itself is a deadlock.

Weights can hold up the run, too: no replica may fall further behind than the budget allows.

```
 trainer at 6 ──▶ pacer: granted = allowed, as the slowest replica serves 3 and staleness_max is 2
                    └─ no new rollout, so no batch, until that replica serves 4
```
The pacer counts from the version of the slowest training replica; a trainer that is more than
`staleness_max` versions ahead of it has consumed every rollout that was granted.
"""

from collections.abc import Iterator, Mapping

from penstock.actors.monitor.stall_views import StallView, WaitEdge
from penstock.actors.monitor.state import ActorView, MonitorState
from penstock.messages.telemetry import Wait

QUIET_S = 15.0
"""Time without progress, in seconds, after which the run counts as stalled."""
ACTOR_SILENT_S = 6.0
"""Time without a report, in seconds, after which an actor counts as gone."""
SHORT_S = 0.5
"""Duration of a wait, in seconds, below which it is not reported."""
CHAIN_MAX = 16
"""Largest number of edges in a chain."""
WEIGHTS = "weights"
"""Root of a stall that is caused by weights."""
_ROLE_OF = {
    "generate": "generator",
    "abort": "generator",
    "engine": "generator",
    "rollouts": "rollout_worker",
}
"""First word of a service's name or of a wait's target -> role."""


def explain(actors: Mapping[str, ActorView], now: float, quiet_s: float) -> StallView:
    """Return the longest chain of waits; among equally long ones, the oldest."""
    chains = [list(_walk(name, actors, now)) for name in actors]
    chains = [chain for chain in chains if chain and chain[0].waited_s >= SHORT_S]
    stalled = quiet_s >= QUIET_S
    if not chains:
        return _without_waits(actors, now, quiet_s)
    # The longest chain reaches furthest toward the cause.
    chain = max(chains, key=lambda c: (len(c), c[0].waited_s))
    root, verdict = _root_of(chain, actors, now)
    words = f"{_sentence(chain)}; {verdict}"
    if stalled:
        words = f"nothing has moved for {quiet_s:.0f} s: {words}"
    return StallView(is_stalled=stalled, quiet_s=quiet_s, chain=chain, root=root, words=words)


def weight_backpressure(state: MonitorState) -> StallView | None:
    """Return `state.stall` with weights as its cause, or None if weights hold up nothing."""
    head, budget = state.run.step, state.staleness
    served = budget.policy_version
    # Within the budget the pacer still grants rollouts, so weights are not what the run waits for.
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
        root=WEIGHTS,
        words=f"{cause}; {stall.words}",
    )


def _slowest(state: MonitorState, served: int) -> str:
    """Return a phrase that names the replicas at this version, as far as they are known."""
    # A replica that never served a version has no entry, so there may be no name.
    names = sorted(
        f"{region}/{replica}"
        for region, view in state.regions.items()
        for replica, version in view.replicas.items()
        if version == served and replica not in view.lost
    )
    return f"the slowest replica ({', '.join(names)})" if names else "the slowest replica"


def _walk(name: str, actors: Mapping[str, ActorView], now: float) -> Iterator[WaitEdge]:
    """Yield the chain of oldest waits that starts at an actor.

    It ends at an actor that does not wait or does not report, at an object, or at a loop.
    """
    seen: set[str] = set()
    actor: str | None = name
    while actor is not None and actor not in seen and len(seen) < CHAIN_MAX:
        seen.add(actor)
        wait = _oldest(actors[actor], now)
        # The last report of a silent actor says nothing about what it waits for now.
        if wait is None or not is_reporting(actors[actor], now):
            return
        yield WaitEdge(
            actor=actor,
            target=wait.target,
            reason=wait.reason,
            waited_s=max(0.0, now - wait.since),
            deadline_s=wait.deadline_s,
        )
        actor = _resolve(wait.target, actors, now)


def _resolve(target: str, actors: Mapping[str, ActorView], now: float) -> str | None:
    """Return the actor that a wait's target stands for; None if it is not an actor.

    A role stands for a member that does not report, or else for the one that has waited longest.
    """
    if target in actors:
        return target
    word, _, rest = target.partition(".")
    # `generate.train.west.a` has the purpose before the replica; other services do not.
    replica = rest.partition(".")[2] if word == "generate" else rest
    if (actor := f"{_ROLE_OF.get(word)}-{replica}") in actors:
        return actor
    role = _ROLE_OF.get(word, word)
    members = [name for name, view in actors.items() if view.role == role]
    if not members:
        return None
    # A member that is gone explains the wait better than one that is slow.
    gone = [name for name in members if not is_reporting(actors[name], now)]
    if gone:
        return gone[0]
    return max(members, key=lambda name: _waited_s(actors[name], now))


def _root_of(chain: list[WaitEdge], actors: Mapping[str, ActorView], now: float) -> tuple[str, str]:
    last = chain[-1]
    name = _resolve(last.target, actors, now)
    if name is None:
        return last.target, f"everything waits for {last.target}"
    if any(edge.actor == name for edge in chain):
        return name, f"that is a deadlock: {name} is part of the chain"
    view = actors[name]
    if not is_reporting(view, now):
        error = f" (last error: {view.last_error})" if view.last_error else ""
        return name, f"{name} has not reported for {now - view.at:.0f} s{error}"
    return name, f"{name} is working ({view.busy_fraction_recent:.0%} busy)"


def _without_waits(actors: Mapping[str, ActorView], now: float, quiet_s: float) -> StallView:
    gone = [name for name, view in actors.items() if not is_reporting(view, now)]
    words = "nothing is waiting"
    if gone:
        words = f"nothing is waiting, but no reports come from {', '.join(gone)}"
    if quiet_s >= QUIET_S:
        words = f"nothing has moved for {quiet_s:.0f} s, yet {words}"
    root = gone[0] if gone else ""
    return StallView(is_stalled=quiet_s >= QUIET_S, quiet_s=quiet_s, root=root, words=words)


def _sentence(chain: list[WaitEdge]) -> str:
    return ", which ".join(
        f"{edge.actor if i == 0 else ''} has waited {edge.waited_s:.1f} s for {edge.target}"
        f"{f' ({edge.reason})' if edge.reason else ''}".strip()
        + (" past its deadline" if edge.waited_s > edge.deadline_s else "")
        for i, edge in enumerate(chain)
    )


def is_reporting(view: ActorView, now: float) -> bool:
    """Return whether an actor has reported within the last `ACTOR_SILENT_S`."""
    return now - view.at <= ACTOR_SILENT_S


def _oldest(view: ActorView, now: float) -> Wait | None:
    return min(view.waits, key=lambda wait: wait.since, default=None)


def _waited_s(view: ActorView, now: float) -> float:
    oldest = _oldest(view, now)
    return now - oldest.since if oldest else 0.0
