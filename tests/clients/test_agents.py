"""Coding agents of other people against the gateway: they call a tool, see its result, and end."""

import json
import subprocess
from pathlib import Path

import pytest

from penstock.messages.feedback import InferenceCounted, InferenceRecorded

from .checkpoint import ANSWERS, write_agent_model
from .served import KEY, serving
from .test_programs import ENVIRONMENTS, output_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]
TASK = "Fix the tests."
MARK = "touch made-by-the-agent"


@pytest.fixture
def checkout(tmp_path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def needed(path: str) -> Path:
    program = ENVIRONMENTS / path
    if not program.exists():
        pytest.skip(f"no {path}: make clients-env")
    return program


async def check_log(service, *, turns: int, is_stored: bool = True) -> None:
    """Expect all turns in one session, each context with the turn before it as it was sampled."""
    recorded = await service.events(InferenceRecorded)
    counted = await service.events(InferenceCounted)
    assert [len(recorded), len(counted)] == ([turns, 0] if is_stored else [0, turns])
    assert len({event.session_id for event in recorded}) <= 1
    assert len({event.chain for event in recorded}) <= 1
    assert await service.prefixes() == {"exact": turns - 1}


async def test_mini_swe_agent_calls_reads_and_submits(tmp_path, checkout):
    mini = needed("mini/bin/mini")
    model = tmp_path / "model"
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    write_agent_model(model, "bash", {"command": MARK}, {"command": submit})
    home = {"HOME": str(tmp_path), "MSWEA_CONFIGURED": "true", "OPENAI_API_KEY": KEY}
    home |= {"MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path), "MSWEA_COST_TRACKING": "ignore_errors"}
    with serving(model, tmp_path) as service:
        url = f"model.model_kwargs.api_base={service.url}/v1"
        await output_of(
            *(mini, "-y", "--exit-immediately", "-l", "0", "-t", TASK, "-m", "openai/policy"),
            *("-c", "mini.yaml", "-c", url, "-o", str(tmp_path / "out.json")),
            folder=checkout,
            environment=home,
        )
        await check_log(service, turns=2)
    assert json.loads((tmp_path / "out.json").read_text())["info"]["exit_status"] == "Submitted"
    assert (checkout / "made-by-the-agent").exists()


async def test_codex_calls_reads_and_answers(tmp_path, checkout):
    codex = needed("npm/node_modules/.bin/codex")
    model = tmp_path / "model"
    write_agent_model(model, "exec_command", {"cmd": MARK})
    (tmp_path / "codex").mkdir()
    with serving(model, tmp_path) as service:
        provider = {"name": "penstock", "base_url": f"{service.url}/v1", "env_key": "PENSTOCK_KEY"}
        provider |= {"wire_api": "responses"}
        lines = [f"{name} = {json.dumps(value)}" for name, value in provider.items()]
        (tmp_path / "codex/config.toml").write_text(
            'model = "policy"\nmodel_provider = "penstock"\nmodel_context_window = 65536\n'
            "[model_providers.penstock]\n" + "\n".join(lines) + "\n"
        )
        said = await output_of(
            *(codex, "exec", "--json", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", TASK),
            folder=checkout,
            environment={"CODEX_HOME": str(tmp_path / "codex"), "PENSTOCK_KEY": KEY},
        )
        await check_log(service, turns=2, is_stored=False)  # It sends store: false.
    assert any(answer in said for answer in ANSWERS), said
    assert (checkout / "made-by-the-agent").exists(), said


async def test_claude_code_calls_reads_and_answers(tmp_path, checkout):
    claude = needed("npm/node_modules/.bin/claude")
    model = tmp_path / "model"
    write_agent_model(model, "Bash", {"command": MARK, "description": "Touch."})
    home = {"HOME": str(tmp_path), "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_MODEL": "policy"}
    home |= {"ANTHROPIC_SMALL_FAST_MODEL": "policy", "DISABLE_TELEMETRY": "1"}
    home |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    with serving(model, tmp_path) as service:
        said = await output_of(
            *(claude, "-p", TASK, "--bare", "--output-format", "json", "--max-turns", "4"),
            *("--allowedTools", "Bash", "--model", "policy"),
            folder=checkout,
            environment=home | {"ANTHROPIC_BASE_URL": service.url},
        )
        await check_log(service, turns=2)
    assert json.loads(said)["result"] in ANSWERS, said
    assert (checkout / "made-by-the-agent").exists(), said
