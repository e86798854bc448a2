"""Follow a run with nats-py and msgpack alone: `python examples/monitor.py runs/ID`.

Nothing is imported from Penstock. A run's folder holds all that a stranger needs: `state.json`, the
address of its server while it is up, and `asyncapi.json`, which says where each event is published
and what it holds.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import nats
from nats.js.api import DeliverPolicy

WANTED = ("GroupGranted", "WeightsPublished", "StepCompleted", "RunClosed")
WAIT_S = 300.0


def subjects(document: dict[str, Any], run_id: str) -> dict[str, str]:
    """Return message name -> subject of all its events, as the document's channels say."""
    return {
        name: channel["address"].format(run=run_id, type=name, key=">")
        for channel in document["channels"].values()
        for name in channel["messages"]
        if "{type}" in channel["address"]
    }


def read(data: bytes) -> dict[str, Any]:
    """Return an event as a dict; some of its tables have numbers as keys."""
    return msgpack.unpackb(data, strict_map_key=False)


def line(document: dict[str, Any], event: dict[str, Any]) -> str:
    """Return an event as a line: its numbers and short texts, by the fields of its schema."""
    fields = document["components"]["schemas"][event["type"]]["properties"]
    shown = {name: event[name] for name in fields if isinstance(event.get(name), int | float | str)}
    shown |= {name: event["metrics"][name] for name in ("pass_rate", "loss") if "metrics" in event}
    words = [
        f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={str(value)[:24]}"
        for name, value in shown.items()
        if name != "type"
    ]
    return f"[monitor] {event['type']}: {' '.join(words[:9])}"


async def follow(folder: Path) -> None:
    """Print the run's events from its first one on, until it closes."""
    state = json.loads((folder / "state.json").read_text())
    document = json.loads((folder / "asyncapi.json").read_text())
    client = await nats.connect(state["url"], connect_timeout=5)
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=1000)

    async def receive(message: Any) -> None:
        await events.put(read(message.data))

    for name in WANTED:
        await client.jetstream().subscribe(
            subjects(document, state["run_id"])[name],
            cb=receive,
            ordered_consumer=True,
            deliver_policy=DeliverPolicy.NEW if name == "RunClosed" else DeliverPolicy.ALL,
        )
    while (event := await asyncio.wait_for(events.get(), WAIT_S))["type"] != "RunClosed":
        print(line(document, event), flush=True)
    await client.close()


def main() -> None:
    """Wait until the run is up, and follow it."""
    folder = Path(sys.argv[1])
    deadline = time.monotonic() + WAIT_S
    while not (folder / "state.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    asyncio.run(follow(folder))


if __name__ == "__main__":
    main()
