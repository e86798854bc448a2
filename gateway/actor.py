"""The gateway as an actor: HTTP on one side, messages on the other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.summaries import SummaryConfig
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.gateway.app import build_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.keys import KeysFile, KeySpec
from penstock.gateway.listening import Listener
from penstock.gateway.services import Services
from penstock.messages.base import Event
from penstock.messages.feedback import (
    ErasureRequested,
    FeedbackLeftOut,
    FeedbackReceived,
    FeedbackRetracted,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
    UserErased,
    owner_of,
)
from penstock.messages.gates import ExperimentDecided, ExperimentStarted
from penstock.messages.generation import ReplicaReported
from penstock.messages.signals.declaration import SignalSpec
from penstock.messages.signals.quarantine import FeedbackQuarantined, QuarantineReleased
from penstock.messages.training import BatchManifest, StepCompleted


class Gateway(Actor):
    """Serves users from the replicas that serve `live`."""

    role = "gateway"
    follows: ClassVar[tuple[type[Event], ...]] = (
        InferenceRecorded,
        InferenceCounted,
        FeedbackReceived,
        FeedbackRetracted,
        FeedbackLeftOut,
        LiveSampleJoined,
        FeedbackQuarantined,
        QuarantineReleased,
        BatchManifest,
        StepCompleted,
        ErasureRequested,
        UserErased,
        ReplicaReported,
        ExperimentStarted,
        ExperimentDecided,
    )
    tick_s = 1.0

    def __init__(  # noqa: PLR0913 - what it serves, whom, and what it keeps
        self,
        config: GatewayConfig,
        chat_format: ChatFormat,
        keys: Sequence[KeySpec],
        *,
        secret: bytes,
        spool: Path,
        signals: Sequence[SignalSpec],
        summary: SummaryConfig | None = None,
        on_listening: Callable[[str], None] = lambda url: None,
    ) -> None:
        """Check the keys; nothing listens before `start`.

        Args:
            config: Address and bounds.
            chat_format: The policy's.
            keys: Who may ask.
            secret: The service's master key, 32 bytes: makes pseudonyms, wraps users' keys.
            spool: Folder of the records that wait for the log.
            signals: Declared ones: all that may be sent.
            summary: How sessions are summed up that outgrow the window.
            on_listening: Called with the base URL, `http://host:port`, once it listens.

        Raises:
            ConfigError: A key is wrong; see `KeyRing`.
            FileNotFoundError: There is no `config.keys_file`.

        """
        self._on_listening = on_listening
        self._config = config
        self._chat_format = chat_format
        self._keys = KeysFile(keys, config.keys_file)
        self._secret = secret
        self._spool = spool
        self._signals = signals
        self._summary = summary or SummaryConfig()
        self._services: Services | None = None
        self._listener = Listener(config)

    def not_ready(self) -> str:
        """Return that no generator serves users yet."""
        return self._started().not_ready

    async def start(self, ctx: Context) -> Effects:
        """Listen.

        Raises:
            OSError: The address is taken.

        """
        self._services = Services(
            ctx,
            self._config,
            self._chat_format,
            self._keys.ring,
            secret=self._secret,
            spool=self._spool,
            signals=self._signals,
            summary=self._summary,
        )
        ctx.spawn("spool", self._services.recorder.drain())
        app = build_app(self._services, self._listener.note_busy)
        self._on_listening(await self._listener.start(app))
        return ()

    async def on_inference_recorded(self, event: InferenceRecorded, ctx: Context) -> Effects:
        """Know whose request it was, also after a restart and over several gateways."""
        self._started().index.add(event)
        return ()

    async def on_inference_counted(self, event: InferenceCounted, ctx: Context) -> Effects:
        """Know whose request it was."""
        self._started().index.add_counted(event)
        return ()

    async def on_erasure_requested(self, event: ErasureRequested, ctx: Context) -> Effects:
        """Keep no copy of a key that is about to go."""
        self._started().vault.forget(owner_of(event.tenant, event.user))
        return ()

    async def on_user_erased(self, event: UserErased, ctx: Context) -> Effects:
        """Make another key for who comes back."""
        self._started().vault.forget(owner_of(event.tenant, event.user))
        return ()

    async def on_feedback_received(self, event: FeedbackReceived, ctx: Context) -> Effects:
        """Follow what becomes of feedback."""
        self._started().fates.received(event, ctx.stored_at)
        return ()

    async def on_feedback_retracted(self, event: FeedbackRetracted, ctx: Context) -> Effects:
        """Follow what becomes of feedback."""
        self._started().fates.retracted(event)
        return ()

    async def on_feedback_left_out(self, event: FeedbackLeftOut, ctx: Context) -> Effects:
        """Follow what becomes of feedback."""
        self._started().fates.left_out(event)
        return ()

    async def on_live_sample_joined(self, event: LiveSampleJoined, ctx: Context) -> Effects:
        """Follow what becomes of feedback."""
        self._started().fates.joined(event)
        return ()

    async def on_feedback_quarantined(self, event: FeedbackQuarantined, ctx: Context) -> Effects:
        """Follow what becomes of feedback."""
        self._started().fates.quarantined(event)
        return ()

    async def on_quarantine_released(self, event: QuarantineReleased, ctx: Context) -> Effects:
        """Follow what becomes of feedback."""
        self._started().fates.released(event)
        return ()

    async def on_batch_manifest(self, event: BatchManifest, ctx: Context) -> Effects:
        """Follow what becomes of feedback."""
        self._started().fates.batch(event)
        return ()

    async def on_step_completed(self, event: StepCompleted, ctx: Context) -> Effects:
        """Follow what becomes of feedback."""
        self._started().fates.step(event)
        return ()

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Know who serves what."""
        self._started().replicas.add(event, ctx.monotonic())
        return ()

    async def on_experiment_started(self, event: ExperimentStarted, ctx: Context) -> Effects:
        """Divide the users into two arms."""
        self._started().arms.started(event)
        return ()

    async def on_experiment_decided(self, event: ExperimentDecided, ctx: Context) -> Effects:
        """Have all users served alike again."""
        self._started().arms.decided(event)
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Know the keys of now; show the open requests; ask no replica that is silent."""
        if self._keys.reload():
            self._started().keys = self._keys.ring
        self._started().replicas.expire(ctx.monotonic())
        ctx.set_gauge("chats_open", self._started().num_chats)
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Refuse new requests and let the open ones end."""
        self._started().is_draining = True
        await self._listener.stop()
        self._started().planner.close()
        return ()

    def _started(self) -> Services:
        assert self._services is not None, "the gateway has not started"
        return self._services
