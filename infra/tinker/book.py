"""What the log says of sessions, models, samplers and saved weights."""

from bisect import bisect_right

import msgspec

from penstock.infra.tinker.requests import (
    LoadBody,
    LoraBody,
    ModelBody,
    SamplerBody,
    SaveSamplerBody,
)
from penstock.messages.base import Claim, Event
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import PenstockError
from penstock.messages.reading.claims import fetch
from penstock.messages.reading.parsing import parse_json, parse_msgpack
from penstock.messages.requests.tinker import (
    TinkerAnswered,
    TinkerBody,
    TinkerCalled,
    TinkerKind,
    TinkerOwner,
    TinkerSaved,
)

TYPES: tuple[type[Event], ...] = (TinkerCalled, TinkerAnswered, TinkerSaved)
"""Events that the book is made of."""
_READ = frozenset({TinkerKind.MODEL, TinkerKind.LOAD, TinkerKind.SAMPLER, TinkerKind.SAVE_SAMPLER})
"""Calls whose bodies the book reads."""
UNANSWERED = frozenset({TinkerKind.SESSION, TinkerKind.SAMPLER})
"""Calls whose answer follows from the call."""


async def body_of(store: ObjectStore, body: TinkerBody | Claim) -> bytes:
    """Return the bytes of a body that may lie in the store."""
    if isinstance(body, Claim):
        body = parse_msgpack(await fetch(store, body), TinkerBody, body.object_key)
    return body.data


async def readable(store: ObjectStore, event: Event) -> Event:
    """Return an event of the log as `Book.add` takes it: with the body, if the book reads it."""
    if isinstance(event, TinkerCalled) and event.kind in _READ and isinstance(event.body, Claim):
        body = TinkerBody(data=await body_of(store, event.body))
        return msgspec.structs.replace(event, body=body)
    return event


class NoSuchError(PenstockError, LookupError):
    """A session, model, sampler or path that the caller does not have."""


class CallTarget(msgspec.Struct, kw_only=True):
    """A model or a sampler."""

    owner: TinkerOwner
    session_id: str
    lora: LoraBody | None = None
    """Adapter, if it is a model."""
    path: str = ""
    """Weights that a sampler samples with; empty for the base alone."""
    numbers: list[int] = []
    """Numbers of its calls, ascending."""

    def has(self, number: int) -> bool:
        """Whether the call is on the log."""
        at = bisect_right(self.numbers, number)
        return at > 0 and self.numbers[at - 1] == number


class SavedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Saved weights without their bytes."""

    key: str
    """Key of its `TinkerSaved`."""
    tenant: str
    lora: LoraBody
    at: float
    expires_at: float
    num_bytes: int


class Book:
    """Follows from the events alone; grows with what clients created, and a number per call."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.sessions: dict[str, TinkerOwner] = {}
        self.targets: dict[str, CallTarget] = {}
        self.saved: dict[str, SavedWeights] = {}
        """By path; a name that was overwritten refers to the newest weights."""
        self.pending: dict[str, TinkerCalled] = {}
        """Calls without an answer, in the order of the log."""

    def add(self, event: Event) -> None:
        """Add an event, as `readable` returns it; adding it again changes nothing."""
        if isinstance(event, TinkerSaved):
            self.saved[event.path] = SavedWeights(
                key=event.key(),
                tenant=event.tenant,
                lora=lora_of(event.rank, event.targets),
                at=event.at,
                expires_at=event.expires_at,
                num_bytes=_size(event.state),
            )
        elif isinstance(event, TinkerAnswered):
            self.pending.pop(event.request_id, None)
        elif isinstance(event, TinkerCalled):
            self._called(event)

    def _called(self, event: TinkerCalled) -> None:
        if event.kind is TinkerKind.SESSION:
            self.sessions[event.session_id] = event.owner
            return
        target = self.targets.get(event.target)
        if target is None:
            target = CallTarget(owner=event.owner, session_id=event.session_id)
            self.targets[event.target] = target
            body = event.body.data if isinstance(event.body, TinkerBody) else b""
            if event.kind is TinkerKind.MODEL:
                target.lora = parse_json(body, ModelBody, "body").lora_config
            elif event.kind is TinkerKind.LOAD:
                path = parse_json(body, LoadBody, "body").path
                target.lora = self.saved[path].lora if path in self.saved else None
            elif event.kind is TinkerKind.SAMPLER:
                target.path = parse_json(body, SamplerBody, "body").model_path or ""
        if event.kind in UNANSWERED:
            return
        if event.kind is TinkerKind.SAVE_SAMPLER and isinstance(event.body, TinkerBody):
            asked = parse_json(event.body.data, SaveSamplerBody, "body")
            if asked.path is None and asked.sampling_session_seq_id is not None:
                name = sampler_id(event.session_id, asked.sampling_session_seq_id)
                sampler = CallTarget(owner=event.owner, session_id=event.session_id)
                sampler.path = saved_path(event, None)
                self.targets.setdefault(name, sampler)
        at = bisect_right(target.numbers, event.number)
        if not at or target.numbers[at - 1] != event.number:
            target.numbers.insert(at, event.number)
            self.pending[event.request_id] = event

    def target(self, name: str, tenant: str, what: str) -> CallTarget:
        """Return a model or sampler of a tenant.

        Raises:
            NoSuchError: It has none of this name; the text begins with `what`.

        """
        target = self.targets.get(name)
        # The same words for what another tenant has: names tell nothing.
        if target is None or target.owner.tenant != tenant:
            raise NoSuchError(f"{what}: this key's tenant has none named {name!r}")
        return target

    def weights(self, path: str, tenant: str, folder: str, now: float) -> SavedWeights:
        """Return the saved weights of a path.

        Raises:
            NoSuchError: There are none, or they have expired.

        """
        found = self.saved.get(path)
        if found is None or found.tenant != tenant or path.split("/")[3] != folder:
            raise NoSuchError(f"path: expected {folder} that this key's tenant saved, got {path!r}")
        if found.expires_at and now >= found.expires_at:
            raise NoSuchError(f"path: {path!r} has expired")
        return found

    def num_models(self, tenant: str) -> int:
        """Return how many models a tenant has."""
        own = (each for each in self.targets.values() if each.owner.tenant == tenant)
        return sum(each.lora is not None for each in own)


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def targets_of(lora: LoraBody, *, is_dense: bool) -> tuple[str, ...]:
    """Return the matrices that a request's adapter is for: experts are not adapted."""
    attention = _ATTENTION if lora.train_attn else ()
    return attention + (_FEED_FORWARD if lora.train_mlp and is_dense else ())


def lora_of(rank: int, targets: tuple[str, ...]) -> LoraBody:
    """Return the request that gives an adapter."""
    has = {"train_attn": _ATTENTION[0] in targets, "train_mlp": _FEED_FORWARD[0] in targets}
    return LoraBody(rank=rank, train_unembed=False, **has)


def _size(state: object) -> int:
    return len(state.data) if isinstance(state, TinkerBody) else getattr(state, "num_bytes", 0)


def saved_path(call: TinkerCalled, name: str | None) -> str:
    """Return the path of what a call saves; without a name, one that no client can give."""
    folder = "weights" if call.kind is TinkerKind.SAVE else "sampler_weights"
    return f"tinker://{call.target}/{folder}/{name or f'~{call.number}'}"


def sampler_id(session_id: str, number: int) -> str:
    """Return the id of a session's sampler."""
    return f"{session_id}:sample:{number}"


def model_id(session_id: str, number: int) -> str:
    """Return the id of a session's model; the SDK derives the same."""
    return f"{session_id}:train:{number}"
