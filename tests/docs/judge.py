"""The judge that docs/rewards.md configures, with a service that answers it."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.docs.commands import ROOT, blocks
from tests.unit.judge.test_judge_attacks import sections


class Judge(BaseHTTPRequestHandler):
    """Says yes to a sum of values, no to all else, and finds no cheats."""

    def do_POST(self) -> None:
        """Answer one question."""
        assert self.headers["Authorization"] == "Bearer sk-of-the-page"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": answer(body)}
        data = json.dumps({"model": body["model"], "choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of it."""


def answer(body: dict[str, Any]) -> str:
    asked = body["response_format"]["json_schema"]["schema"]["required"]
    if asked == ["choices"]:
        return json.dumps({"choices": []})
    inside, outside = sections(body)
    chosen = "yes" if "sum(values)" in inside else "no"
    return json.dumps({"choice": re.findall(rf"^([A-Z])\. {chosen}$", outside, re.MULTILINE)[0]})


@contextlib.contextmanager
def judging(folder: Path) -> Iterator[None]:
    """Write the page's `judged.toml`; while the block runs, its judge answers."""
    page = ROOT / "docs" / "rewards.md"
    [table] = [text for *_, text in blocks(page) if text.startswith("base = ")]
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{service.server_port}/v1"
        (folder / "judged.toml").write_text(table.replace("https://judge.example/v1", url))
        try:
            yield
        finally:
            service.shutdown()
