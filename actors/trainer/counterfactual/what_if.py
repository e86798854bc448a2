"""What if: repeats the steps of a log with other settings or rewards.

Tasks, rollouts, batches and seeds are those of the log; what other settings would have sampled is
unknown. The more the policy differs from the one that sampled, the less the log says about it. The
effective sample size (ESS) of the ratios measures that, and below `ess_min` the answer ends.
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
"""Minimum effective sample size, as a share of a step's tokens, for which a log still answers."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The difference from the log."""

    change: Callable[[TrainerConfig], TrainerConfig]
    """Function from a step's recorded settings to the changed ones."""
    reward: Callable[[Verdict], float] | None = None
    """Reward of a rollout that counts; None keeps the recorded one."""
    ess_min: float = ESS_MIN


def ess_of(metrics: Mapping[str, float]) -> float:
    """Return the effective sample size of a step's ratios, (sum r)^2 / (N sum r^2)."""
    if "ratio_ess" in metrics:
        return metrics["ratio_ess"]
    # Logs older than that metric: the mean of r is 1 + k3 - k1.
    mean = 1.0 + metrics.get("mismatch_k3", 0.0) - metrics.get("mismatch_k1", 0.0)
    return mean**2 / (1.0 + metrics.get("mismatch_chi2", 0.0))


def recredit(
    manifest: BatchManifest, config: TrainerConfig, rewards: Mapping[str, float]
) -> BatchManifest:
    """Return a manifest with recomputed advantages of rollouts.

    Args:
        manifest: Manifest of the log; samples of users stay as they are.
        rewards: Changed rewards by rollout.

    """
    groups = [_group(group, config, rewards) for group in manifest.groups]
    return msgspec.structs.replace(manifest, groups=groups)


def rewards_of(
    manifest: BatchManifest, verdicts: Mapping[str, Verdict], reward: Callable[[Verdict], float]
) -> dict[str, float]:
    """Return the changed reward of every rollout that counts.

    Raises:
        CorruptDataError: The log lacks a verdict.

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
    """Repeats the steps of a log with a difference, until the ESS gets too small."""

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
        """Verdicts by rollout; kept only for changed rewards."""

    async def add(self, delivery: Delivery) -> None:
        """Process one event of the log."""
        if self._what_if.reward is not None and isinstance(delivery.event, Verdict):
            self._verdicts.setdefault(delivery.event.rollout_id, delivery.event)
        await super().add(delivery)

    async def take(
        self, manifest: BatchManifest, config: TrainerConfig, data: StepData
    ) -> StepResult:
        """Take a step; undo it and end if the ESS is too small."""
        config = self._what_if.change(config)
        # A copy, because the ESS is known only after the step that may have to be undone.
        before = {name: tensor.clone() for name, tensor in self._learner.state().items()}
        manifest = recredit(manifest, config, self._rewards(manifest))
        result = await super().take(manifest, config, data)
        ess = ess_of(result.metrics)
        if ess < self._what_if.ess_min:
            self._learner.load_state(before)
            self.report.ended = (
                f"before step {manifest.step}: the effective sample size of its tokens is "
                f"{ess:.2f}, below {self._what_if.ess_min:g}: the policy is too far from the one "
                "that sampled them"
            )
        return result

    async def _resume_after(self, manifest: BatchManifest, error: ErasedError) -> None:
        # Unlike a replay, this cannot continue from the run's next checkpoint.
        self.report.ended = (
            f"before step {manifest.step}: {error}; the log has no such step without this user"
        )

    def _rewards(self, manifest: BatchManifest) -> dict[str, float]:
        if self._what_if.reward is None:
            return {}
        found = rewards_of(manifest, self._verdicts, self._what_if.reward)
        for group in (*manifest.groups, *manifest.discarded):
            for sample in group.samples:
                # Each rollout is in one manifest only.
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
    """Retrain a run with a difference; return the learner and a report.

    `on_step` gets each step with the log's manifest. Raises what `replay` raises.
    """
    engine = LocalEngine(policy_config, config)
    start = await first_version(log, engine, policy_config, config)
    run = WhatIfReplay(start, engine.learner, log, what_if, on_step)
    await run.read()
    return engine.learner, run.finish()
