"""An agent's step: search, edit, run the tests, commit; in a machine and on the host."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.envs.sandbox import Sandbox, SandboxBackend
from penstock.messages.telemetry import percentile

Step = Callable[[int], Awaitable[None]]

TIMEOUT_S = 300.0
NUM_AGENTS = 8
"""At once, each in a machine of its own."""
NUM_STEPS = {"qemu-tcg": 1}
NUM_STEPS_DEFAULT = 3
"""Of each agent, after the first, which is not counted: it finds caches cold."""
EDIT = (
    "import sys; p = 'target.py'; s = open(p).read(); open(p, 'w').write(s + f'# {sys.argv[1]}\\n')"
)
FILES = {
    "target.py": b"def double(x):\n    return 2 * x\n",
    "test_target.py": b"import unittest\nfrom target import double\n\n"
    b"class T(unittest.TestCase):\n"
    b"    def test_it(self):\n        self.assertEqual(double(2), 4)\n",
}
GIT = "git -c user.name=a -c user.email=a@b -c commit.gpgsign=false"
SET_UP = f"git init -q . && git add -A && {GIT} commit -qm start"
STEP = (
    "grep -rn double --include=*.py . > /dev/null"
    f' && python3 -I -S -c "{EDIT}" $0'
    " && python3 -m unittest -q test_target 2> /dev/null"
    f" && {GIT} commit -qam step"
)


async def steps_per_s(backend: SandboxBackend) -> float:
    """Return how many steps a second `NUM_AGENTS` agents take together."""
    machines: list[Sandbox] = []
    try:
        for _ in range(NUM_AGENTS):
            machine = await backend.start(timeout_s=TIMEOUT_S)
            machines.append(machine)
            await machine.write_files(FILES)
            await _in_machine(machine, SET_UP, "")
        agents: list[Step] = [
            lambda n, m=machine: _in_machine(m, STEP, str(n)) for machine in machines
        ]
        return await _rate(agents, NUM_STEPS.get(backend.name, NUM_STEPS_DEFAULT))
    finally:
        for machine in machines:
            await machine.close()


async def _rate(agents: list[Step], num_steps: int) -> float:
    await asyncio.gather(*(step(0) for step in agents))

    async def run(step: Step) -> None:
        for number in range(1, num_steps + 1):
            await step(number)

    began = time.perf_counter()
    await asyncio.gather(*(run(step) for step in agents))
    return len(agents) * num_steps / (time.perf_counter() - began)


async def _in_machine(machine: Sandbox, script: str, argument: str) -> None:
    result = await machine.exec(["sh", "-c", script, argument], timeout_s=TIMEOUT_S)
    if result.exit_code != 0:
        raise RuntimeError(f"the step failed in the machine: {result}")


async def bench_native() -> dict[str, float]:
    """Return the host's own figures for the same programs."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        places = [Path(folder) / str(n) for n in range(NUM_AGENTS)]
        await asyncio.to_thread(_prepare, places)
        for place in places:
            await _on_host(place, ["sh", "-c", SET_UP])
        trues = await times_ms(lambda: _on_host(places[0], ["true"]), 30)
        python = ["python3", "-I", "-S", "-B", "-c", "1"]
        pythons = await times_ms(lambda: _on_host(places[0], python), 30)
        agents: list[Step] = [
            lambda n, p=place: _on_host(p, ["sh", "-c", STEP, str(n)]) for place in places
        ]
        rate = await _rate(agents, NUM_STEPS_DEFAULT)
    return {
        "exec_ms_p50": round(percentile(trues, 50), 3),
        "python_ms_p50": round(percentile(pythons, 50), 3),
        "agent_steps_per_s": round(rate, 3),
    }


def _prepare(places: list[Path]) -> None:
    for place in places:
        place.mkdir()
        for name, data in FILES.items():
            (place / name).write_bytes(data)


async def _on_host(place: Path, argv: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*argv, cwd=place, env={"PATH": "/usr/bin:/bin"})
    if await process.wait() != 0:
        raise RuntimeError(f"the step failed on the host: {argv}")


async def times_ms(work: Callable[[], Awaitable[object]], repeats: int) -> list[float]:
    """Return how long each of several runs took, one after the other, in milliseconds."""
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        await work()
        times.append((time.perf_counter() - began) * 1000)
    return times
