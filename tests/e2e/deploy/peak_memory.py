"""`python -m tests.e2e.deploy.peak_memory FOLDER [KEY=VALUE ...]`: memory of each process of a run.

Prints one JSON object: parameters of the policy, and of each process its peak of resident memory in
MiB and its processor seconds. Two policies give what a process needs by itself and by parameter.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.launched import TINY, live_processes

from penstock.infra.config.file import load_config
from penstock.infra.deploy.sizes import num_params

SAMPLE_S = 0.2
RUN_S_MAX = 900.0


def main() -> None:
    folder, *overrides = sys.argv[1:]
    words = [word for override in overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "penstock.infra.cli", "--runs-dir", folder, "run"]
    run = subprocess.Popen(
        [*command, "--config", str(TINY), "--run-id", "m1", *words], stdout=sys.stderr
    )
    peaks: dict[str, float] = {}
    used_s: dict[str, float] = {}
    deadline = time.monotonic() + RUN_S_MAX
    while run.poll() is None and time.monotonic() < deadline:
        for pid, line in live_processes().items():
            if pid != os.getpid() and (folder in line.split() or f"{folder}/m1" in line):
                with contextlib.suppress(OSError):
                    _sample(pid, _name(line), peaks, used_s)
        time.sleep(SAMPLE_S)
    run.kill()
    params = num_params(load_config(TINY, overrides).policy)
    print(json.dumps({"parameters": params, "peak_mib": peaks, "processor_s": used_s}, indent=1))


def _name(line: str) -> str:
    roles = re.search(r" actor (.*) --run ", line)
    return roles[1] if roles else Path(line.split(maxsplit=1)[0]).name.replace("python", "launcher")


def _sample(pid: int, name: str, peaks: dict[str, float], used_s: dict[str, float]) -> None:
    status = Path(f"/proc/{pid}/status").read_text()
    if found := re.search(r"VmHWM:\s+(\d+)", status):
        peaks[name] = max(peaks.get(name, 0.0), int(found[1]) / 1024)
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    used_s[name] = max(used_s.get(name, 0.0), ticks)


if __name__ == "__main__":
    main()
