"""The roles that follow a live service's log, each as its process runs it; no step is computed."""

from collections.abc import Callable
from typing import Any

from tests.sealed import open_vault

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.gatekeeper.actor import Gatekeeper
from penstock.actors.gatekeeper.config import GatekeeperConfig, OfflineConfig
from penstock.actors.monitor.actor import Monitor
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.runtime.actor import Actor
from penstock.actors.trainer.actor import Trainer
from penstock.actors.trainer.config import EpochConfig, LiveConfig, TrainerConfig
from penstock.actors.trainer.engines.protocol import HeldCheckpoint
from penstock.actors.trainer.step import StepResult
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.messages.training import CheckpointSaved, StepCompleted
from penstock.messages.weights import SnapshotKind, WeightsPublished


class HeldEngine:
    """An engine that holds the newest version: the trainer's tables are read, no step is taken."""

    def __init__(self, step: int) -> None:
        self._step = step

    async def make_version_0(self, ctx: Any, seed: int) -> HeldCheckpoint:
        """Hold the newest version."""
        completed = StepCompleted(
            step=self._step,
            policy_version=self._step,
            weights_digest=f"w{self._step}",
            optimizer_digest="o",
            metrics={},
        )
        saved = CheckpointSaved(step=self._step, object_key="c", weights_digest="w")
        return HeldCheckpoint(completed=completed, saved=saved)

    async def load(self, place: Any, object_key: str) -> HeldCheckpoint:
        """Hold the newest version."""
        return await self.make_version_0(place, 0)

    async def step(self, place: Any, manifest: Any, config: Any, read: Any) -> StepResult:
        """Take the step that the log has."""
        self._step = manifest.step
        digest = f"w{manifest.step}"
        return StepResult(
            metrics={}, staleness_tokens={}, weights_digest=digest, optimizer_digest="o"
        )

    async def measure(self, *_arguments: Any) -> dict[str, Any]:
        """Measure nothing."""
        return {}

    async def publish(self, place: Any, policy_version: int) -> WeightsPublished:
        """Name the version."""
        return WeightsPublished(
            policy_version=policy_version,
            base_version=-1,
            kind=SnapshotKind.FULL,
            optimizer_step=policy_version,
            fencing_token=1,
            representation="bf16",
            base_root_digest="",
            target_root_digest="d",
            num_params=1,
            num_changed=1,
            full_bytes=1,
            shards=[],
        )

    async def save(self, *_arguments: Any) -> CheckpointSaved:
        """Save nothing."""
        return CheckpointSaved(step=self._step, object_key="c", weights_digest="w")


def _trainer(_bus: NatsBus, step: int) -> Actor:
    engine: Any = HeldEngine(step)
    # It proposes nothing: the log has the manifests of the service that wrote it.
    config = TrainerConfig(
        steps_max=10**9,
        epoch=EpochConfig(num_samples=10**6, s_max=1e9),
        live=LiveConfig(num_samples_max=10**6),
        checkpoint_steps=1,
    )
    return Trainer(config, PolicyConfig(), engine, seed=0, opener=open_vault())


def _gatekeeper(_bus: NatsBus, _step: int) -> Actor:
    config = GatekeeperConfig(offline=OfflineConfig(num_tasks=0))
    return Gatekeeper(config, "hidden_tests")


ROLES: dict[str, Callable[[NatsBus, int], Actor]] = {
    "feedback": lambda _bus, _step: FeedbackJoiner(JoinConfig()),
    "monitor": lambda _bus, _step: Monitor(),
    "gatekeeper": _gatekeeper,
    "trainer": _trainer,
}
