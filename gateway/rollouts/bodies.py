"""Bodies of the requests and responses of external rollouts."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from penstock.messages.task import Limits


class TakeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /v1/rollouts/take`."""

    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds to wait for an attempt; capped at the service's maximum."""


class ExternalTask(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may know of a task."""

    task_id: str
    category: str
    source: str
    instruction: str
    files: dict[str, str]
    """Text files that the agent starts with, by path."""
    binaries: dict[str, str]
    """Other files, as base64."""
    limits: Limits


class AttemptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a task, and what its client needs to play it."""

    rollout_id: str
    group_id: str
    """Attempts of a group share a task and are compared with each other."""
    member: int
    group_size: int
    purpose: str
    """`train`, or `eval` for a held-out task."""
    policy_version: int
    url: str
    """Base of the attempt's own routes, for `/alive` and `/end`."""
    base_url: str
    """Base URL for OpenAI's clients: `url` and `/v1`. Anthropic's clients take `url`."""
    api_key: str
    """Bearer key that is valid only for this attempt."""
    model: str
    lease_s: float
    """Seconds of silence after which the attempt ends as lost."""
    task: ExternalTask


class TakeReply(msgspec.Struct, frozen=True):
    """Response of `POST /v1/rollouts/take`."""

    attempt: AttemptInfo | None
    """None if there was none in time."""


class EndReply(msgspec.Struct, frozen=True):
    """Response of `POST /v1/rollouts/{id}/end`."""

    end: str
    """How the attempt ended, e.g. `finished` or `turn_limit`."""
    num_turns: int


class EndBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/rollouts/{id}/end`."""

    reward: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Reward from 0 to 1; None if the run's own judge grades `files`."""
    outcome: Literal["finished", "failed", "lost"] = "finished"
    """`failed`: the policy made the attempt impossible to grade, and gets reward 0. `lost`: the
    client's environment failed, and the attempt is not trained."""
    files: Mapping[str, str] = {}
    """Changed and added text files by path, for the run's own judge."""
    binaries: Mapping[str, str] = {}
    """The same for other files, as base64."""
    deleted: list[str] = []
    """Paths of deleted files."""
    detail: str = ""
    """What happened, for the record; at most 1000 characters."""
