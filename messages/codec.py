"""Registry of all messages, and their encoding as msgpack maps that other programs can read."""

from typing import Union

import msgspec

from penstock.messages.base import Message
from penstock.messages.control import (
    ActorFailed,
    ActorStarted,
    ItemCharged,
    ItemQuarantined,
    LogArchived,
    MessageRejected,
    RanksTaken,
    RunClosed,
    RunFinished,
    RunOpened,
    RunStarted,
)
from penstock.messages.episode import EpisodeSaved, EpisodeStepEnded, SetUpRecorded
from penstock.messages.errors import CodecError
from penstock.messages.feedback import (
    ConsentWithdrawn,
    ErasurePrepared,
    ErasureRequested,
    FeedbackLeftOut,
    FeedbackReceived,
    FeedbackRetracted,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
    UserErased,
)
from penstock.messages.gates import (
    CandidateChosen,
    ExperimentDecided,
    ExperimentStarted,
    GateEvaluated,
)
from penstock.messages.generation import (
    AbortGeneration,
    ChannelMoved,
    Generate,
    ReplicaReported,
    TokensSampled,
)
from penstock.messages.reading.parsing import parse_with
from penstock.messages.requests.episodes import EpisodePart, ListEpisodes, ReadEpisode
from penstock.messages.requests.gateways import LimitsChanged, ReplyKept
from penstock.messages.requests.ranks import (
    JoinRank,
    LoadRank,
    MakeVersion0,
    MeasureSamples,
    RankLoaded,
    RankSaved,
    SamplesMeasured,
    SaveRank,
    StepTaken,
    TakeStep,
)
from penstock.messages.requests.scheduler import GroupPlaced, PlaceGroup, ReleaseGroup, ReportHost
from penstock.messages.requests.tinker import TinkerAnswered, TinkerCalled, TinkerKept, TinkerSaved
from penstock.messages.reward import (
    EvalAnnounced,
    EvalCompleted,
    EvalRequested,
    StepGraded,
    Verdict,
)
from penstock.messages.rollout import RolloutFinished, TurnSampled
from penstock.messages.rpc import Ack, RemoteError
from penstock.messages.sandbox import (
    AcquireGroup,
    AcquireSandbox,
    AllowEgress,
    EgressRead,
    ExecCommand,
    ExecResult,
    FileRead,
    FilesListed,
    GroupLeased,
    GroupsRenewed,
    ListFiles,
    ReadEgress,
    ReadFile,
    ReleaseSandbox,
    RenewGroups,
    SandboxLeased,
    SandboxSaved,
    SaveSandbox,
    WriteFiles,
)
from penstock.messages.signals.episode_labels import EpisodeLabeled
from penstock.messages.signals.preferences import (
    Label,
    PreferencePair,
    PreferencesProgressed,
    PreferencesTrained,
)
from penstock.messages.signals.quarantine import FeedbackQuarantined, QuarantineReleased
from penstock.messages.task import CreditsChanged, GroupGranted, StartRollout
from penstock.messages.telemetry import (
    ActorReported,
    MidtrainProgressed,
    MonitorSnapshot,
    ProcessorUsed,
    ReadMonitor,
)
from penstock.messages.training import (
    ArithmeticChanged,
    BatchManifest,
    CheckpointSaved,
    MidtrainCompleted,
    StepCompleted,
)
from penstock.messages.weights import (
    ReadTiles,
    TileRead,
    UploadWeights,
    WeightsApplied,
    WeightsPublished,
    WeightsRelayed,
)

EVENTS = (
    StartRollout, TurnSampled, EpisodeSaved, EpisodeStepEnded, RolloutFinished,
    SetUpRecorded, StepGraded, Verdict, EpisodeLabeled,
    WeightsPublished, WeightsRelayed, WeightsApplied, GroupGranted, CreditsChanged,
    InferenceRecorded, InferenceCounted, FeedbackReceived, FeedbackRetracted, FeedbackLeftOut,
    LiveSampleJoined,
    ErasureRequested, ErasurePrepared, UserErased, ConsentWithdrawn,
    PreferencePair, Label, PreferencesTrained, FeedbackQuarantined, QuarantineReleased,
    BatchManifest, StepCompleted, MidtrainCompleted, CheckpointSaved,
    RunStarted, RunFinished, RunOpened, RunClosed, RanksTaken, ActorStarted, ActorFailed,
    LogArchived, ArithmeticChanged,
    ItemCharged, ItemQuarantined, EvalAnnounced, EvalRequested, EvalCompleted, ChannelMoved,
    CandidateChosen, ExperimentStarted, ExperimentDecided, GateEvaluated,
    LimitsChanged, ReplyKept,
    MessageRejected, ActorReported, ProcessorUsed, ReplicaReported, MidtrainProgressed,
    PreferencesProgressed,
    TinkerCalled, TinkerAnswered, TinkerSaved, TinkerKept,
)  # fmt: skip
"""Messages that are kept on streams."""

REQUESTS = (
    Generate, TokensSampled, AbortGeneration, RemoteError, Ack,
    AcquireSandbox, SandboxLeased, ExecCommand, ExecResult, ReadFile, FileRead,
    WriteFiles, ListFiles, FilesListed, ReleaseSandbox, ReadMonitor, MonitorSnapshot,
    ListEpisodes, ReadEpisode, EpisodePart,
    ReadTiles, TileRead, UploadWeights, PlaceGroup, GroupPlaced, ReleaseGroup, ReportHost,
    SaveSandbox, SandboxSaved, AcquireGroup, GroupLeased, RenewGroups, GroupsRenewed,
    AllowEgress, ReadEgress, EgressRead,
    JoinRank, MakeVersion0, LoadRank, RankLoaded, TakeStep, StepTaken,
    MeasureSamples, SamplesMeasured, SaveRank, RankSaved,
)  # fmt: skip
"""Requests and replies, which are not kept."""

# Explicit, not collected from subclasses: which messages decode must not depend on imports.
MESSAGES: tuple[type[Message], ...] = EVENTS + REQUESTS
"""All messages that the codec decodes."""


MESSAGE_BYTES_MAX = 64 << 20
"""Maximum bytes of one encoded message, parts in the store not counted.

Decoded, short strings take about ten times their encoded bytes.
"""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Union[MESSAGES]  # noqa: UP007
)


def encode(message: Message) -> bytes:
    """Encode a message as a msgpack map with a `type` entry and fields in declaration order."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Decode a message of any type in `MESSAGES`.

    Raises:
        CodecError: The data exceeds MESSAGE_BYTES_MAX, is not msgpack, has an unknown `type`, or
            has a field of the wrong type (the text gives its path).

    """
    if len(data) > MESSAGE_BYTES_MAX:
        text = f"expected at most {MESSAGE_BYTES_MAX} bytes, got {len(data)}"
        raise CodecError(f"undecodable message: {text}")
    message: Message = parse_with(_decoder, data, "undecodable message")
    return message
