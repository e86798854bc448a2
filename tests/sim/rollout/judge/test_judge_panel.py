"""Several judges per run over the bus: the run's own replicas answer, the tests decide."""

import asyncio

import msgspec
import pytest
from tests.judge_service import make_rubric
from tests.sim.rollout.conftest import BUGGY, FIXED, ScriptedPolicy, World
from tests.sim.rollout.judge.test_judge_actor import make_rollout

from penstock.actors.judge.config import AuxiliaryConfig, JudgeConfig
from penstock.actors.judge.reward import recompose
from penstock.actors.judge.rubric.config import MASK, RubricConfig
from penstock.actors.judge.rubric.judge import RubricJudge
from penstock.actors.judge.submission import Submission
from penstock.actors.monitor.judge_views import add_verdict
from penstock.infra.run.verdict_check import VerdictCheck
from penstock.messages.generation import Generate
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import Purpose


class Juror(ScriptedPolicy):
    """Replicas that answer a question by one letter."""

    letter = "A"

    def turn_ids(self, session: str, index: int) -> list[int]:
        assert session.startswith("judge.")
        return self._chat.render_turn(self.letter)

    def _turn_index(self, request: Generate) -> int:
        return 0


def own(**changes) -> RubricConfig:
    fields = {"endpoint": None, "policy_version": 0, "retry_delay_s": 0.1, **changes}
    return msgspec.structs.replace(make_rubric(), **fields)


async def judged(world: World, *rollouts: RolloutFinished, **settings) -> list[Verdict]:
    await world.put_tasks()
    world.host_machines()
    world.host(world.juror)
    world.host_judge(**settings)
    await world.publish(*rollouts)
    verdicts = await world.wait_for(Verdict, len(rollouts))
    check = VerdictCheck(JudgeConfig(**settings))
    for verdict in verdicts:
        assert verdict.reward == pytest.approx(sum(verdict.components.values()))
        assert recompose(verdict, JudgeConfig(**settings)) == verdict.components
        check.add(verdict)
        check.add(msgspec.structs.replace(verdict, components={"tests": 5.0}))
    assert check.num_different == len(verdicts) and check.num_checked == 2 * len(verdicts)
    return verdicts


@pytest.fixture
def play(simulate):
    """Run a scenario in a world that has a juror."""

    def run(scenario) -> None:
        async def with_juror(world: World) -> None:
            world.juror = Juror(world.tokenizer)  # pyright: ignore[reportAttributeAccessIssue]
            await scenario(world)

        simulate(with_juror)

    return run


def test_the_runs_own_replicas_judge_at_one_version(play) -> None:
    async def scenario(world: World) -> None:
        [verdict] = await judged(world, make_rollout(), judges=[own(repeats=2)])
        [score] = verdict.scores
        assert (verdict.outcome, score.criterion, score.repeats) == (Outcome.SOLVED, "right", 2)
        assert score.version.endswith("/version 0") and score.num_reply_tokens > 0
        assert score.score == 0.5 and score.disagreement == 1.0
        assert verdict.components["judge.quality"] == pytest.approx(0.1)
        request = world.juror.requests[0]
        assert (request.purpose, request.channel) == (Purpose.LIVE, "version:0")
        assert request.sampling.grammar.text == 'start: "A" | "B"\n'
        assert request.sampling.is_greedy

    play(scenario)


def test_failed_and_held_out_rollouts_are_not_asked_about(play) -> None:
    async def scenario(world: World) -> None:
        failed = make_rollout("g0-m0", files={"m.py": BUGGY.encode() + b"\n"})
        heldout = make_rollout("ev0-0", purpose=Purpose.EVAL, task_id="heldout-1")
        verdicts = await judged(
            world, failed, heldout, judges=[own()], auxiliary=AuxiliaryConfig(style=0.05)
        )
        assert {one.outcome for one in verdicts} == {Outcome.FAILED, Outcome.SOLVED}
        assert all(one.scores == [] for one in verdicts) and world.juror.requests == []

    play(scenario)


def test_failed_rollouts_are_asked_about_by_setting_and_stay_below_solved_ones(play) -> None:
    async def scenario(world: World) -> None:
        failed = make_rollout("g0-m0", files={"m.py": BUGGY.encode() + b"# done\n"})
        solved = make_rollout("g0-m1", files={"m.py": FIXED.encode()})
        verdicts = await judged(world, failed, solved, judges=[own()], scores_failed=True)
        rewards = {one.outcome: one.reward for one in verdicts}
        assert rewards[Outcome.FAILED] == pytest.approx(0.2)
        assert rewards[Outcome.FAILED] < rewards[Outcome.SOLVED]

    play(scenario)


def test_manners_need_no_model(play) -> None:
    async def scenario(world: World) -> None:
        mark, again = "todo".upper(), "\n\ndef double(y):\n    return y * 2\n"
        files = {"m.py": f"# {mark} tidy\n{FIXED}{again}".encode()}
        config = AuxiliaryConfig(style=0.04, communication=0.04, todos=0.04)
        [verdict] = await judged(world, make_rollout(files=files), auxiliary=config)
        scores = {one.judge: one.score for one in verdict.scores}
        assert scores == {"style": 0.5, "communication": 0.0, "todos": 0.5}
        assert verdict.components["auxiliary.todos"] == pytest.approx(0.02)

    play(scenario)


def test_a_version_that_no_replica_holds_fails_the_judge_and_not_the_run(play) -> None:
    async def scenario(world: World) -> None:
        judge = own(policy_version=7, num_attempts_max=2, deadline_s=30.0)
        rollouts = [make_rollout(f"g0-m{n}") for n in range(6)]
        verdicts = await judged(world, *rollouts, judges=[judge])
        assert {one.outcome for one in verdicts} == {Outcome.SOLVED}
        assert all(set(one.components) == {"tests", "length_penalty"} for one in verdicts)
        details = sorted(score.detail for one in verdicts for score in one.scores)
        assert details[0].startswith("down, not asked: ") and details[-1].startswith("no answer")
        views = {}
        for one in verdicts:
            add_verdict(views, one)
        view = views["quality/right"]
        assert (view.num_failed, view.num_scored, view.is_failing) == (6, 0, True)
        assert "no answer in 30 s" in view.note
        last = verdicts[-1].scores[0]
        unasked = msgspec.structs.replace(
            last, score=0.0, repeats=0, detail="nothing was submitted"
        )
        add_verdict(views, msgspec.structs.replace(verdicts[-1], scores=[unasked]))
        assert view.is_failing and view.num_scored == 1

    play(scenario)


def test_a_failed_judge_masks_by_setting(play) -> None:
    async def scenario(world: World) -> None:
        judge = own(policy_version=7, deadline_s=5.0, on_failure=MASK)
        [verdict] = await judged(world, make_rollout(), judges=[judge])
        assert (verdict.outcome, verdict.components) == (Outcome.JUDGE_ERROR, {})
        assert verdict.detail == "judge quality, right: no answer in 5 s"
        assert verdict.scores[0].score is None

    play(scenario)


async def test_a_judge_waits_where_the_status_sees_it(tokenizer) -> None:
    world = World(tokenizer)
    ctx = world.client()

    class Silent:
        async def answer(self, question):
            await asyncio.sleep(60.0)

    judge = RubricJudge(make_rubric(), Silent(), ctx)
    asking = asyncio.create_task(judge.score(Submission(sample_id="g0-m0", diff="+x")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    [wait] = ctx.waits.current()
    assert (wait.target, wait.reason) == ("judge.quality", "1 criteria of g0-m0")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await world.close()
