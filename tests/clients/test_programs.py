"""Programs of other people's clients against the gateway, each in the client's own environment."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from .checkpoint import write_agent_model
from .served import KEY, SLOW_KEY, Service, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]
ENVIRONMENTS = Path(__file__).parents[2] / ".venv-clients"
PROGRAMS = {
    "openai_chat": "sdk",
    "openai_responses": "sdk",
    "anthropic_messages": "sdk",
    "langchain_chat": "sdk",
    "pydantic_agent": "sdk",
    "openai_agents": "sdk",
    "litellm_completion": "litellm",
}
PROGRAM_S_MAX = 300.0


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("served")
    write_agent_model(folder / "model", "bash", {"command": "ls"})
    with serving(folder / "model", folder) as service:
        yield service


async def output_of(
    program: Path,
    *arguments: str,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return what a program printed; it sees no other variable of this process than the path."""
    process = await asyncio.create_subprocess_exec(
        *(str(program), *arguments),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **(environment or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PROGRAM_S_MAX):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, (out + err).decode()[-4000:]
    return out.decode()


@pytest.mark.parametrize("name", PROGRAMS)
async def test_every_case_of_a_client_passes(name, service):
    python = ENVIRONMENTS / PROGRAMS[name] / "bin/python"
    if not python.exists():
        pytest.skip("no environment of the clients: make clients-env")
    program = Path(__file__).parent / "programs" / f"{name}.py"
    before = Counter(await service.prefixes())
    said = await output_of(python, str(program), service.url, KEY, SLOW_KEY)
    prefixes = Counter(await service.prefixes()) - before
    cases = [json.loads(line) for line in said.splitlines()]
    failed = {one["case"]: one["error"] for one in cases if one["error"]}
    num_passed = len(cases) - len(failed)
    print(f"{name}: {num_passed} of {len(cases)} cases passed; prefixes: {dict(prefixes)}")
    for case, error in failed.items():
        print(f"  {case}: {error}")
    assert cases
    assert not failed
    assert prefixes.keys() == {"exact"}, prefixes
