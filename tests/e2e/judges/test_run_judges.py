"""A whole run with a rubric judge over HTTP and auxiliary rewards; then with a dead judge."""

import asyncio
import json

import msgspec
import pytest
import tomli_w
from tests.judge_service import JudgeService, make_rubric

from ..launched import TINY, Launched, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(240)]
KEY = "sk-of-the-judge"


def letter(body: dict) -> str:
    """Vary, so that rewards do."""
    return "A" if len(body["messages"][1]["content"]) % 2 else "B"


async def launched_with(tmp_path, url: str) -> tuple[Launched, list[dict]]:
    """Run the tiny configuration with one judge; return the run and its verdicts."""
    key = tmp_path / "key"
    key.write_text(KEY)
    judge = msgspec.to_builtins(make_rubric(url, endpoint={"key_file": str(key)}))
    tables = {
        "base": str(TINY),
        "judge": {
            "judges": [_told(judge)],
            "scores_failed": True,
            "auxiliary": {"style": 0.02, "todos": 0.02},
        },
    }
    config = tmp_path / "run.toml"
    config.write_text(tomli_w.dumps(tables))
    run = Launched(tmp_path, config=config)
    code = await asyncio.to_thread(run.wait)
    assert code == 0, run.output
    run.check_sound(steps=4)
    told = await asyncio.to_thread(penstock, tmp_path, "log", "cat", "r1", "--type", "Verdict")
    verdicts = [json.loads(line) for line in told.stdout.splitlines()]
    return run, [one for one in verdicts if one["purpose"] == "train"]


def _told(table: dict) -> dict:
    """Leave out what TOML has no word for."""
    return {name: value for name, value in table.items() if value is not None}


async def _check_audit(tmp_path, audit: dict, verdicts: list[dict]) -> None:
    """Hold flags against the run's verdicts, and see them in the episode that is shown."""
    graded = {one["rollout_id"] for one in verdicts if one["outcome"] in {"solved", "failed"}}
    assert audit["num_groups"] == 4 == audit["num_flagged"], "a letter each"
    assert audit["flags"].keys() <= graded and audit["num_attempts"] > 4
    rollout_id = next(iter(audit["flags"]))
    shown = await asyncio.to_thread(penstock, tmp_path, "show", "r1", rollout_id, "--json")
    findings = json.loads(shown.stdout)["verdict"]["findings"]
    assert [one["kind"] for one in findings] == ["contrast"]


async def test_rewards_are_composed_of_several_judges_and_replayed(tmp_path):
    service = JudgeService(letter)
    async with service.serving():
        run, verdicts = await launched_with(tmp_path, service.url)
        num_asked = len(service.bodies)
        words = ("judge", "audit", str(tmp_path / "run.toml"), "--run", "r1", "--groups", "4")
        audited = await asyncio.to_thread(penstock, tmp_path, *words, "--json")
    assert audited.returncode == 0, audited.stderr
    await _check_audit(tmp_path, json.loads(audited.stdout.splitlines()[-1]), verdicts)
    scored = [one for one in verdicts if one.get("scores")]
    assert scored and len(service.bodies) > 0
    for one in scored:
        assert sum(one["components"].values()) == pytest.approx(one["reward"])
        assert {"auxiliary.style", "auxiliary.todos"} <= one["components"].keys()
    judged = [one for one in scored if "judge.quality" in one["components"]]
    assert {one["components"]["judge.quality"] for one in judged} <= {0.0, 0.2}
    figures = run.summary["replay"]
    assert figures["verdicts_checked"] >= len(verdicts) and figures["verdicts_different"] == 0
    cost = run.summary["judges"]["quality/right"]
    assert cost["prompt_tokens"] == 100 * num_asked and cost["failed"] == 0
    assert all(headers["Authorization"] == f"Bearer {KEY}" for headers in service.headers)
    for file in (file for file in run.folder.rglob("*") if file.is_file()):
        assert KEY.encode() not in file.read_bytes(), file


async def test_a_dead_judge_ends_no_run_and_the_status_says_why(tmp_path):
    run, verdicts = await launched_with(tmp_path, "http://127.0.0.1:9/v1")
    failed = [one for one in verdicts for score in one.get("scores", []) if "score" not in score]
    assert failed and all("judge.quality" not in one["components"] for one in failed)
    status = await asyncio.to_thread(penstock, tmp_path, "status", "r1")
    assert "not scoring: " in status.stdout and "127.0.0.1:9" in status.stdout.replace("\n", "")
    assert run.summary["judges"]["quality/right"]["failed"] == len(failed)
