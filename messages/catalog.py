"""Every message there is: the codec decodes these and no others."""

from penstock.messages.base import Message
from penstock.messages.control import (
    ActorFailed,
    ActorStarted,
    MessageRejected,
    RunFinished,
    RunStarted,
)
from penstock.messages.feedback import (
    FeedbackReceived,
    FeedbackRetracted,
    InferenceRecorded,
    LiveSampleJoined,
)
from penstock.messages.generation import AbortGeneration, Ack, Generate, RemoteError, TokensSampled
from penstock.messages.pacing import CreditsChanged, EvalCompleted, EvalRequested
from penstock.messages.reward import Verdict
from penstock.messages.rollout import EpisodeSaved, RolloutFinished, TurnSampled
from penstock.messages.sandbox import (
    AcquireSandbox,
    AllowEgress,
    CommandFinished,
    EgressRead,
    ExecCommand,
    FileRead,
    FilesListed,
    GroupPlaced,
    ListFiles,
    PlaceGroup,
    ReadEgress,
    ReadFile,
    ReleaseGroup,
    ReleaseSandbox,
    ReportHost,
    SandboxLeased,
    SandboxSaved,
    SaveSandbox,
    WriteFiles,
)
from penstock.messages.scheduler import AcquireGroup, GroupLeased, GroupsRenewed, RenewGroups
from penstock.messages.task import StartRollout
from penstock.messages.telemetry import (
    ActorReported,
    MidtrainProgressed,
    MonitorSnapshot,
    ReadMonitor,
)
from penstock.messages.training import (
    BatchManifest,
    CheckpointSaved,
    MidtrainCompleted,
    StepCompleted,
)
from penstock.messages.weights import (
    ReadTiles,
    ShipWeights,
    TileRead,
    WeightsApplied,
    WeightsPublished,
    WeightsRelayed,
)

EVENTS = (
    StartRollout, TurnSampled, EpisodeSaved, RolloutFinished, Verdict,
    WeightsPublished, WeightsRelayed, WeightsApplied, CreditsChanged,
    InferenceRecorded, FeedbackReceived, FeedbackRetracted, LiveSampleJoined,
    BatchManifest, StepCompleted, MidtrainCompleted, CheckpointSaved,
    RunStarted, RunFinished, ActorStarted, ActorFailed, EvalRequested, EvalCompleted,
    MessageRejected, ActorReported, MidtrainProgressed,
)  # fmt: skip
"""Kept on streams."""

REQUESTS = (
    Generate, TokensSampled, AbortGeneration, RemoteError, Ack,
    AcquireSandbox, SandboxLeased, ExecCommand, CommandFinished, ReadFile, FileRead,
    WriteFiles, ListFiles, FilesListed, ReleaseSandbox, ReadMonitor, MonitorSnapshot,
    ReadTiles, TileRead, ShipWeights, PlaceGroup, GroupPlaced, ReleaseGroup, ReportHost,
    SaveSandbox, SandboxSaved, AcquireGroup, GroupLeased, RenewGroups, GroupsRenewed,
    AllowEgress, ReadEgress, EgressRead,
)  # fmt: skip
"""Asked and answered, not kept."""

MESSAGES: tuple[type[Message], ...] = EVENTS + REQUESTS
