"""The gateway as an actor: HTTP on one side, messages on the other."""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import ClassVar

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.summaries import SummaryConfig
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.envs.harness import HARNESS_VERSIONS
from penstock.envs.harness.tools import tools_of
from penstock.gateway.app import build_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.keys import KeysFile, KeySpec
from penstock.gateway.listening import Listener
from penstock.gateway.services import Services
from penstock.messages.base import Event
from penstock.messages.feedback import (
    ConsentWithdrawn,
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

log = logging.getLogger(__name__)


class Gateway(Actor):
    """Serves users from the replicas that take `live` requests."""

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
    saved = ("_services",)

    def __init__(  # noqa: PLR0913 - the policy, the users and the storage are independent inputs
        self,
        config: GatewayConfig,
        chat_format: ChatFormat,
        keys: Sequence[KeySpec],
        *,
        secret: bytes,
        spool: Path,
        signals: Sequence[SignalSpec],
        summary: SummaryConfig | None = None,
        public_tools: Collection[str] = (),
        on_listening: Callable[[str], None] = lambda url: None,
        on_page: Callable[[str], None] = lambda link: None,
    ) -> None:
        """Check the keys; the gateway does not listen before `start`.

        Args:
            config: Address and limits.
            chat_format: Chat format of the policy.
            keys: Bearer keys that the run itself makes, in addition to `config.keys_file`.
            secret: Master key of the service, 32 bytes; derives pseudonyms and wraps users' keys.
            spool: Folder for records that wait until the log is reachable.
            signals: Declared feedback signals; clients may send no others.
            summary: How to summarize sessions that outgrow the context window.
            public_tools: Names of tools that the log has as they are, with those of the harness; of
                others it has pseudonyms.
            on_listening: Callback that gets the base URL, `http://host:port`, once it listens.
            on_page: Callback that gets each link with which one browser of this host can see the
                live page.

        Raises:
            ConfigError: A key is invalid; see `KeyRing`.
            FileNotFoundError: `config.keys_file` does not exist.

        """
        self._on_listening, self._on_page = on_listening, on_page
        self._config = config
        self._chat_format = chat_format
        self._keys = KeysFile(keys, config.keys_file)
        self._secret = secret
        self._spool = spool
        self._signals = signals
        self._summary = summary or SummaryConfig()
        self._public_tools = {
            *public_tools,
            *(tool for v in HARNESS_VERSIONS for tool in tools_of(v)),
        }
        self._services: Services | None = None
        self._listener = Listener(config)

    def not_ready(self) -> str:
        """Return why chat requests cannot be answered; empty when they can."""
        return self._started().not_ready

    async def start(self, ctx: Context) -> Effects:
        """Listen for HTTP requests.

        Raises:
            OSError: The address is in use.

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
            public_tools=self._public_tools,
            on_code=lambda code: self._on_page(f"{url}/?code={code}"),
        )
        ctx.spawn("spool", self._services.recorder.drain())
        app = build_app(self._services, self._listener.note_busy)
        url = await self._listener.start(app)
        log.info("listening at %s for model %r", url, self._config.model)
        if self._config.is_local:
            self._services.door.renew()
        self._on_listening(url)
        return self._withdrawals(ctx)

    async def on_inference_recorded(self, event: InferenceRecorded, ctx: Context) -> Effects:
        """Note who made a request that is stored."""
        # From the log and not only from own requests: feedback may come to another gateway, or to
        # this one after a restart.
        self._started().index.add(event)
        return ()

    async def on_inference_counted(self, event: InferenceCounted, ctx: Context) -> Effects:
        """Note which key made a request of which only counts are stored."""
        self._started().index.add_counted(event)
        return ()

    async def on_erasure_requested(self, event: ErasureRequested, ctx: Context) -> Effects:
        """Drop the cached encryption key of a user who is about to be erased."""
        # A gateway that still had the key could seal new records that erasure no longer reaches.
        self._started().forget(event.tenant, event.user)
        return ()

    async def on_user_erased(self, event: UserErased, ctx: Context) -> Effects:
        """Drop the cached encryption key, so that a user who returns gets a new one."""
        # Requests between `ErasureRequested` and this event may have cached the key again.
        services, owner = self._started(), owner_of(event.tenant, event.user)
        services.forget(event.tenant, event.user)
        # A backup or an imported log may have brought the key back.
        if await services.vault.erase_again(owner, event.key_id):
            log.warning("%s: the key %s was erased before and is erased again", owner, event.key_id)
        erasures = await services.vault.num_erasures(owner)
        services.recorder.erase(event.tenant, event.user, erasures)
        return ()

    async def on_feedback_received(self, event: FeedbackReceived, ctx: Context) -> Effects:
        """Track a new piece of feedback."""
        self._started().fates.received(event, ctx.stored_at)
        return ()

    async def on_feedback_retracted(self, event: FeedbackRetracted, ctx: Context) -> Effects:
        """Mark feedback as retracted."""
        self._started().fates.retracted(event)
        return ()

    async def on_feedback_left_out(self, event: FeedbackLeftOut, ctx: Context) -> Effects:
        """Mark feedback that the feedback join leaves out."""
        self._started().fates.left_out(event)
        return ()

    async def on_live_sample_joined(self, event: LiveSampleJoined, ctx: Context) -> Effects:
        """Mark feedback that became part of a training sample."""
        self._started().fates.joined(event)
        return ()

    async def on_feedback_quarantined(self, event: FeedbackQuarantined, ctx: Context) -> Effects:
        """Mark feedback that is held in quarantine."""
        self._started().fates.quarantined(event)
        return ()

    async def on_quarantine_released(self, event: QuarantineReleased, ctx: Context) -> Effects:
        """Release feedback from quarantine."""
        self._started().fates.released(event)
        return ()

    async def on_batch_manifest(self, event: BatchManifest, ctx: Context) -> Effects:
        """Mark the samples that a step trains or leaves out."""
        self._started().fates.batch(event)
        return ()

    async def on_step_completed(self, event: StepCompleted, ctx: Context) -> Effects:
        """Mark the samples of a step as trained or skipped."""
        self._started().fates.step(event)
        return ()

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Update the table of replicas and the versions that they serve."""
        services = self._started()
        was_ready = services.policy_version >= 0
        services.replicas.add(event, ctx.monotonic())
        services.limits.note_time(ctx.stored_at)
        if not was_ready and services.policy_version >= 0:
            log.info("ready: version %d is served", services.policy_version)
        return ()

    async def on_experiment_started(self, event: ExperimentStarted, ctx: Context) -> Effects:
        """Split the users into the two arms of an experiment."""
        self._started().arms.started(event)
        log.info("experiment %d: %.3g of the users go to the candidate", event.number, event.share)
        return ()

    async def on_experiment_decided(self, event: ExperimentDecided, ctx: Context) -> Effects:
        """Route all users to the base channel again."""
        self._started().arms.decided(event)
        log.info("experiment %d is decided: all users go to one channel again", event.number)
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Reload changed keys, forget silent replicas, and publish the number of open requests."""
        services = self._started()
        withdrawn: Effects = ()
        if self._keys.reload():
            services.keys = self._keys.ring
            withdrawn = self._withdrawals(ctx)
        was_ready = services.policy_version >= 0
        services.replicas.expire(ctx.monotonic())
        if was_ready and services.policy_version < 0:
            log.warning("not ready: no generator reports any longer")
        ctx.set_gauge("chats_open", services.num_chats)
        return withdrawn

    def _withdrawals(self, ctx: Context) -> Effects:
        """Return which keys do not agree to training, for the join and the trainer."""
        # Also at the start: the file may have changed meanwhile. The log keeps one of each version.
        stamp = f"{ctx.actor}-{self._keys.stamp}"
        return [
            ConsentWithdrawn(tenant=tenant, key_id=key_id, at=ctx.now(), stamp=stamp)
            for tenant, key_id in self._keys.withheld()
        ]

    async def stop(self, ctx: Context) -> Effects:
        """Refuse new requests and let the open ones finish."""
        services = self._started()
        # Before the listener stops: requests on connections that stay open get 503 from now on,
        # and load balancers see it in `/readyz`.
        services.is_draining = True
        log.info("draining %d open requests", services.num_chats)
        await self._listener.stop()
        services.planner.close()
        return ()

    def _started(self) -> Services:
        assert self._services is not None, "the gateway has not started"
        return self._services
