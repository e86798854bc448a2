"""Tasks, sources and evaluation sets in the view, the status, the summary and the log."""

from typing import Any

from tests.unit.run.test_infra_summary import QUICKSTART, load_config

from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import decode_state, encode_state
from penstock.gateway.page.live_page import render_page
from penstock.infra.commands.status import render
from penstock.infra.run.closing import closing_table
from penstock.infra.run.summary import run_summary
from penstock.messages.control import RunFinished
from penstock.messages.reward import (
    Estimate,
    EvalCompleted,
    EvalRequested,
    Outcome,
    Verdict,
    VersionComparison,
)
from penstock.messages.task import GroupGranted, Purpose
from penstock.messages.training import StepCompleted

COMPARED = VersionComparison(
    policy_version=0, difference=Estimate(value=0.5, low=0.1, high=0.75, num_tasks=2),
    num_better=2, num_worse=0, p_value=0.5,
)  # fmt: skip


def completed(name: str, version: int, num_solved: int, *, is_main: bool) -> EvalCompleted:
    return EvalCompleted(
        eval_id=f"v{version}-{name}", policy_version=version, num_solved=num_solved, num_tasks=8,
        eval_set=name, is_main=is_main, num_samples=4, pass_at_k={1: num_solved / 8, 4: 1.0},
        pass_rate_by_source={"mined": num_solved / 8}, pass_rate_by_category={"call": 0.5},
        intervals={1: (0.1, 0.95), 4: (0.5, 1.0)}, comparison=COMPARED if version else None,
    )  # fmt: skip


def verdict(index: int, source: str, outcome: Outcome) -> Verdict:
    return Verdict(
        rollout_id=f"r{index}", group_id="g", group_index=0, purpose=Purpose.TRAIN, judge="j",
        judge_version="1", outcome=outcome, reward=0.0, source=source,
    )  # fmt: skip


def test_tasks_sources_and_sets_are_shown() -> None:
    fold = RunFold()
    for index, attempt in enumerate((0, 0, 1, 2)):
        granted = GroupGranted(
            group_index=index, task_id="t", source="mined" if index else "ladder",
            attempt=attempt, num_fresh=max(0, 1 - index), num_skipped=3 * attempt,
        )  # fmt: skip
        fold.apply(granted, float(index))
    outcomes = [Outcome.SOLVED, Outcome.FAILED, Outcome.JUDGE_ERROR, Outcome.TIMEOUT]
    for index, outcome in enumerate(outcomes):
        fold.apply(verdict(index, "mined", outcome), 5.0)
    for version, num_solved in ((0, 2), (6, 6)):
        fold.apply(completed("sampled", version, num_solved, is_main=True), 6.0)
        fold.apply(completed("greedy", version, num_solved + 1, is_main=False), 6.0)
    fold.apply(RunFinished(reason="infrastructure: of 9", step=6, is_failure=True), 7.0)
    state = fold.state(8.0)
    assert decode_state(encode_state(state)) == state
    assert [one.num_solved for one in state.evals] == [2, 6], "headlines are of the main set"
    assert state.tasks.words == "all were attempted, 50% of groups again, 6 skipped"
    mined = state.tasks.sources["mined"]
    assert (mined.num_groups, mined.num_judged, mined.num_solved) == (3, 3, 1)
    warned = [line.text for line in state.log if line.level == "warn"]
    assert len(warned) == 1 and warned[0].startswith("group 1 has the last training task")
    text = [line.text for line in state.log if "greedy" in line.text][-1]
    assert (
        "solves 87.5% of the held-out tasks of greedy (7 of 8, call 0.50, pass@4 1.00; against"
        in text
    )
    assert text.endswith("; against version 0 +0.50 [+0.10, +0.75], p 0.5)")
    render(state)
    assert "Evaluations by set" in render_page(encode_state(state))
    figures = run_summary(state, load_config(QUICKSTART), {}, started_at=0.0, ended_at=10.0)
    assert figures["rl"]["finish_reason"] == "infrastructure: of 9" and figures["rl"]["given_up"]
    assert figures["tasks"]["evaluations"]["greedy after"] == {
        "policy_version": 6, "attempts": 8, "pass_rate": 7 / 8, "pass_at_1": 6 / 8 + 1 / 8,
        "pass_at_4": 1.0, "pass_rate_mined": 7 / 8, "by_category": {"call": 0.5},
        "pass_at_1_low": 0.1, "pass_at_1_high": 0.95, "pass_at_4_low": 0.5, "pass_at_4_high": 1.0,
        "gain_on_version_0": 0.5, "gain_low": 0.1, "gain_high": 0.75, "gain_p": 0.5,
    }  # fmt: skip
    assert figures["tasks"]["train_pass_rate"]["mined"] == {"rollouts": 3, "pass_rate": 1 / 3}
    assert any("sampled before" in line for line in closing_table(figures))


def figures_of(fold: RunFold, started_at: float) -> dict[str, Any]:
    config = load_config(QUICKSTART)
    return run_summary(fold.state(99.0), config, {}, started_at=started_at, ended_at=99.0)


def evaluated(fold: RunFold, version: int, num_solved: int, at: float) -> None:
    of = completed("sampled", version, num_solved, is_main=True)
    requested = EvalRequested(eval_id=of.eval_id, policy_version=version, num_tasks=8)
    fold.apply(requested, at - 2.0)
    fold.apply(of, at)


def test_times_count_from_the_start_and_the_bar_must_hold_twice() -> None:
    fold = RunFold()
    assert figures_of(fold, 10.0)["rl"]["first_reward_s"] is None
    evaluated(fold, 0, 7, 20.0)
    evaluated(fold, 4, 5, 30.0)
    evaluated(fold, 8, 6, 40.0)
    assert figures_of(fold, 10.0)["rl"]["pass_075_s"] is None, "6 of 8 once is not twice"
    evaluated(fold, 12, 8, 50.0)
    for step, at in ((1, 25.0), (2, 26.0)):
        done = StepCompleted(
            step=step, policy_version=step, weights_digest="", optimizer_digest="", metrics={},
            staleness_tokens={0: 1}, train_s=1.0, wait_s=1.0,
        )  # fmt: skip
        fold.apply(done, at)
    figures = figures_of(fold, 10.0)
    assert (figures["rl"]["first_reward_s"], figures["rl"]["pass_075_s"]) == (15.0, 30.0)
    assert figures["tasks"]["evaluations_cost"] == {
        "evaluations": 4, "attempts": 32, "wall_s": 8.0,
    }  # fmt: skip


def test_evaluations_that_never_end_hide_no_others_cost() -> None:
    fold = RunFold()
    for version in range(100):
        fold.apply(EvalRequested(eval_id=f"lost-{version}", policy_version=0, num_tasks=8), 1.0)
    evaluated(fold, 0, 7, 20.0)
    assert figures_of(fold, 10.0)["tasks"]["evaluations_cost"]["wall_s"] == 2.0
