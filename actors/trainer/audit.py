"""Recomputes what a manifest claims: rewards from verdicts, advantages from rewards. Pure."""

import math
from collections.abc import Iterator, Sequence

from penstock.actors.trainer.advantages import RunningBaseline, estimator, trunk_advantage
from penstock.actors.trainer.config import TrainerConfig
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reward import Verdict
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

COMPONENTS_TOLERANCE = 1e-6
"""Between a verdict's reward and the sum of its components, which a judge may add up in another
order."""


class ManifestAudit:
    """Holds verdicts and live rewards until the manifests that use them."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._verdicts: dict[str, Verdict] = {}
        self._live_rewards: dict[str, float] = {}
        self._baseline = RunningBaseline(momentum=config.live.baseline_momentum)

    def add_verdict(self, event: Verdict) -> None:
        """Keep the first verdict of a rollout: the one that counts."""
        self._verdicts.setdefault(event.rollout_id, event)

    def add_live(self, event: LiveSampleJoined) -> None:
        """Keep the reward of a user's sample."""
        self._live_rewards[event.request_id] = event.reward

    def differences(self, manifest: BatchManifest) -> Iterator[str]:
        """Yield what does not follow from the facts, in words; manifests in the order of steps."""
        for group in manifest.groups:
            yield from self._rewards(manifest.step, group.samples)
            yield from self._advantages(manifest.step, group)
        for sample in manifest.live:
            yield from self._live(manifest.step, sample)
        trained = [sample.reward for sample in manifest.live if sample.outcome.is_trained]
        self._baseline = self._baseline.after(trained)

    def _rewards(self, step: int, samples: Sequence[SampleEntry]) -> Iterator[str]:
        for sample in samples:
            if not sample.outcome.is_trained:
                continue
            name = f"step {step}, {sample.rollout_id}"
            verdict = self._verdicts.pop(sample.rollout_id, None)
            if verdict is None:
                yield f"{name}: trained, but the log has no verdict"
                continue
            if (verdict.outcome, verdict.reward) != (sample.outcome, sample.reward):
                yield f"{name}: {sample.outcome} {sample.reward}, its verdict says otherwise"
            total = sum(verdict.components.values())
            if verdict.components and not math.isclose(
                total, verdict.reward, rel_tol=0.0, abs_tol=COMPONENTS_TOLERANCE
            ):
                yield f"{name}: components sum to {total}, the reward is {verdict.reward}"

    def _advantages(self, step: int, group: GroupEntry) -> Iterator[str]:
        trained = [sample for sample in group.samples if sample.outcome.is_trained]
        values = estimator(self._config.estimator)([sample.reward for sample in trained])
        for sample, value in zip(trained, values, strict=True):
            if sample.advantage != value:
                yield f"step {step}, {sample.rollout_id}: advantage {sample.advantage}, not {value}"
        advantages = {sample.rollout_id: sample.advantage for sample in trained}
        for sample in trained:
            if not (trunk := sample.trunk):
                continue
            value = trunk_advantage([advantages[name] for name in trunk.branches])
            if trunk.advantage != value:
                name = f"step {step}, {sample.rollout_id}"
                yield f"{name}: its trunk's advantage {trunk.advantage}, not {value}"

    def _live(self, step: int, sample: SampleEntry) -> Iterator[str]:
        if not sample.outcome.is_trained:
            return
        name = f"step {step}, {sample.rollout_id}"
        reward = self._live_rewards.pop(sample.rollout_id, None)
        if reward != sample.reward:
            yield f"{name}: reward {sample.reward}, the joined sample has {reward}"
        value = self._baseline.advantage(sample.reward)
        if sample.advantage != value:
            yield f"{name}: advantage {sample.advantage}, not {value}"
