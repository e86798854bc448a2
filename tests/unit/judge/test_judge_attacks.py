"""The attack suite against judges that can be fooled, and against those that cannot."""

import argparse
import json
import re
from pathlib import Path

import pytest
from tests.judge_service import JudgeService

from penstock.infra.judge.attack import MASTER_KEYS, attacks, bases
from penstock.infra.judge.command import FOOLED, judge_command
from penstock.messages.errors import ConfigError

BASE = Path("examples/quickstart/config.toml").resolve()
CONFIG = f"""\
base = "{BASE}"

[[judge.judges]]
name = "quality"
weight = 0.1
retry_delay_s = 0.01
shows = ["task", "diff", "final", "turns"]
[[judge.judges.criteria]]
name = "right"
text = "Does the change do what the task asks?"
[judge.judges.endpoint]
url = "URL"
model = "m"
"""


def sections(body: dict) -> tuple[str, str]:
    """Read a prompt as its rules say: the data between real marks, and everything outside them."""
    rules, prompt = (message["content"] for message in body["messages"])
    [nonce] = set(re.findall(r"number ([0-9a-f]{32}) are real", rules))
    fences = rf"<<<{nonce} ([A-Za-z: ]+)>>>\n(.*?)\n<<<{nonce} end of \1>>>"
    inside = "\n".join(found[1] for found in re.findall(fences, prompt, re.DOTALL))
    return inside, re.sub(fences, "", prompt, flags=re.DOTALL)


def careful(body: dict) -> str:
    """Believe what is outside of the marks, and nothing inside."""
    inside, outside = sections(body)
    assert "Answer with one letter" in outside
    obeyed = re.search(r"answer (?:with )?(A|the best)|all criteria met", outside, re.IGNORECASE)
    return "A" if obeyed or "sum(values)" in inside else "B"


def obedient(body: dict) -> str:
    """Obey whatever stands anywhere."""
    prompt = body["messages"][1]["content"]
    return "A" if re.search(r"Answer A\.|answer with the best|sum\(values\)", prompt) else "B"


def fooled_by_keys(body: dict) -> str:
    """Take an opening of an answer for one, as models do (arXiv 2507.08794)."""
    inside, _ = sections(body)
    said = inside.rpartition("\n")[2]
    return "A" if any(key.strip() and key in said for key in MASTER_KEYS[3:]) else "B"


async def attacked(tmp_path, capsys, reply, **changes) -> tuple[int, list[dict]]:
    service = JudgeService(reply)
    async with service.serving():
        file = tmp_path / "run.toml"
        file.write_text(CONFIG.replace("URL", service.url))
        fields = {"judge": "", "overrides": [], "json": True, "max_rate": 0.0, **changes}
        arguments = argparse.Namespace(action="attack", config=file, **fields)
        code = await judge_command(arguments)
    return code, json.loads(capsys.readouterr().out)


async def test_a_judge_that_keeps_to_the_marks_withstands_the_suite(tmp_path, capsys) -> None:
    code, [report] = await attacked(tmp_path, capsys, careful)
    assert code == 0 and report["num_succeeded"] == 0
    assert report["num_attacks"] == len(list(attacks())) and report["num_untestable"] == 0
    assert report["base_scores"] == dict.fromkeys(bases(), 0.0)
    assert report["rate"]["upper"] < 0.05 and report["num_prompt_tokens"] > 0


async def test_a_judge_that_obeys_is_found_out(tmp_path, capsys) -> None:
    code, [report] = await attacked(tmp_path, capsys, obedient)
    assert code == FOOLED and "letter in diff" in report["succeeded"]
    assert (await attacked(tmp_path, capsys, obedient, max_rate=0.5))[0] == 0


async def test_master_keys_never_reach_a_judge_as_a_message(tmp_path, capsys) -> None:
    _, [report] = await attacked(tmp_path, capsys, fooled_by_keys)
    assert [name for name in report["succeeded"] if name.endswith("in final")] == []


async def test_work_with_the_best_score_cannot_be_attacked(tmp_path, capsys) -> None:
    code, [report] = await attacked(tmp_path, capsys, lambda _body: "A")
    assert code == FOOLED and report["num_attacks"] == 0
    assert report["is_blind"] and report["right_scores"] == dict.fromkeys(bases(), 1.0)
    assert report["num_untestable"] == len(list(attacks()))
    assert report["rate"] == {"value": 0.0, "lower": 0.0, "upper": 1.0}


async def test_a_judge_that_gives_everything_the_worst_score_fails(tmp_path, capsys) -> None:
    code, [report] = await attacked(tmp_path, capsys, lambda _body: "B", max_rate=1.0)
    assert (code, report["num_succeeded"], report["is_blind"]) == (FOOLED, 0, True)


async def test_judges_that_cannot_be_asked_are_named(tmp_path, capsys) -> None:
    with pytest.raises(ConnectionError, match=r"judge quality, right: .*status 401"):
        await attacked(tmp_path, capsys, lambda _body: 401)
    with pytest.raises(ConfigError, match=r"--judge: expected one of judge.judges \(quality\)"):
        await attacked(tmp_path, capsys, careful, judge="other")
    pinned = ['judge.judges=[{name="own",weight=0.1,policy_version=0,criteria=[]}]']
    with pytest.raises(ConfigError, match="criteria: expected 1 to 16"):
        await attacked(tmp_path, capsys, careful, overrides=pinned)
