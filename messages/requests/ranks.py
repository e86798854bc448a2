"""Requests of the trainer to the ranks that hold its weights (service `rank.<number>`).

```
 trainer ── JoinRank, LoadRank, TakeStep, MeasureSamples, SaveRank, UploadWeights ──▶ each rank
         ◀── Ack every second, then one reply; metrics are rank 0's ───────
```
A session is one trainer's use of the ranks. A rank belongs to the first session that it sees and
exits when it sees another one, so that two trainers never share a process group.
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
    """Trainer -> each rank: join a session, or exit if in another. Answered by `Ack`."""

    session: str


class MakeVersion0(Message, frozen=True, kw_only=True):
    """Trainer -> ranks: create version 0 and save its checkpoint. Answered by `RankSaved`.

    A model of transformers is trained by all ranks, the own policy by rank 0 while the others wait.
    """

    session: str
    seed: int


class LoadRank(Message, frozen=True, kw_only=True):
    """Trainer -> each rank: load your part of a checkpoint. Answered by `RankLoaded`."""

    session: str
    object_key: str
    """Key of the checkpoint's head."""


class RankLoaded(Message, frozen=True, kw_only=True):
    """Rank -> trainer: the checkpoint is loaded."""

    step: int
    object_key: str
    weights_digest: str
    shapes: dict[str, list[NonNegativeInt]]
    """Shapes of the published tensors, by name."""
    float32: list[str] = []
    """Names of tensors published in float32; all others are bfloat16."""
    probe: list[float]
    """Values that the version computes for the probe, as in `WeightsPublished.probe`."""


class TakeStep(Message, frozen=True, kw_only=True):
    """Trainer -> each rank: take the step of a stored batch manifest. Answered by `StepTaken`."""

    session: str
    step: int


class StepTaken(Message, frozen=True, kw_only=True):
    """Rank -> trainer: result of a step; the fields are those of `StepCompleted`."""

    weights_digest: str
    optimizer_digest: str
    metrics: dict[str, float]
    staleness_tokens: dict[int, int]
    skipped: str = ""
    drift: dict[int, VersionDrift] = {}
    probe: list[float] = []
    """Values for the probe, as in `RankLoaded.probe`."""


class MeasureSamples(Message, frozen=True, kw_only=True):
    """Trainer -> each rank: compare the policy with those that sampled live requests.

    Answered by `SamplesMeasured`.
    """

    session: str
    policy_version: int
    samples: list[SampleEntry]


class SampleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Off-policy metrics of one live sample; the fields are those of `SampleEntry`."""

    ess: float
    ratio: float


class SamplesMeasured(Message, frozen=True, kw_only=True):
    """Rank -> trainer: metrics by sample id."""

    figures: dict[str, SampleFigures]


class SaveRank(Message, frozen=True, kw_only=True):
    """Trainer -> each rank: store a checkpoint. Answered by `RankSaved`."""

    session: str
    completed: MidtrainCompleted | StepCompleted
    ledger: dict[NonNegativeInt, LedgerRow]


class RankSaved(Message, frozen=True, kw_only=True):
    """Rank -> trainer: the checkpoint is complete."""

    object_key: str
