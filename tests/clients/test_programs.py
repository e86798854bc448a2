"""Programs of other people's clients against the gateway, each in the client's own environment."""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from .checkpoint import write_agent_model
from .served import KEY, SLOW_KEY, serving

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
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_agent_model(folder, "bash", {"command": "ls"})
    return folder


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
async def test_every_case_of_a_client_passes(name, model, tmp_path):
    python = ENVIRONMENTS / PROGRAMS[name] / "bin/python"
    if not python.exists():
        pytest.skip("no environment of the clients: make clients-env")
    program = Path(__file__).parent / "programs" / f"{name}.py"
    async with serving(model, tmp_path) as service:
        said = await output_of(python, str(program), service.url, KEY, SLOW_KEY)
        prefixes = await service.prefixes()
    cases = [json.loads(line) for line in said.splitlines()]
    failed = {one["case"]: one["error"] for one in cases if one["error"]}
    print(f"{name}: {len(cases) - len(failed)} of {len(cases)} cases passed; prefixes: {prefixes}")
    for case, error in failed.items():
        print(f"  {case}: {error}")
    assert cases
    assert not failed
    assert prefixes.keys() == {"exact"}, prefixes
