"""The interface of external rollouts as an OpenAPI document for generating clients."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.gateway.rollouts.bodies import AttemptInfo, EndBody, EndReply, TakeBody, TakeReply

_ERRORS = {
    "400": "A field is invalid; `error.param` names it.",
    "401": "The key is unknown.",
    "404": "There is no open attempt with this key: it ended, or its client was silent.",
    "409": "The attempt is over, or has reached a limit of its task.",
    "503": "No generator answers.",
}


def document(model_routes: Sequence[str]) -> dict[str, Any]:
    """Return the document, OpenAPI 3.1.

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
