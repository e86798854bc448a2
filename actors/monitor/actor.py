"""The monitor actor: follows all streams and serves the run's state, metrics and episodes."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import ClassVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.actors.monitor.behavior_views import behavior_metrics
from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.monitor.episodes.service import EpisodeService
from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import MonitorState, encode_state
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.messages.base import Event, Message
from penstock.messages.bus import Serve
from penstock.messages.telemetry import MonitorSnapshot, ReadMonitor

Samples = Iterable[tuple[list[str], float]]
"""Samples of a metric family: label values, and the value."""


def exposition(state: MonitorState) -> bytes:
    """Return all metrics of a state in the Prometheus text format."""
    # Not the global registry: that would add the metrics of this process and of earlier states.
    registry = CollectorRegistry()
    registry.register(_StateCollector(state))
    return generate_latest(registry)


class _StateCollector(Collector):
    def __init__(self, state: MonitorState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._learning()
        yield from self._weights()
        yield from self._work()
        yield from self._compute()
        yield from self._actors()

    def _learning(self) -> Iterator[Metric]:
        state, midtrain = self._state, self._state.midtrain
        yield _value("step", "Optimizer steps taken.", state.run.step)
        newest = state.steps[-1].metrics if state.steps else {}
        samples = [([name], value) for name, value in newest.items()]
        yield _gauge("step_metric", "Metrics of the newest step.", ["name"], samples)
        if state.evals:
            last = state.evals[-1]
            rate = last.num_solved / max(1, last.num_tasks)
            yield _value("heldout_pass_rate", "Pass rate of the newest evaluation.", rate)
            wrong = sum(point.num_wrong_version for point in state.evals)
            yield _value("heldout_wrong_version", "Verdicts not counted: other version.", wrong)
        samples = [([str(staleness)], n) for staleness, n in state.staleness.tokens.items()]
        yield _counter("trained_tokens", "Trained tokens by staleness.", ["staleness"], samples)
        yield _value("midtrain_tokens", "Mid-training tokens seen.", midtrain.num_tokens)
        yield _value("midtrain_loss", "Nats per token.", midtrain.loss_last)
        yield _gauge("behavior", "How the newest training rollouts go.", ["name"], self._behavior())

    def _behavior(self) -> Samples:
        recent = self._state.behavior.recent
        metrics = behavior_metrics(recent) if recent is not None else {}
        return [([name], value) for name, value in metrics.items() if value is not None]

    def _weights(self) -> Iterator[Metric]:
        regions, label = self._state.regions, ["region"]
        served = [
            ([name, replica], version)
            for name, region in regions.items()
            for replica, version in region.replicas.items()
        ]
        yield _gauge("served_version", "Policy version served.", [*label, "replica"], served)
        newest = {name: region.deltas[-1] for name, region in regions.items() if region.deltas}
        samples = [([name], delta.num_bytes) for name, delta in newest.items()]
        yield _gauge("delta_bytes", "Size of the newest version.", label, samples)
        samples = [([name], delta.pause_ms / 1e3) for name, delta in newest.items()]
        yield _gauge("swap_pause_seconds", "Pause of the newest swap.", label, samples)
        samples = [([name], region.num_digest_mismatches) for name, region in regions.items()]
        yield _counter("digest_mismatches", "Versions with a wrong digest.", label, samples)
        samples = [([name], region.lag_versions) for name, region in regions.items()]
        yield _gauge("weight_lag_versions", "Lag of the slowest replica.", label, samples)
        samples = [([name], region.lag_s) for name, region in regions.items()]
        yield _gauge("weight_lag_seconds", "Age of the first version it lacks.", label, samples)
        samples = [([name], region.queue_s) for name, region in regions.items()]
        yield _gauge("queue_seconds", "Mean queue time of generators.", label, samples)
        samples = [([name], region.num_bytes) for name, region in regions.items()]
        yield _counter("relayed_bytes", "Fetched by the region, all versions.", label, samples)

    def _work(self) -> Iterator[Metric]:
        state, totals = self._state, self._state.ledger.totals
        samples = [([outcome], count) for outcome, count in state.rollouts.outcomes.items()]
        yield _counter("rollouts", "Judged training rollouts.", ["outcome"], samples)
        samples = [([fate], getattr(totals, fate)) for fate in totals.__struct_fields__]
        yield _gauge("ledger_tokens", "Sampled tokens by fate.", ["fate"], samples)
        kinds = ("requests", "feedback", "retracted", "joined", "trained")
        samples = [([kind], getattr(state.live, f"num_{kind}")) for kind in kinds]
        yield _counter("live", "Users' requests and feedback.", ["kind"], samples)
        balanced = int(state.ledger.balanced)
        yield _value("ledger_balanced", "1 if every token is accounted for.", balanced)
        yield _value("rejected", "Dead letters.", state.run.num_rejected)
        yield _value("sandbox_boot_seconds", "Median.", state.sandbox.boot_ms_p50 / 1e3)

    def _compute(self) -> Iterator[Metric]:
        roles = self._state.compute.roles
        samples = [([name], role.processor_s) for name, role in roles.items()]
        yield _counter("processor_seconds", "By kind of roles.", ["role"], samples)
        tokens = [
            ([name, what], count)
            for name, role in roles.items()
            for what, count in role.tokens.items()
        ]
        yield _counter("role_tokens", "Tokens by kind of roles.", ["role", "what"], tokens)
        waits = self._state.training.wait_s_p95 or 0.0
        yield _value("step_wait_seconds_p95", "A step's wait for its batch.", waits)

    def _actors(self) -> Iterator[Metric]:
        labels, now = ["actor", "role"], self._state.run.now
        views = [([name, view.role], view) for name, view in self._state.actors.items()]
        samples = [(key, view.busy_fraction_recent) for key, view in views]
        yield _gauge("actor_busy_ratio", "Recent share of time.", labels, samples)
        samples = [(key, view.num_queued) for key, view in views]
        yield _gauge("actor_queued", "Messages in the mailbox.", labels, samples)
        oldest = [(key, view.waits[0]) for key, view in views if view.waits]
        samples = [([*key, wait.target], max(0.0, now - wait.since)) for key, wait in oldest]
        yield _gauge("actor_wait_seconds", "Oldest wait.", [*labels, "target"], samples)
        samples = [([*key, name], g) for key, view in views for name, g in view.gauges.items()]
        yield _gauge("actor_gauge", "Gauges that actors report.", [*labels, "name"], samples)
        streams = self._state.streams
        samples = [([name], view.fill_ratio) for name, view in streams.items()]
        yield _gauge("log_fill_ratio", "Share of a stream's bytes in use.", ["stream"], samples)
        yield _value("stalled", "1 if nothing moves.", int(self._state.stall.is_stalled))


def _value(name: str, text: str, value: float) -> Metric:
    return _gauge(name, text, [], [([], value)])


def _gauge(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    return _with_samples(GaugeMetricFamily(f"penstock_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    return _with_samples(CounterMetricFamily(f"penstock_{name}", text, labels=labels), samples)


def _with_samples(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


class Monitor(Actor):
    """Follows the log and serves the run's state."""

    role = "monitor"
    follows: ClassVar[tuple[type[Event], ...]] = tuple(
        dict.fromkeys((*RunFold().types, *EpisodeIndex().handlers))
    )
    saved = ("_fold", "_index")

    def __init__(self) -> None:
        """Start with an empty state."""
        self._fold = RunFold()
        self._index = EpisodeIndex()
        self._episodes: EpisodeService | None = None
        self._ctx: Context | None = None

    def services(self) -> Mapping[str, Serve]:
        """Return the services for the run's state and its episodes."""
        return {
            "monitor.state": self._read,
            "monitor.episodes": self._list_episodes,
            "monitor.episode": self._read_episode,
        }

    async def start(self, ctx: Context) -> Effects:
        """Be ready to answer."""
        self._ctx = ctx
        self._episodes = EpisodeService(self._index, ctx)
        return ()

    async def on_any(self, event: Event, ctx: Context) -> Effects:
        """Fold an event of the log."""
        self._fold.apply(event, ctx.stored_at)
        if handler := self._index.handlers.get(type(event)):
            handler(event, ctx.stored_at)
        return ()

    def _list_episodes(self, message: Message) -> AsyncIterator[Message]:
        assert self._episodes is not None, "the monitor has not started"
        return self._episodes.list(message)

    def _read_episode(self, message: Message) -> AsyncIterator[Message]:
        assert self._episodes is not None, "the monitor has not started"
        return self._episodes.read(message)

    async def _read(self, message: Message) -> AsyncIterator[Message]:
        assert isinstance(message, ReadMonitor)
        assert self._ctx is not None, "the monitor has not started"
        state = self._fold.state(self._ctx.now())
        yield MonitorSnapshot(state_json=encode_state(state), exposition=exposition(state))
