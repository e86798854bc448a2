"""The view model in Prometheus' text format."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.actors.monitor.state import MonitorState


def exposition(state: MonitorState) -> bytes:
    """Return all series of one state, from a registry of its own."""
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
        yield from self._actors()

    def _learning(self) -> Iterator[Metric]:
        state = self._state
        yield _gauge("penstock_step", "Optimizer steps taken.", state.run.step)
        newest = state.steps[-1].metrics if state.steps else {}
        step = GaugeMetricFamily(
            "penstock_step_metric", "Metrics of the newest step.", labels=["name"]
        )
        for name, value in newest.items():
            step.add_metric([name], value)
        yield step
        if state.evals:
            last = state.evals[-1]
            rate = last.num_solved / max(1, last.num_tasks)
            yield _gauge("penstock_heldout_pass_rate", "Of the newest evaluation.", rate)
        tokens = CounterMetricFamily(
            "penstock_trained_tokens", "Trained tokens by staleness.", labels=["staleness"]
        )
        for staleness, count in state.staleness.tokens.items():
            tokens.add_metric([str(staleness)], count)
        yield tokens
        midtrain = state.midtrain
        yield _gauge("penstock_midtrain_tokens", "Mid-training tokens seen.", midtrain.num_tokens)
        yield _gauge("penstock_midtrain_loss", "Nats per token.", midtrain.loss_last)

    def _weights(self) -> Iterator[Metric]:
        version = GaugeMetricFamily(
            "penstock_served_version", "Policy version served.", labels=["region", "replica"]
        )
        bytes_ = GaugeMetricFamily(
            "penstock_delta_bytes", "Size of the newest version.", labels=["region"]
        )
        pause = GaugeMetricFamily(
            "penstock_swap_pause_seconds", "Pause of the newest swap.", labels=["region"]
        )
        bad = CounterMetricFamily(
            "penstock_digest_mismatches", "Versions applied wrongly.", labels=["region"]
        )
        behind = GaugeMetricFamily(
            "penstock_weight_lag_versions", "Slowest replica behind the head.", labels=["region"]
        )
        behind_s = GaugeMetricFamily(
            "penstock_weight_lag_seconds", "Age of the first version it lacks.", labels=["region"]
        )
        relayed = CounterMetricFamily(
            "penstock_relayed_bytes", "Brought to the region, all versions.", labels=["region"]
        )
        for name, region in self._state.regions.items():
            for replica, served in region.replicas.items():
                version.add_metric([name, replica], served)
            if region.deltas:
                bytes_.add_metric([name], region.deltas[-1].num_bytes)
                pause.add_metric([name], region.deltas[-1].pause_ms / 1e3)
            bad.add_metric([name], region.num_digest_mismatches)
            behind.add_metric([name], region.lag_versions)
            behind_s.add_metric([name], region.lag_s)
            relayed.add_metric([name], region.num_bytes)
        yield from (version, bytes_, pause, bad, behind, behind_s, relayed)

    def _work(self) -> Iterator[Metric]:
        state = self._state
        outcomes = CounterMetricFamily(
            "penstock_rollouts", "Judged training rollouts.", labels=["outcome"]
        )
        for outcome, count in state.rollouts.outcomes.items():
            outcomes.add_metric([outcome], count)
        ledger = GaugeMetricFamily(
            "penstock_ledger_tokens", "Sampled tokens by fate.", labels=["fate"]
        )
        for fate in state.ledger.totals.__struct_fields__:
            ledger.add_metric([fate], getattr(state.ledger.totals, fate))
        live = CounterMetricFamily(
            "penstock_live", "Users' requests and feedback.", labels=["kind"]
        )
        for kind in ("requests", "feedback", "retracted", "joined", "trained"):
            live.add_metric([kind], getattr(state.live, f"num_{kind}"))
        yield from (outcomes, ledger, live)
        balanced = int(state.ledger.balanced)
        yield _gauge("penstock_ledger_balanced", "1 if every token is accounted for.", balanced)
        yield _gauge("penstock_rejected", "Dead letters.", state.run.num_rejected)
        yield _gauge("penstock_sandbox_boot_seconds", "Median.", state.sandbox.boot_ms_p50 / 1e3)

    def _actors(self) -> Iterator[Metric]:
        labels = ["actor", "role"]
        busy = GaugeMetricFamily(
            "penstock_actor_busy_ratio", "Recent share of time.", labels=labels
        )
        queued = GaugeMetricFamily("penstock_actor_queued", "Mailbox.", labels=labels)
        waits = GaugeMetricFamily(
            "penstock_actor_wait_seconds", "Oldest wait.", labels=[*labels, "target"]
        )
        gauges = GaugeMetricFamily(
            "penstock_actor_gauge", "What actors report of themselves.", labels=[*labels, "name"]
        )
        for name, view in self._state.actors.items():
            busy.add_metric([name, view.role], view.busy_fraction_recent)
            queued.add_metric([name, view.role], view.num_queued)
            for wait in view.waits[:1]:
                waited_s = max(0.0, self._state.run.now - wait.since)
                waits.add_metric([name, view.role, wait.target], waited_s)
            for gauge, value in view.gauges.items():
                gauges.add_metric([name, view.role, gauge], value)
        yield from (busy, queued, waits, gauges)
        stalled = int(self._state.stall.is_stalled)
        yield _gauge("penstock_stalled", "1 if nothing moves.", stalled)


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
