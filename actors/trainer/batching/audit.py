"""Recomputes what a manifest claims: rewards from verdicts, advantages from rewards, trunks.

Pure.
"""

import math
from collections.abc import Iterator, Sequence

from penstock.actors.trainer.batching.fair_draw import RecentUsers, capped
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.objective.advantages import estimator, trunk_credits
from penstock.actors.trainer.objective.live_baseline import LiveBaseline
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reward import Verdict
from penstock.messages.rollout import RolloutFinished, Trunk
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

COMPONENTS_TOLERANCE = 1e-6
"""Between a verdict's reward and the sum of its components, which a judge may add up in another
order."""


class ManifestAudit:
    """Holds verdicts and live rewards until the manifests that use them."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._verdicts: dict[str, Verdict] = {}
        self._sampled: dict[str, list[int]] = {}
        """Rollout -> tokens of each turn."""
        self._trunks: dict[str, Trunk] = {}
        """Branch -> where it left another rollout."""
        self._joined: dict[str, LiveSampleJoined] = {}
        self._baseline = LiveBaseline()
        self._recent = RecentUsers()

    def add_verdict(self, event: Verdict) -> None:
        """Keep the first verdict of a rollout: the one that counts."""
        self._verdicts.setdefault(event.rollout_id, event)

    def add_rollout(self, event: RolloutFinished) -> None:
        """Note what the turns sampled, and where the rollout left another one."""
        self._sampled[event.rollout_id] = [turn.num_sampled for turn in event.turns]
        if event.trunk:
            self._trunks[event.rollout_id] = event.trunk

    def add_live(self, event: LiveSampleJoined) -> None:
        """Keep a user's sample, each revision."""
        self._joined[event.key()] = event

    def differences(self, manifest: BatchManifest) -> Iterator[str]:
        """Yield what does not follow from the facts, in words; manifests in the order of steps."""
        self._config = self._config.of_step(manifest.settings)
        for group in manifest.groups:
            yield from self._rewards(manifest.step, group.samples)
            yield from self._advantages(manifest.step, group)
            yield from self._shared(manifest.step, group)
        self._forget(manifest)
        yield from self._live(manifest)

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

    def _shared(self, step: int, group: GroupEntry) -> Iterator[str]:
        """Check what trunks earn: their tokens, who shares them, the mean of those."""
        advantages = {
            sample.rollout_id: sample.advantage
            for sample in group.samples
            if sample.outcome.is_trained
        }
        expected = trunk_credits(
            advantages,
            self._trunks,
            lambda trunk: sum(self._sampled.get(trunk.rollout_id, [])[: trunk.num_turns]),
        )
        for sample in group.samples:
            found = sample.trunk
            value = expected.get(sample.rollout_id)
            if found != value:
                yield f"step {step}, {sample.rollout_id}: its trunk's credit {found}, not {value}"

    def _forget(self, manifest: BatchManifest) -> None:
        """Drop the rollouts that this manifest settles."""
        for group in (*manifest.groups, *manifest.discarded):
            for sample in group.samples:
                self._sampled.pop(sample.rollout_id, None)
                self._trunks.pop(sample.rollout_id, None)

    def _live(self, manifest: BatchManifest) -> Iterator[str]:
        """Check whose the samples are, their rewards, and advantages after the caps."""
        trained: list[SampleEntry] = []
        for sample in manifest.live:
            event = self._joined.pop(f"{sample.rollout_id}.{sample.revision}", None)
            if not sample.outcome.is_trained:
                continue
            trained.append(sample)
            found = (sample.reward, sample.tenant, sample.user)
            joined = (event.reward, event.tenant, event.user) if event else None
            if found != joined:
                name = f"step {manifest.step}, {sample.rollout_id}"
                yield f"{name}: reward, tenant and user {found}, the joined sample has {joined}"
        live = self._config.live
        credited = self._baseline.credit(trained, live)
        expected = capped(credited, self._recent.shares(trained, live))
        for sample, value in zip(trained, expected, strict=True):
            if (sample.advantage, sample.share) != (value.advantage, value.share):
                name = f"step {manifest.step}, {sample.rollout_id}"
                yield f"{name}: advantage {sample.advantage}, not {value.advantage}"
        self._baseline.add(trained, live)
        self._recent.add(trained)
