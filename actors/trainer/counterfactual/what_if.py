"""What if: the steps of a log taken again with other settings or rewards.

Tasks, rollouts, batches and seeds are the log's: what the other settings would have sampled nobody
knows. So the more the policy differs from the one that sampled, the less the log says about it; the
effective sample size of the ratios measures that, and below `ess_min` the answer ends.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.batching.audit import counts
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.actors.trainer.engines.protocol import StepData
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.objective.advantages import estimator, trunk_advantage
from penstock.actors.trainer.replay import (
    OnStep,
    Replay,
    ReplayLog,
    ReplayReport,
    ReplayStart,
    first_version,
)
from penstock.actors.trainer.step import StepResult
from penstock.messages.bus import Delivery
from penstock.messages.errors import CorruptDataError, ErasedError
from penstock.messages.reward import Verdict
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

ESS_MIN = 0.3
"""Smallest share of a step's tokens that are left, in effect, for which a log still answers."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What is different."""

    change: Callable[[TrainerConfig], TrainerConfig]
    """The settings of a step to those it is taken with."""
    reward: Callable[[Verdict], float] | None = None
    """Of a rollout that counts; None: as recorded."""
    ess_min: float = ESS_MIN


def ess_of(metrics: Mapping[str, float]) -> float:
    """Return the effective sample size of a step's ratios, (sum r)^2 / (N sum r^2).

    Steps that were recorded before it was a metric follow from the mean of r, 1 + k3 - k1.
    """
    if "ratio_ess" in metrics:
        return metrics["ratio_ess"]
    mean = 1.0 + metrics.get("mismatch_k3", 0.0) - metrics.get("mismatch_k1", 0.0)
    return mean**2 / (1.0 + metrics.get("mismatch_chi2", 0.0))


def credited_again(
    manifest: BatchManifest, config: TrainerConfig, rewards: Mapping[str, float]
) -> BatchManifest:
    """Return a manifest whose rollouts are credited again.

    Args:
        manifest: of the log; users' samples stay as they are.
        config: whose estimator credits.
        rewards: by rollout, of those that another reward gives; the others keep theirs.

    """
    groups = [_group(group, config, rewards) for group in manifest.groups]
    return msgspec.structs.replace(manifest, groups=groups)


def rewards_of(
    manifest: BatchManifest, verdicts: Mapping[str, Verdict], reward: Callable[[Verdict], float]
) -> dict[str, float]:
    """Return another reward for all rollouts that count.

    Raises:
        CorruptDataError: The log has no verdict of one.

    """
    found: dict[str, float] = {}
    for sample in (each for group in manifest.groups for each in group.samples if counts(each)):
        verdict = verdicts.get(sample.rollout_id)
        if verdict is None:
            text = f"step {manifest.step}, {sample.rollout_id}: the log has no verdict"
            raise CorruptDataError(text)
        found[sample.rollout_id] = reward(verdict)
    return found


def _group(group: GroupEntry, config: TrainerConfig, rewards: Mapping[str, float]) -> GroupEntry:
    counted = [sample for sample in group.samples if counts(sample)]
    given = [rewards.get(sample.rollout_id, sample.reward) for sample in counted]
    values = estimator(config.estimator)(given)
    advantages = {sample.rollout_id: value for sample, value in zip(counted, values, strict=True)}
    samples = [_sample(sample, advantages, rewards) for sample in group.samples]
    return msgspec.structs.replace(group, samples=samples)


def _sample(
    sample: SampleEntry, advantages: Mapping[str, float], rewards: Mapping[str, float]
) -> SampleEntry:
    if not counts(sample):
        return sample
    trunk = sample.trunk
    if trunk is not None:
        shared = trunk_advantage([advantages[name] for name in trunk.branches])
        trunk = msgspec.structs.replace(trunk, advantage=shared)
    return msgspec.structs.replace(
        sample,
        reward=rewards.get(sample.rollout_id, sample.reward),
        advantage=advantages[sample.rollout_id] if sample.outcome.is_trained else 0.0,
        trunk=trunk,
    )


class WhatIfReplay(Replay):
    """Takes the steps of a log with something different, until the log cannot tell any more."""

    compares = False

    def __init__(
        self,
        start: ReplayStart,
        learner: Learner,
        log: ReplayLog,
        what_if: WhatIf,
        on_step: OnStep | None,
    ) -> None:
        super().__init__(start, log, on_step=on_step)
        self._learner = learner
        learner.versions.have_sampled = False
        self._what_if = what_if
        self._verdicts: dict[str, Verdict] = {}
        """For other rewards alone."""

    async def add(self, delivery: Delivery) -> None:
        """Take one event of the log."""
        if self._what_if.reward is not None and isinstance(delivery.event, Verdict):
            self._verdicts.setdefault(delivery.event.rollout_id, delivery.event)
        await super().add(delivery)

    async def take(
        self, manifest: BatchManifest, config: TrainerConfig, data: StepData
    ) -> StepResult:
        """Take a step, or undo it and end."""
        config = self._what_if.change(config)
        before = {name: tensor.clone() for name, tensor in self._learner.state().items()}
        manifest = credited_again(manifest, config, self._rewards(manifest))
        result = await super().take(manifest, config, data)
        ess = ess_of(result.metrics)
        if ess < self._what_if.ess_min:
            self._learner.load_state(before)
            self.report.ended = (
                f"before step {manifest.step}: the effective sample size of its tokens is "
                f"{ess:.2f}, below {self._what_if.ess_min:g}: the policy that would train them is "
                "too far from the one that sampled them"
            )
        return result

    async def _resume_after(self, manifest: BatchManifest, error: ErasedError) -> None:
        """End: the checkpoints that follow are the run's own, not those of this question."""
        self.report.ended = (
            f"before step {manifest.step}: {error}; the log has no such step without this user"
        )

    def _rewards(self, manifest: BatchManifest) -> dict[str, float]:
        if self._what_if.reward is None:
            return {}
        found = rewards_of(manifest, self._verdicts, self._what_if.reward)
        for group in (*manifest.groups, *manifest.discarded):
            for sample in group.samples:
                self._verdicts.pop(sample.rollout_id, None)
        return found


async def replay_what_if(
    log: ReplayLog,
    policy_config: PolicyConfig,
    config: TrainerConfig,
    what_if: WhatIf,
    *,
    on_step: OnStep | None = None,
) -> tuple[Learner, ReplayReport]:
    """Retrain a run with something different; return the learner after it, and what was found.

    `on_step` sees each step with its manifest as the log has it. Raises as `replay` does.
    """
    engine = LocalEngine(policy_config, config)
    start = await first_version(log, engine, policy_config, config)
    run = WhatIfReplay(start, engine.learner, log, what_if, on_step)
    await run.read()
    return engine.learner, run.finish()
