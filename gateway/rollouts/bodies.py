"""Bodies of the requests and responses of external rollouts, also as an OpenAPI document."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

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


_ERRORS = {
    "400": "A field is invalid; `error.param` names it.",
    "401": "The key is unknown.",
    "404": "There is no open attempt with this key: it ended, or its client was silent.",
    "409": "The attempt is over, or has reached a limit of its task.",
    "503": "No generator answers.",
}


def document(model_routes: Sequence[str]) -> dict[str, Any]:
    """Return the OpenAPI document for generating clients, version 3.1.

    Args:
        model_routes: Paths of the model routes below an attempt.

    """
    types = [TakeBody, TakeReply, AttemptInfo, EndBody, EndReply]
    _, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    attempt = "/v1/rollouts/{rollout_id}"
    paths = {
        "/v1/rollouts/take": _operation("takeAttempt", "Take an attempt.", TakeBody, TakeReply),
        f"{attempt}/alive": _operation("keepAttempt", "Keep an attempt open.", None, None),
        f"{attempt}/end": _operation("endAttempt", "End an attempt.", EndBody, EndReply),
    }
    for path in model_routes:
        summary = f"As `{path}` of the gateway; point an agent's base URL here."
        name = "".join(part.capitalize() for part in path.split("/")[2:])
        paths[attempt + path] = _operation(f"sample{name}", summary, None, None)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock rollouts", "version": "1"},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(name: str, summary: str, body: type | None, reply: type | None) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "requestBody": {"content": _content(body)},
        "responses": {"200": {"description": "Done.", "content": _content(reply)}}
        | {status: {"description": text} for status, text in _ERRORS.items()},
    }
    path = {"name": "rollout_id", "in": "path", "required": True, "schema": {"type": "string"}}
    is_of_attempt = name != "takeAttempt"
    return {"post": operation} | ({"parameters": [path]} if is_of_attempt else {})


def _content(kind: type | None) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"} if kind else {"type": "object"}
    return {"application/json": {"schema": schema}}
