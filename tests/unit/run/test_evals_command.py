"""`penstock evals`: from a log to intervals, and two versions compared task by task."""

import asyncio
import io

import pytest
from rich.console import Console
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.unit.monitor.story import rollout

from penstock.actors.evaluator.evaluation import EvalBook
from penstock.actors.runtime.clock import SystemClock
from penstock.infra.commands.evals import read_evals, render
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import ConfigError
from penstock.messages.reward import EvalAnnounced, Outcome, Verdict
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import Purpose

SOLVED = {
    (0, ""): [0, 0, 1, 0, 0, 1],
    (6, ""): [1, 1, 1, 0, 0, 1],
    (9, ""): [1, 0, 0, 1, 1, 0],
    (6, "hard"): [1, 0],
}
"""(version, set) -> solved attempts, two for each task."""


def evaluated(version, name, solved):
    eval_id = f"v{version}-{name}" if name else f"v{version}"
    announced = EvalAnnounced(
        eval_id=eval_id, policy_version=version, num_tasks=len(solved) // 2, num_samples=2,
        eval_set=name,
    )  # fmt: skip
    [base] = [
        one for one in rollout("x", version, Outcome.SOLVED) if isinstance(one, RolloutFinished)
    ]
    events = [announced]
    for index, is_solved in enumerate(solved):
        common = {"rollout_id": f"e{eval_id}-{index}", "group_id": eval_id, "group_index": 0}
        common |= {"purpose": Purpose.EVAL}
        ended = {field: getattr(base, field) for field in base.__struct_fields__}
        events.append(RolloutFinished(**ended | common | {"task_id": f"{name}t{index // 2}"}))
        verdict = {"judge_version": "1", "reward": 0.0, "policy_version": version}
        verdict |= {"policy_version_max": version}
        outcome = Outcome.SOLVED if is_solved else Outcome.FAILED
        events.append(Verdict(**common, judge="hidden_tests", outcome=outcome, **verdict))
        # Another judge's opinion of the same rollout counts for nothing.
        events.append(Verdict(**common, judge="style", outcome=Outcome.SOLVED, **verdict))
    return events


def read(versions=None):
    async def run():
        bus = MemoryBus(
            MemoryServer(seed=0, clock=SystemClock()), run_id="r", store=MemoryStore(), name="test"
        )
        for (version, name), solved in SOLVED.items():
            await bus.publish(evaluated(version, name, solved))
        return await read_evals(bus, "hidden_tests", versions)

    return asyncio.run(run())


def test_each_set_has_its_versions_and_its_comparison():
    main, hard = read().sets
    assert [one.policy_version for one in main.versions] == [0, 6, 9]
    assert [one.pass_at[1].value for one in main.versions] == [2 / 6, 4 / 6, 3 / 6]
    assert [one.pass_at[2].value for one in main.versions] == [2 / 3, 1.0, 1.0]
    assert (main.comparison.policy_version, main.compared) == (0, 9)
    assert (hard.eval_set, hard.comparison, hard.compared) == ("hard", None, -1)


def test_versions_are_chosen_and_wrong_ones_refused():
    [main, _] = read([6, 0]).sets
    assert (main.comparison.policy_version, main.compared) == (0, 6)
    assert (main.comparison.num_better, main.comparison.num_worse) == (1, 0)
    with pytest.raises(ConfigError, match=r"--versions: expected two .* 0, 6, 9; hard: 6"):
        read([6, 7])


def test_the_page_and_the_command_agree():
    book, completed = EvalBook(), {}
    for (version, name), solved in SOLVED.items():
        announced, *events = evaluated(version, name, solved)
        book.announce(announced)
        for event in events:
            if isinstance(event, Verdict) and event.judge == "hidden_tests":
                completed[version, name] = book.add(event)
    main = read().sets[0]
    for one in main.versions:
        event = completed[one.policy_version, ""]
        assert event.pass_at_k == {k: found.value for k, found in one.pass_at.items()}
        assert event.intervals == {k: (found.low, found.high) for k, found in one.pass_at.items()}
    assert completed[9, ""].comparison == main.comparison


def test_the_report_is_readable():
    out = io.StringIO()
    Console(file=out, width=140).print(render(read()))
    text = out.getvalue()
    assert "1: 0.667 [" in text and "0 -> 9" in text and "+0.167 [" in text
