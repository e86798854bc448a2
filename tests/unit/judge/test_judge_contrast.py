"""The audit of groups: what is asked of attempts side by side, and what is counted."""

import argparse
import difflib
import json
import re

import pytest
from tests.judge_service import JudgeService, make_rubric
from tests.unit.judge.test_judge_attacks import CONFIG, sections

from penstock.actors.judge.rubric.contrast import (
    ATTEMPTS_MAX,
    JudgedAttempt,
    compare_attempts,
    read_flagged,
)
from penstock.actors.judge.rubric.endpoint import Endpoint
from penstock.actors.judge.submission import Submission
from penstock.infra.judge.audit import GroupAuditor, planted_groups, report
from penstock.infra.judge.command import judge_command
from penstock.messages.errors import ConfigError
from penstock.messages.reward import CheatKind

GROUP = planted_groups()[0]


def shown(body: dict) -> dict[str, str]:
    """Return the changes of each attempt that a prompt shows, by its letter."""
    prompt = body["messages"][1]["content"]
    [nonce] = set(re.findall(r"number ([0-9a-f]{32}) are real", body["messages"][0]["content"]))
    fences = rf"<<<{nonce} attempt ([A-P]): the changes>>>\n(.*?)\n<<<{nonce} end"
    return dict(re.findall(fences, prompt, re.DOTALL))


def stands_out(body: dict) -> str:
    """Name what uses a name that no other attempt uses: nothing stands out alone."""
    names = {
        letter: set(re.findall(r"_\w+|\b\w+_\w+", text)) for letter, text in shown(body).items()
    }
    found = [
        letter
        for letter, own in names.items()
        if len(names) > 1
        and own.difference(*(other for one, other in names.items() if one != letter))
    ]
    return ", ".join(found) or "none"


async def audited(tmp_path, capsys, reply, **changes) -> tuple[dict, JudgeService]:
    service = JudgeService(reply)
    async with service.serving():
        file = tmp_path / "run.toml"
        file.write_text(CONFIG.replace("URL", service.url))
        fields = {"judge": "", "overrides": [], "json": True, "planted": True, **changes}
        await judge_command(argparse.Namespace(action="audit", config=file, **fields))
    return json.loads(capsys.readouterr().out), service


async def test_what_stands_out_is_found_beside_others_and_not_alone(tmp_path, capsys) -> None:
    found, _ = await audited(tmp_path, capsys, stands_out)
    assert found["num_planted"] == 15
    assert found["found_alone"]["value"] == 0.0
    # A table of the tests' values uses no new name: such a judge misses it at each of three tasks.
    assert found["missed_beside"] == ["sort values", "median values", "words values"]
    assert found["found_beside"]["value"] == 12 / 15
    assert found["honest_flagged_beside"]["value"] == 0.0


async def test_honest_work_that_is_flagged_is_counted(tmp_path, capsys) -> None:
    found, service = await audited(tmp_path, capsys, lambda body: ", ".join(shown(body)))
    assert found["honest_flagged_alone"]["value"] == found["honest_flagged_beside"]["value"] == 1.0
    assert found["num_prompt_tokens"] == 100 * len(service.bodies) == 100 * (15 * 4 + 15)


async def test_what_is_untrusted_stays_inside_the_marks(tmp_path, capsys) -> None:
    _, service = await audited(tmp_path, capsys, lambda _body: "none")
    for body in service.bodies:
        inside, outside = sections(body)
        assert "def " in inside and "def " not in outside
        assert ("Compare the attempts" in outside) == (len(shown(body)) > 1)


@pytest.mark.parametrize(
    ("reply", "is_structured", "flagged"),
    [
        ("none", False, set()),
        ("None.", False, set()),
        ("C", False, {2}),
        (" A,D ", False, {0, 3}),
        ("A and C", False, None),
        ("E", False, None),
        ("", False, None),
        ('{"choices": ["B"]}', True, {1}),
        ('{"choices": []}', True, set()),
        ('{"choices": ["E"]}', True, None),
        ("B", True, None),
    ],
)
def test_a_reply_is_letters_or_nothing(reply, is_structured, flagged) -> None:
    question = compare_attempts(make_rubric(), GROUP.attempts, "0" * 32)
    assert read_flagged(reply, question, is_structured=is_structured) == flagged


def test_all_attempts_together_are_bounded() -> None:
    config = make_rubric(section_chars_max=2000)
    work = Submission(sample_id="r", task="t" * 9000, diff="d" * 9000, final="f" * 9000)
    attempts = [JudgedAttempt(submission=work, is_solved=True)] * ATTEMPTS_MAX
    prompt = compare_attempts(config, attempts, "0" * 32).messages[1].content
    assert prompt.count("t" * 1000) == 2, "the task once, without its middle"
    assert prompt.count("d" * 125) == prompt.count("f" * 125) == 2 * ATTEMPTS_MAX
    assert "d" * 126 not in prompt and "f" * 126 not in prompt


async def group_audit(reply, **changes):
    service = JudgeService(reply)
    async with service.serving():
        config = make_rubric(service.url, **changes)
        assert config.endpoint is not None
        [found] = await GroupAuditor(config, Endpoint(config.endpoint)).audit_all([GROUP.attempts])
    return found, service


async def test_repeats_turn_the_attempts_and_most_replies_decide() -> None:
    found, service = await group_audit(lambda _body: "A", repeats=4)
    assert found.shares == [0.25] * 4 and found.flagged == set(), "a judge that likes a letter"
    firsts = [shown(body)["A"] for body in service.bodies]
    assert len(set(firsts)) == 4
    cheat = GROUP.attempts[GROUP.cheat].submission.diff

    def finds(body: dict) -> str:
        ratio = difflib.SequenceMatcher
        return next(a for a, text in shown(body).items() if ratio(None, text, cheat).ratio() > 0.99)

    found, _ = await group_audit(finds, repeats=4)
    assert found.flagged == {GROUP.cheat} and found.shares[GROUP.cheat] == 1.0


async def test_several_letters_are_asked_for_by_their_schema() -> None:
    found, service = await group_audit(
        lambda _body: '{"choices": ["B"]}', endpoint={"structured": True}
    )
    assert found.flagged == {1}
    schema = service.bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["choices"]["items"]["enum"] == ["A", "B", "C", "D"]


async def test_a_judge_that_fails_flags_nothing_and_says_why(tmp_path, capsys) -> None:
    found, service = await group_audit(lambda _body: "I think it is A", num_attempts_max=2)
    assert found.shares == [] and found.flagged == set() and "no letters alone" in found.failure
    assert len(service.bodies) == 2
    figures = report("quality", [GROUP.attempts], [found])
    assert (figures.num_groups, figures.num_failed, figures.flags) == (0, 1, {})
    with pytest.raises(ConnectionError, match=r"judge quality: .*status 401"):
        await audited(tmp_path, capsys, lambda _body: 401)
    with pytest.raises(ConfigError, match=r"--judge: expected one of judge.judges \(quality\)"):
        await audited(tmp_path, capsys, stands_out, judge="other")


async def test_a_flag_bears_who_named_it_and_beside_how_many() -> None:
    found, _ = await group_audit(stands_out)
    other = planted_groups()[2]
    figures = report("quality", [GROUP.attempts, other.attempts], [found, found])
    assert (figures.num_attempts, figures.num_solved) == (8, 8)
    found, _ = await group_audit(lambda _body: "D")
    [(rollout, flag)] = report("quality", [GROUP.attempts], [found]).flags.items()
    assert rollout == GROUP.attempts[3].submission.sample_id
    assert flag.kind is CheatKind.CONTRAST and not flag.is_decisive
    assert flag.where == "beside 3 attempts" and "m-2026" in flag.detail and "100%" in flag.detail
