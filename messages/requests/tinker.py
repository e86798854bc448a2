"""Events of `penstock tinker`: each call of a client, its answer, and what it saved."""

from enum import StrEnum
from typing import ClassVar

import msgspec

from penstock.messages.base import Claim, Event, Part, Stream
from penstock.messages.settings import NonNegativeInt


class TinkerKind(StrEnum):
    """What a call asks for."""

    SESSION = "session"
    MODEL = "model"
    LOAD = "load"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE = "save"
    SAVE_SAMPLER = "save_sampler"
    SAMPLER = "sampler"
    SAMPLE = "sample"


class TinkerBody(Part, frozen=True, kw_only=True):
    """A body as the client sent it, or as it was answered: JSON, protobuf or safetensors."""

    data: bytes


class TinkerOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Who called."""

    tenant: str
    key_id: str


class TinkerCalled(Event, frozen=True, kw_only=True):
    """Tinker server -> the log: a call was accepted and will be answered, once."""

    stream: ClassVar[Stream] = Stream.TINKER
    keyed_by: ClassVar[tuple[str, ...]] = ("request_id",)
    request_id: str
    """Follows from session, target and number, so that a repeated call is the same event."""
    session_id: str
    kind: TinkerKind
    target: str = ""
    """Model or sampler; empty for a session."""
    number: NonNegativeInt = 0
    """Position among the calls of its target."""
    owner: TinkerOwner
    seed: NonNegativeInt = 0
    """For whatever is drawn: the client's, or the server's where it gave none."""
    body: TinkerBody | Claim


class TinkerAnswered(Event, frozen=True, kw_only=True):
    """Tinker server -> the log: the answer to a call; a replay computes it again."""

    stream: ClassVar[Stream] = Stream.TINKER
    keyed_by: ClassVar[tuple[str, ...]] = ("request_id",)
    request_id: str
    kind: TinkerKind
    digest: str
    """BLAKE3 of the body."""
    weights_digest: str = ""
    """The adapters' master weights, where the call changed them."""
    optimizer_digest: str = ""
    error: str = ""
    """Why it failed; empty if it did not. A call that failed changed nothing, but that a failed
    step, too, ends the gradients before it."""
    is_refused: bool = False
    """Whether the call itself is at fault."""
    body: TinkerBody | Claim


class TinkerSaved(Event, frozen=True, kw_only=True):
    """Tinker server -> the log: weights that a client saved, by path."""

    stream: ClassVar[Stream] = Stream.TINKER
    keyed_by: ClassVar[tuple[str, ...]] = ("model_id", "number")
    path: str
    """`tinker://MODEL/weights/NAME` or `tinker://MODEL/sampler_weights/NAME`."""
    model_id: str
    number: NonNegativeInt
    """Number of the call that saved them."""
    tenant: str
    rank: NonNegativeInt
    targets: tuple[str, ...]
    digest: str
    """BLAKE3 of the state."""
    at: float
    """Unix time in seconds."""
    expires_at: float = 0.0
    """Unix time from which the path is refused; 0: never."""
    state: TinkerBody | Claim
    """Safetensors: master weights and moments, or published adapters."""


class TinkerKept(Event, frozen=True, kw_only=True):
    """Tinker server -> itself: a model after one of its calls, from which a restart goes on."""

    stream: ClassVar[Stream] = Stream.CREDITS
    """Keeps the newest event of each subject, on disk."""
    keyed_by: ClassVar[tuple[str, ...]] = ("model_id",)
    model_id: str
    number: NonNegativeInt
    """Number of the last call that it contains."""
    rank: NonNegativeInt
    targets: tuple[str, ...]
    weights_digest: str
    state: TinkerBody | Claim
