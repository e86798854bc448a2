"""Recomputes a manifest's claims: rewards from verdicts, advantages from rewards, trunks. Pure."""

import math
from collections.abc import Iterator, Sequence

from penstock.actors.trainer.batching.credit import LiveCredit, entry_of
from penstock.actors.trainer.batching.groups import first_trained
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.objective.advantages import estimator, trunk_credits
from penstock.actors.trainer.preferences.audit import PreferenceAudit
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import RolloutFinished, Trunk
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

COMPONENTS_TOLERANCE = 1e-6
"""Tolerance between a verdict's reward and its component sum, which a judge may add in another
order."""


_LIVE_FIELDS = (
    *("outcome", "reward", "turn_rewards", "unrated", "num_turns", "version_spans", "weight"),
    *("tenant", "user", "advantage", "turn_advantages", "share", "is_change"),
)
"""Fields of a trained live sample's entry that follow from the log."""


class ManifestAudit:
    """Holds verdicts and live rewards until the manifests that use them."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._verdicts: dict[str, Verdict] = {}
        self._sampled: dict[str, list[int]] = {}
        """Tokens of each turn by rollout id."""
        self._trunks: dict[str, Trunk] = {}
        """Branching point by branch."""
        self._joined: dict[str, dict[int, LiveSampleJoined]] = {}
        """Events by sample and revision."""
        self._credit = LiveCredit()
        self.preferences = PreferenceAudit()

    def add_verdict(self, event: Verdict) -> None:
        """Keep the first verdict of a rollout: the one that counts."""
        self._verdicts.setdefault(event.rollout_id, event)

    def add_rollout(self, event: RolloutFinished) -> None:
        """Record what the turns sampled, and where the rollout branched off."""
        self._sampled[event.rollout_id] = [turn.num_sampled for turn in event.turns]
        if event.trunk:
            self._trunks[event.rollout_id] = event.trunk

    def add_live(self, event: LiveSampleJoined) -> None:
        """Keep every revision of a live sample."""
        self._joined.setdefault(event.sample_id, {})[event.revision] = event

    def differences(self, manifest: BatchManifest) -> Iterator[str]:
        """Describe each claim that does not follow from the log; call in step order."""
        self._config = self._config.of_step(manifest.settings)
        for group in manifest.groups:
            yield from self._place(manifest.step, group)
            yield from self._rewards(manifest.step, group.samples)
            advantages = self._expected_advantages(group)
            yield from self._advantages(manifest.step, group, advantages)
            yield from self._shared(manifest.step, group, advantages)
            yield from self._withheld(manifest, group)
        # After the rewards: a later manifest never refers to the same rollouts.
        self._forget(manifest)
        yield from self._live(manifest)
        yield from self.preferences.differences(manifest)

    def _place(self, step: int, group: GroupEntry) -> Iterator[str]:
        """Check that exactly the groups that differ by length alone are marked length-only.

        Missing verdicts are reported by `_rewards`.

        """
        verdicts = [
            self._verdicts[sample.rollout_id]
            for sample in group.samples
            if not sample.outcome.is_masked and sample.rollout_id in self._verdicts
        ]
        is_equal = len({verdict.merit for verdict in verdicts}) == 1
        expected = is_equal and self._config.filter_zero_variance
        if verdicts and group.is_length_only != expected:
            words = "its rollouts did equally well" if is_equal else "its rollouts differ"
            place = "beside the batch" if group.is_length_only else "in the batch"
            yield f"step {step}, {group.group_id}: trained {place}, but {words}"

    def _rewards(self, step: int, samples: Sequence[SampleEntry]) -> Iterator[str]:
        for sample in samples:
            if not counts(sample):
                continue
            name = f"step {step}, {sample.rollout_id}"
            verdict = self._verdicts.pop(sample.rollout_id, None)
            if verdict is None:
                yield f"{name}: trained, but the log has no verdict"
                continue
            is_withheld = sample.outcome is Outcome.WITHHELD and verdict.outcome.is_trained
            outcome = sample.outcome if is_withheld else verdict.outcome
            if (outcome, verdict.reward) != (sample.outcome, sample.reward):
                yield f"{name}: {sample.outcome} {sample.reward}, its verdict says otherwise"
            total = sum(verdict.components.values())
            if verdict.components and not math.isclose(
                total, verdict.reward, rel_tol=0.0, abs_tol=COMPONENTS_TOLERANCE
            ):
                yield f"{name}: components sum to {total}, the reward is {verdict.reward}"

    def _expected_advantages(self, group: GroupEntry) -> dict[str, float]:
        """Return each counted sample's advantage over the group's baseline."""
        counted = [sample for sample in group.samples if counts(sample)]
        values = estimator(self._config.estimator)([sample.reward for sample in counted])
        return {sample.rollout_id: value for sample, value in zip(counted, values, strict=True)}

    def _advantages(
        self, step: int, group: GroupEntry, expected: dict[str, float]
    ) -> Iterator[str]:
        for sample in group.samples:
            value = expected[sample.rollout_id] if sample.outcome.is_trained else 0.0
            if sample.advantage != value:
                yield f"step {step}, {sample.rollout_id}: advantage {sample.advantage}, not {value}"

    def _shared(self, step: int, group: GroupEntry, advantages: dict[str, float]) -> Iterator[str]:
        """Check trunk credits: token counts, the branches that share them, and their mean."""
        credits = trunk_credits(
            advantages,
            self._trunks,
            lambda trunk: sum(self._sampled.get(trunk.rollout_id, [])[: trunk.num_turns]),
        )
        for sample in group.samples:
            found = sample.trunk
            value = credits.get(sample.rollout_id) if sample.outcome.is_trained else None
            if found != value:
                yield f"step {step}, {sample.rollout_id}: its trunk's credit {found}, not {value}"

    def _withheld(self, manifest: BatchManifest, group: GroupEntry) -> Iterator[str]:
        """Check which tokens were withheld for age."""
        for sample in filter(counts, group.samples):
            found = None if sample.outcome is Outcome.WITHHELD else sample.trained_from
            value = first_trained(sample, manifest.policy_version, self._config)
            if found != value:
                name = f"step {manifest.step}, {sample.rollout_id}"
                yield f"{name}: trained from version {found}, not {value}"

    def _forget(self, manifest: BatchManifest) -> None:
        """Drop the rollouts that this manifest settles."""
        for group in (*manifest.groups, *manifest.discarded):
            for sample in group.samples:
                self._sampled.pop(sample.rollout_id, None)
                self._trunks.pop(sample.rollout_id, None)

    def _live(self, manifest: BatchManifest) -> Iterator[str]:
        """Check that live samples equal the joined ones, with advantages capped."""
        trained: list[SampleEntry] = []
        joined: list[SampleEntry] = []
        for sample in manifest.live:
            name = f"step {manifest.step}, {sample.rollout_id}"
            event = self._taken(sample)
            if not sample.outcome.is_trained:
                continue
            if event is None:
                yield f"{name}: trained, but the log has no revision {sample.revision} of it"
                continue
            trained.append(sample)
            joined.append(entry_of(event))
        expected = self._credit.credit(joined, self._config.live)
        for sample, value in zip(trained, expected, strict=True):
            for field in _LIVE_FIELDS:
                found, right = getattr(sample, field), getattr(value, field)
                if found != right:
                    name = f"step {manifest.step}, {sample.rollout_id}"
                    yield f"{name}: {field} {found}, not {right}"
        self._credit.commit(manifest.live, self._config.live)

    def _taken(self, sample: SampleEntry) -> LiveSampleJoined | None:
        """Return the event of a sample's revision, and drop revisions up to it."""
        revisions = self._joined.get(sample.rollout_id, {})
        event = revisions.get(sample.revision)
        later = {n: each for n, each in revisions.items() if n > sample.revision}
        self._joined[sample.rollout_id] = later
        if not later:
            del self._joined[sample.rollout_id]
        return event


def counts(sample: SampleEntry) -> bool:
    """Return whether a sample's reward counts in its group's baseline."""
    return sample.outcome.is_trained or sample.outcome is Outcome.WITHHELD
