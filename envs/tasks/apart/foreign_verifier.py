"""A foreign verifier, as the verifier's user: it reaches the code under test by `as-agent` alone.

Runs in the guest: `python3 FILE`. It starts the task's `test.sh` with a command `as-agent` in its
PATH, which hands a command to `code_side.py` and returns output and exit code. The working
directory is closed to this user, so no other way leads to the code.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from penstock.envs.tasks.apart.pipe import Pipe, PipeError

_HERE = Path("/tests/.apart")
_SOCKET = _HERE / "socket"
_RESULTS = Path("/logs/verifier")
_CLIENT = f"""\
#!/usr/bin/python3 -IS
import json, os, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({str(_SOCKET)!r})
line = line.makefile("rwb")
line.write(json.dumps(sys.argv[1:]).encode() + b"\\n")
line.flush()
code, out, err = json.loads(line.readline())
os.write(1, bytes.fromhex(out)) if out else None
os.write(2, bytes.fromhex(err)) if err else None
sys.exit(code if code >= 0 else 128 - code)
"""


class _Commands:
    """An end that hands out commands, and takes nothing but plain values."""

    def serve(self, message: dict[str, Any]) -> Any:
        """Refuse."""
        raise PipeError("the code under test asks for nothing")

    def describe_error(self, error: BaseException) -> Any:
        """Return the text."""
        return {"text": str(error)}

    def reraise(self, described: Any) -> None:
        """Raise its text."""
        raise PipeError(str(described.get("text")))

    def give(self, value: Any) -> Any:
        """Refuse."""
        raise PipeError("only plain values leave")

    def take(self, described: Any) -> Any:
        """Refuse."""
        raise PipeError("only plain values are taken")


def _serve(listening: socket.socket, pipe: Pipe) -> None:
    """Hand on one command after the other."""
    while True:
        with listening.accept()[0] as one, one.makefile("rwb") as line:
            argv = json.loads(line.readline())
            try:
                code, out, err = pipe.ask("run", argv=argv, folder="/work")
                answer = [int(code), out.hex(), err.hex()]
            except Exception as error:
                answer = [126, "", f"as-agent: {error}\n".encode("utf-8", "replace").hex()]
            line.write(json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Run the verifier and leave its reward to who asked."""
    (_HERE / "bin").mkdir(exist_ok=True)
    client = _HERE / "bin" / "as-agent"
    client.write_text(_CLIENT)
    client.chmod(0o700)
    end = socket.socket(fileno=3).makefile("rwb")
    pipe = Pipe(end, _Commands())
    _RESULTS.mkdir(mode=0o700)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(_SOCKET))
    listening.listen()
    threading.Thread(target=_serve, args=(listening, pipe), daemon=True).start()
    environment = {**os.environ, "PATH": f"{_HERE / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", "/tests/test.sh"]
    with (_RESULTS / "test-stdout.txt").open("wb") as said:
        done = subprocess.Popen(command, cwd="/tests", env=environment, stdout=said, stderr=said)
        done.wait()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
