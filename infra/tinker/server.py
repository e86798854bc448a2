"""The actor of `penstock tinker`: stores calls, has them computed, and stores the answers.

```
 accept ─TinkerCalled─▶ log ─▶ queue ─▶ executor ─TinkerSaved, TinkerAnswered─▶ log ─▶ answer
```
A call is on the log before its id is out, so that a killed server's successor owes the same
answers. A model is computed again from its newest `TinkerKept`; digests say whether it is the same.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Middleware

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.gateway.config import GatewayConfig
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.keys import KeysFile, KeySpec
from penstock.gateway.limits import LocalLimits
from penstock.gateway.listening import Listener
from penstock.infra.tinker.book import (
    UNANSWERED,
    Book,
    NoSuchError,
    body_of,
    lora_of,
    readable,
)
from penstock.infra.tinker.executor import CHANGING, Base, CallOutcome, Executor, SavedState
from penstock.infra.tinker.settings import TinkerConfig
from penstock.messages.bus import Delivery
from penstock.messages.errors import CodecError, CorruptDataError, NotFoundError
from penstock.messages.reading.claims import digest_of
from penstock.messages.requests.tinker import (
    TinkerAnswered,
    TinkerBody,
    TinkerCalled,
    TinkerKept,
    TinkerKind,
    TinkerOwner,
    TinkerSaved,
)

log = logging.getLogger(__name__)
_ANSWERS_BYTES_MAX = 64 << 20
"""Bytes of recent answers in memory; older ones are read from the log."""
_NUM_SAMPLE_CALLS_MAX = 16
"""Calls that sample at once."""


class ClientCall(NamedTuple):
    """A call that a client asks for, checked but not yet accepted."""

    kind: TinkerKind
    session_id: str
    target: str
    number: int
    body: bytes
    seed: int | None = 0
    """None: the server draws one."""
    num_tokens: int = 0
    """Charged to the key."""


class TinkerServer(Actor):
    """Serves the `tinker` SDK; the only author of its events."""

    role = "tinker"
    tick_s = 1.0

    def __init__(  # noqa: PLR0913, PLR0917 - model, keys, log and bounds are independent
        self,
        config: TinkerConfig,
        gateway: GatewayConfig,
        base: Base,
        names: tuple[str, ...],
        keys: KeysFile,
        read_log: Callable[[], AsyncIterator[Delivery]],
        build_app: "Callable[[TinkerServer, Middleware], web.Application]",
        on_listening: Callable[[str], None] = lambda url: None,
    ) -> None:
        """Prepare; nothing listens before `start`.

        Args:
            config: Bounds.
            gateway: Address, keys file and limits of bodies.
            base: Model of all adapters.
            names: What clients may call it; the last one is its path, where its tokenizer is.
            keys: Who may call.
            read_log: Yields `book.TYPES` up to the end of the log.
            build_app: Makes the routes.
            on_listening: Gets the base URL once it listens.

        """
        self.config, self.gateway, self.base, self.book = config, gateway, base, Book()
        self.names = names
        self._keys, self._read_log, self._on_listening = keys, read_log, on_listening
        self._build_app = build_app
        self._listener = Listener(gateway)
        # Both bounded by `num_pending_max`, which `accept` checks.
        self._training: asyncio.Queue[TinkerCalled] = asyncio.Queue()
        self._sampling: asyncio.Queue[TinkerCalled] = asyncio.Queue()
        self._answers: OrderedDict[str, TinkerAnswered] = OrderedDict()
        self._answers_bytes = self._pending_bytes = 0
        self._waiting: dict[str, asyncio.Event] = {}
        self._accepting = asyncio.Lock()
        """Held while a call goes to the log: repetitions must find it there."""

    async def start(self, ctx: Context) -> Effects:
        """Read the log, take up the calls without an answer, and listen.

        Raises:
            OSError: The address is in use.

        """
        self._ctx = ctx
        self._limits = LocalLimits(ctx.monotonic)
        self._executor = Executor(self.base, self.config, ctx.offload, self._saved)
        async for delivery in self._read_log():
            self.book.add(await readable(ctx.store, delivery.event))
        log.info(
            "%d sessions, %d models and samplers, %d calls to answer",
            *(len(self.book.sessions), len(self.book.targets), len(self.book.pending)),
        )
        for call in self.book.pending.values():
            self._enqueue(call)
        ctx.spawn("train", self._train())
        for index in range(_NUM_SAMPLE_CALLS_MAX):
            ctx.spawn(f"sample {index}", self._sample())
        url = await self._listener.start(self._build_app(self, self._listener.note_busy))
        log.info("listening at %s", url)
        self._on_listening(url)
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """Reload changed keys."""
        self._keys.reload()
        ctx.set_gauge("calls_pending", len(self.book.pending))
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Stop listening; what is not answered is answered after the next start."""
        await self._listener.stop()
        await self._executor.close()
        return ()

    def key_of(self, given: str) -> KeySpec:
        """Return the key of a request.

        Raises:
            ApiError: 401: the key is unknown; 403: it has no consent to storage.

        """
        # The SDK sends no key that does not begin with `tml-`.
        ring = self._keys.ring
        key = ring.find(f"Bearer {given}") or ring.find(f"Bearer {given.removeprefix('tml-')}")
        if key is None:
            text = "expected a key of this server in the header X-API-Key, also after tml-"
            raise ApiError(401, "invalid_api_key", text)
        if not key.storage_consent:
            text = "expected a key with storage_consent = true: every call is stored on the log"
            raise ApiError(403, "storage_consent", text)
        return key

    def new_session(self) -> str:
        """Return the id of a new session."""
        return f"s-{secrets.token_hex(8)}"

    async def accept(self, key: KeySpec, call: ClientCall) -> str:
        """Store a call; a repetition counts as the first call. Return the id of its answer.

        Raises:
            ApiError: 429, too much waits or was sent; 400, its number is not above the last.

        """
        # Not a number's: a sampler's first call has the number 0.
        request_id = call.target or call.session_id
        if call.kind not in UNANSWERED:
            request_id = f"{call.target}:{call.number}"
        async with self._accepting:
            target = self.book.targets.get(call.target)
            if target is not None and (target.has(call.number) or call.kind in UNANSWERED):
                return request_id
            self._check_order(call)
            await self._limits.enter(key)
            try:
                event = TinkerCalled(
                    request_id=request_id,
                    session_id=call.session_id,
                    kind=call.kind,
                    target=call.target,
                    number=call.number,
                    owner=TinkerOwner(tenant=key.tenant, key_id=key.key_id),
                    # No more bits: decoders of events take no larger numbers.
                    seed=secrets.randbits(52) if call.seed is None else call.seed % 2**52,
                    body=TinkerBody(data=call.body),
                )
                await self._ctx.publish(event)
            finally:
                await self._limits.leave(key, call.num_tokens)
            self.book.add(event)
            if call.kind not in UNANSWERED:
                self._enqueue(event)
        return request_id

    def _check_order(self, call: ClientCall) -> None:
        pending = self.config.num_pending_max
        too_large = self._pending_bytes + len(call.body) > self.config.pending_bytes_max
        if len(self.book.pending) >= pending or too_large:
            text = f"{len(self.book.pending)} calls are already waiting for answers"
            raise ApiError(429, "too_many_pending", text, retry_after_s=1.0)
        target = self.book.targets.get(call.target)
        if target is None or call.kind is TinkerKind.SAMPLE or not target.numbers:
            return
        # In the client's order: it sends one call of a model after the other.
        if call.number < target.numbers[-1]:
            raise invalid(
                f"expected a number above {target.numbers[-1]}, got {call.number}", "seq_id"
            )

    def _enqueue(self, call: TinkerCalled) -> None:
        self._pending_bytes += _inline(call)
        self._waiting[call.request_id] = asyncio.Event()
        queue = self._sampling if call.kind is TinkerKind.SAMPLE else self._training
        queue.put_nowait(call)

    async def answer(self, request_id: str, tenant: str) -> tuple[TinkerAnswered, bytes] | None:
        """Return the answer to a call, or None if it takes longer than `poll_s`.

        Raises:
            NoSuchError: The tenant has no such call.

        """
        target, _, number = request_id.rpartition(":")
        found = self.book.target(target, tenant, "request_id")
        if not number.isdigit() or not found.has(int(number)):
            raise NoSuchError(f"request_id: expected one of this key's tenant, got {request_id!r}")
        if (waiting := self._waiting.get(request_id)) is not None:
            try:
                async with asyncio.timeout(self.config.poll_s):
                    await waiting.wait()
            except TimeoutError:
                return None
        answered = self._answers.get(request_id)
        answered = answered or await self._ctx.last(TinkerAnswered, request_id)
        if answered is None:
            return None
        return answered, await body_of(self._ctx.store, answered.body)

    async def _saved(self, path: str) -> SavedState:
        entry = self.book.saved.get(path)
        saved = await self._ctx.last(TinkerSaved, entry.key) if entry is not None else None
        if saved is None:
            raise NoSuchError(f"path: there are no weights at {path!r}")
        state = await body_of(self._ctx.store, saved.state)
        if digest_of(state) != saved.digest:
            raise CorruptDataError(f"{path}: the bytes do not match their digest")
        return SavedState(path, saved.rank, saved.targets, None, state)

    async def _train(self) -> None:
        while True:
            call = await self._training.get()
            try:
                if call.number > 0:  # Call 0 makes the model.
                    await self._restore(call.target)
                outcome = await self._run(call)
            except (CodecError, CorruptDataError, NotFoundError) as error:
                # One model's damage must not end the server of all.
                log.exception("model %s cannot be restored", call.target)
                self._executor.models.pop(call.target, None)
                outcome = CallOutcome(error=f"{type(error).__name__}: {error}")
            await self._finish(call, outcome)
            await self._keep_some(call)

    async def _sample(self) -> None:
        while True:
            call = await self._sampling.get()
            await self._finish(call, await self._run(call))

    async def _run(self, call: TinkerCalled) -> CallOutcome:
        body = await body_of(self._ctx.store, call.body)
        target = self.book.targets[call.target]
        return await self._executor.run(call, body, target.path)

    async def _finish(self, call: TinkerCalled, outcome: CallOutcome) -> None:
        events: list[TinkerSaved | TinkerAnswered] = []
        if outcome.saved is not None:
            events.append(self._saved_event(call, outcome))
        answered = TinkerAnswered(
            request_id=call.request_id,
            kind=call.kind,
            digest=digest_of(outcome.body),
            weights_digest=outcome.weights_digest,
            optimizer_digest=outcome.optimizer_digest,
            error=outcome.error,
            is_refused=outcome.is_refused,
            body=TinkerBody(data=outcome.body),
        )
        # The weights first: who reads the answer may name them at once.
        await self._ctx.publish(*events, answered)
        for event in (*events, answered):
            self.book.add(event)
        self._remember(answered, len(outcome.body))
        self._pending_bytes -= _inline(call)
        self._waiting.pop(call.request_id).set()
        log.debug("call %s of kind %s answered %s", call.request_id, call.kind, outcome.error)

    def _saved_event(self, call: TinkerCalled, outcome: CallOutcome) -> TinkerSaved:
        saved, now = outcome.saved, self._ctx.now()
        assert saved is not None, "the caller checked"
        return TinkerSaved(
            path=saved.path,
            model_id=call.target,
            number=call.number,
            tenant=call.owner.tenant,
            rank=saved.rank,
            targets=saved.targets,
            digest=digest_of(saved.state),
            at=now,
            expires_at=now + saved.ttl_s if saved.ttl_s else 0.0,
            state=TinkerBody(data=saved.state),
        )

    def _remember(self, answered: TinkerAnswered, num_bytes: int) -> None:
        self._answers[answered.request_id] = answered
        self._answers_bytes += num_bytes
        while self._answers_bytes > _ANSWERS_BYTES_MAX:
            _, oldest = self._answers.popitem(last=False)
            self._answers_bytes -= (
                len(oldest.body.data) if isinstance(oldest.body, TinkerBody) else 0
            )

    async def _keep_some(self, call: TinkerCalled) -> None:
        """Save a model that has taken many steps, and models for which memory has no room."""
        models = self._executor.models
        model = models.get(call.target)
        if model is not None and model.num_steps >= self.config.keep_steps:
            await self._keep(call.target)
        while len(models) > self.config.num_models_max:
            name = next(iter(models))
            await self._keep(name)
            models.pop(name, None)
            log.info("model %s left memory", name)

    async def _keep(self, name: str) -> None:
        model = self._executor.models[name]
        # Gradients are not kept: the calls since the newest event give them again.
        if model.has_gradients or not model.num_steps:
            return
        done = [n for n in self.book.targets[name].numbers if f"{name}:{n}" not in self._waiting]
        weights, _ = await self._ctx.offload(model.digests)
        kept = TinkerKept(
            model_id=name,
            number=done[-1],
            rank=model.adapter.rank,
            targets=model.adapter.targets,
            weights_digest=weights,
            state=TinkerBody(data=await self._ctx.offload(model.state)),
        )
        await self._ctx.publish(kept)
        model.num_steps = 0

    async def _restore(self, name: str) -> None:
        """Restore a model from the log into memory: its newest state, then the calls since.

        Raises:
            CorruptDataError: The restored model differs from the original.

        """
        if name in self._executor.models:
            return
        after = -1
        kept = await self._ctx.last(TinkerKept, name)
        if kept is not None:
            model = await self._executor.make(name, lora_of(kept.rank, kept.targets))
            state = await body_of(self._ctx.store, kept.state)
            await self._ctx.offload(lambda: model.load(state, with_optimizer=True))
            if (await self._ctx.offload(model.digests))[0] != kept.weights_digest:
                raise CorruptDataError(f"{name}: the kept state differs from the model's")
            after = kept.number
        for number in self.book.targets[name].numbers:
            request_id = f"{name}:{number}"
            if number > after and request_id not in self._waiting:
                await self._repeat(name, request_id)
        log.info("model %s restored from call %d on", name, after + 1)

    async def _repeat(self, name: str, request_id: str) -> None:
        call = await self._ctx.last(TinkerCalled, request_id)
        before = await self._ctx.last(TinkerAnswered, request_id)
        assert call is not None and before is not None, f"{request_id} is on the log"
        if call.kind not in CHANGING:
            return
        if before.error:
            # The model may be missing, too, if it could not be made.
            if call.kind is TinkerKind.OPTIM_STEP and name in self._executor.models:
                self._executor.models[name].clear()
            return
        found = await self._run(call)
        if (found.error, digest_of(found.body)) != ("", before.digest) or (
            found.weights_digest != before.weights_digest
        ):
            raise CorruptDataError(f"{request_id}: its repetition differs: {found.error}")


def _inline(call: TinkerCalled) -> int:
    return len(call.body.data) if isinstance(call.body, TinkerBody) else call.body.num_bytes
