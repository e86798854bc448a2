"""Requests of the trainer to the ranks that hold its weights: service `rank.<number>`.

```
 trainer ── JoinRank, LoadRank, TakeStep, MeasureSamples, SaveRank, UploadWeights ──▶ each rank
         ◀── Ack every second, then one reply; figures are rank 0's ───────
```
A session is one use of the ranks by one trainer. A rank belongs to the first session that it sees,
and ends when it sees another one, so that no two trainers ever share a process group.
"""

import msgspec

from penstock.messages.base import Message
from penstock.messages.settings import NonNegativeInt
from penstock.messages.training import (
    LedgerRow,
    MidtrainCompleted,
    SampleEntry,
    StepCompleted,
    VersionDrift,
)


def rank_service(rank: int) -> str:
    """Return the name of one rank's service."""
    return f"rank.{rank}"


class JoinRank(Message, frozen=True, kw_only=True):
    """Trainer -> each rank: belong to a session, or end. Answered by `Ack`."""

    session: str


class MakeVersion0(Message, frozen=True, kw_only=True):
    """Trainer -> rank 0: make version 0 and save its checkpoint; the other ranks wait.

    Answered by `RankSaved`.
    """

    session: str
    seed: int


class LoadRank(Message, frozen=True, kw_only=True):
    """Trainer -> each rank: load its part of a checkpoint. Answered by `RankLoaded`."""

    session: str
    object_key: str
    """Head of the checkpoint."""


class RankLoaded(Message, frozen=True, kw_only=True):
    """Rank -> trainer: it is at the version of a checkpoint."""

    step: int
    object_key: str
    weights_digest: str
    shapes: dict[str, list[NonNegativeInt]]
    """Of the tensors that are published, by name."""
    float32: list[str] = []
    """Those that are published in float32, all others being bfloat16."""
    probe: list[float]
    """What the version computes, as `WeightsPublished.probe`."""


class TakeStep(Message, frozen=True, kw_only=True):
    """Trainer -> each rank: take the step of a stored manifest. Answered by `StepTaken`."""

    session: str
    step: int


class StepTaken(Message, frozen=True, kw_only=True):
    """Rank -> trainer: what a step did; the fields are those of `StepCompleted`."""

    weights_digest: str
    optimizer_digest: str
    metrics: dict[str, float]
    staleness_tokens: dict[int, int]
    skipped: str = ""
    drift: dict[int, VersionDrift] = {}
    probe: list[float] = []
    """As `RankLoaded.probe`."""


class MeasureSamples(Message, frozen=True, kw_only=True):
    """Trainer -> each rank: compare the policy with those that drew live samples.

    Answered by `SamplesMeasured`.
    """

    session: str
    policy_version: int
    samples: list[SampleEntry]


class SampleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One live sample; the fields are those of `SampleEntry`."""

    ess: float
    ratio: float


class SamplesMeasured(Message, frozen=True, kw_only=True):
    """Rank -> trainer: figures by sample."""

    figures: dict[str, SampleFigures]


class SaveRank(Message, frozen=True, kw_only=True):
    """Trainer -> each rank: store a checkpoint. Answered by `RankSaved`."""

    session: str
    completed: MidtrainCompleted | StepCompleted
    ledger: dict[NonNegativeInt, LedgerRow]


class RankSaved(Message, frozen=True, kw_only=True):
    """Rank -> trainer: the checkpoint is complete."""

    object_key: str
