"""Bodies of `/v1/feedback`."""

import msgspec


class FeedbackBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/feedback`; `key`/`metric_name` and `score` are other names."""

    name: str = ""
    key: str = ""
    metric_name: str = ""
    value: float | bool | None = None
    score: float | bool | None = None
    feedback_id: str = ""
    request_id: str = ""
    session_id: str = ""
    """Instead of a request: the last one of the session."""
    user: str = ""
    """The end user who gives it, as the requests name users; default: who made the request."""
    weight: float = 1.0
    comment: str = ""
    correction: str = ""
    source: str = ""
    occurred_at: str = ""
    metadata: dict[str, str] | None = None


class FeedbackBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/feedback/batch`."""

    items: list[msgspec.Raw]
    """Bodies of `POST /v1/feedback`."""


class AmendmentBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `PATCH /v1/feedback/{feedback_id}`: only what changes."""

    value: float | bool | None = None
    weight: float | None = None
    comment: str | None = None
    correction: str | None = None
