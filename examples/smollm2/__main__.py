"""Writes `demonstrations.jsonl`: how the tool is called, as chat completions."""

import json
import random
from pathlib import Path

from penstock.examples.smollm2 import asked

NUM_DEMONSTRATIONS = 320


def main() -> None:
    """Write the demonstrations beside this file; the same each time."""
    draw = random.Random(0)
    with Path(__file__).with_name("demonstrations.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(NUM_DEMONSTRATIONS):
            text, name, line = asked("word", draw)
            arguments = json.dumps({"path": name, "content": line})
            call = {"name": "write_file", "arguments": arguments}
            reply = {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": call}],
            }
            messages = [{"role": "user", "content": text}, reply]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
