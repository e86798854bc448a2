"""AsyncAPI document of the messages, generated from their types.

`python -m penstock.messages.reading.asyncapi > asyncapi.json`
"""

import inspect
import json
import sys
from typing import Any

import msgspec

from penstock.messages.base import FORMAT, Event, Message, Stream
from penstock.messages.codec import EVENTS, MESSAGES, REQUESTS
from penstock.messages.streams import STREAMS

_SCHEMAS = "#/components/schemas/{name}"


def document() -> dict[str, Any]:
    """Return the AsyncAPI 3.0 document, with a channel per stream and one for all requests."""
    _, schemas = msgspec.json.schema_components(MESSAGES, ref_template=_SCHEMAS)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Penstock events",
            "version": str(FORMAT),
            "description": "Messages are msgpack maps with a `type` entry that names their class.",
        },
        "defaultContentType": "application/msgpack",
        "channels": {str(stream): _channel(stream) for stream in Stream}
        | {
            "rpc": {
                "address": "ps.{run}.rpc.{service}",
                "description": "Request and replies; not kept.",
                "parameters": {"run": {}, "service": {}},
                "messages": _references(REQUESTS),
            }
        },
        "components": {
            "messages": {
                kind.__name__: {
                    "name": kind.__name__,
                    "summary": inspect.getdoc(kind) or "",
                    "payload": {"$ref": _SCHEMAS.format(name=kind.__name__)},
                }
                for kind in MESSAGES
            },
            "schemas": schemas,
        },
    }


def _channel(stream: Stream) -> dict[str, Any]:
    spec = STREAMS[stream]
    return {
        "address": f"ps.{{run}}.{stream}.{{type}}.{{key}}",
        "description": (
            f"Retention: {spec.retention}. Duplicate keys are refused by: {spec.dedup}. "
            f"Payloads above {spec.max_event_bytes} bytes are sent by claim check."
        ),
        "parameters": {"run": {}, "type": {}, "key": {}},
        "messages": _references([kind for kind in EVENTS if kind.stream is stream]),
    }


def _references(kinds: "list[type[Event]] | tuple[type[Message], ...]") -> dict[str, Any]:
    return {k.__name__: {"$ref": f"#/components/messages/{k.__name__}"} for k in kinds}


def main() -> None:
    """Print the document as JSON."""
    json.dump(document(), sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
