"""The figures of the asynchrony part, from timelines made by hand."""

import pytest
from tests.lab.bench.learning.asynchrony import CONFIG, MODES, RUNS, summarize, units
from tests.lab.bench.learning.timeline import Timeline, time_to, time_to_rate
from tests.lab.bench.learning.whole_runs import toml_text

from penstock.infra.config.file import apply_overrides, parse_config, read_toml
from penstock.messages.control import RunOpened
from penstock.messages.reward import EvalCompleted, Outcome
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    TurnSummary,
    VersionSpan,
)
from penstock.messages.task import Purpose
from penstock.messages.training import (
    BatchManifest,
    GroupEntry,
    MidtrainCompleted,
    SampleEntry,
    StepCompleted,
)


def spans(**tokens):
    return [VersionSpan(policy_version=int(k[1:]), num_tokens=n) for k, n in tokens.items()]


def finished(name, wall_s, **tokens):
    turn = TurnSummary(num_context=1, num_sampled=1, version_spans=spans(**tokens))
    return RolloutFinished(
        rollout_id=name,
        group_id=f"g{name}",
        group_index=0,
        group_size=1,
        member=0,
        purpose=Purpose.TRAIN,
        task_id="t",
        category="r",
        end=EpisodeEnd.FINISHED,
        turns=[turn],
        files=EpisodeFiles(),
        wall_s=wall_s,
        tool_s=wall_s / 2,
        num_calls=2,
    )


def group(name, outcome=Outcome.SOLVED, trained_from=0, **tokens):
    entry = SampleEntry(
        rollout_id=name,
        outcome=outcome,
        reward=1.0,
        advantage=0.0,
        version_spans=spans(**tokens),
        trained_from=trained_from,
    )
    return GroupEntry(group_id=f"g{name}", group_index=0, task_id="t", samples=[entry])


def step(number, tokens, wait_s=1.0):
    return StepCompleted(
        step=number,
        policy_version=number,
        weights_digest="",
        optimizer_digest="",
        metrics={},
        staleness_tokens={0: tokens},
        train_s=2.0,
        wait_s=wait_s,
    )


def evaluated(version, num_solved):
    return EvalCompleted(
        eval_id=f"v{version}", policy_version=version, num_solved=num_solved, num_tasks=10
    )


def test_a_run_s_clock_stands_still_while_it_is_down():
    timeline = Timeline()
    timeline.add(finished("a", 10.0, v0=5), 110.0)
    timeline.add(step(1, 30), 120.0)
    timeline.add(RunOpened(incarnation="2"), 900.0)
    timeline.add(step(2, 10, wait_s=5.0), 1000.0)
    timeline.add(evaluated(0, 2), 1000.0)
    timeline.add(evaluated(2, 8), 1001.0)
    figures = timeline.figures()
    assert figures["curve"] == [(20.0, 30), (27.0, 40)], "from the first rollout's start"
    assert (figures["wall_s"], figures["tokens_trained"]) == (27.0, 40)
    assert time_to(figures, 15) == 10.0 and time_to(figures, 35) == 23.5
    assert (time_to_rate(figures, 0.2), time_to_rate(figures, 0.5)) == (0.0, 27.0)
    assert figures["call_s_p50"] == 2.5


def test_a_quantile_s_lost_share_is_of_what_staleness_could_take():
    timeline = Timeline()
    for number in range(8):
        timeline.add(finished(str(number), 1.0 + number, v0=10), 100.0)
    timeline.add(finished("x", 99.0, v0=10), 100.0)
    manifest = BatchManifest(
        step=1,
        policy_version=0,
        groups=[group(str(n), v0=10) for n in range(6)] + [group("6", trained_from=1, v0=5, v1=5)],
        discarded=[group("7", Outcome.WITHHELD, v0=10), group("x", Outcome.FILTERED, v0=10)],
    )
    timeline.add(manifest, 101.0)
    figures = timeline.figures()
    assert figures["num_groups_settled"] == 8
    assert figures["share_lost"] == [-0.0357, -0.0357, -0.0357, 0.1071]
    assert figures["share_lost_max"] == 0.1071
    assert figures["withheld_tokens"] == pytest.approx(15 / 80, abs=1e-4)


@pytest.mark.parametrize(("opened_at", "before_s"), [(0.0, 15.0), (12.0, 0.0)])
def test_the_wall_clock_of_processor_time_begins_with_the_evaluation_before_rollouts(
    opened_at, before_s
):
    timeline = Timeline()
    timeline.add(RunOpened(incarnation="a"), opened_at)
    timeline.add(MIDTRAINED, 10.0)
    timeline.add(finished("0", wall_s=5.0, v0=10), 30.0)
    timeline.add(step(1, 10), 45.0)
    figures = timeline.figures()
    assert (figures["wall_s"], figures["rl_wall_s"]) == (20.0, 20.0 + before_s)


MIDTRAINED = MidtrainCompleted(
    num_tokens=1, loss_first=2.0, loss_last=1.0, heldout_loss=1.0, heldout_perplexity=3.0,
    weights_digest="d", wall_s=1.0,
)  # fmt: skip
FIGURES = (
    *("step_wait_s_p50", "step_wait_s_p95", "step_wait_share", "rollouts_over_versions"),
    *("share_lost", "share_lost_max", "tokens_lost_max", "withheld_tokens"),
    *("call_s_p50", "call_s_p99"),
)


EVALUATION_S = 20.0


def result(wall_s, rate, processor_s):
    return {
        "wall_s": wall_s,
        "rl_wall_s": wall_s + EVALUATION_S,
        "tokens_trained": 1000,
        "curve": [(wall_s / 2, 500), (wall_s, 1000)],
        "heldout": [(0.0, 0.2), (wall_s, rate)],
        "rl": {"staleness_seen_max": 2, "rollouts": 10},
        "ledger": {"balanced": True},
        "replay": {"identical": True},
        "compute": {"rl_processor_s": processor_s, "processor_s": 50.0, "machines_s": 5.0},
        "num_processors": 2,
        "seconds": 60.0,
    } | dict.fromkeys(FIGURES, 0.0)


def test_ratios_are_synchronous_over_asynchronous_time_and_the_bound_is_of_processor_time():
    found = summarize(
        {
            "start": {"seconds": 60.0},
            "slow-asynchronous": result(100.0, 0.5, 40.0),
            "slow-synchronous": result(300.0, 0.6, 40.0),
            "quickstart-asynchronous": result(100.0, 0.5, 180.0),
            "quickstart-synchronous": result(110.0, 0.5, 180.0),
        }
    )
    assert found["slow_environments"] == found["slow_environments_by_rate"] == 3.0
    assert found["quickstart"] == 1.1
    assert found["quickstart_bound"] == pytest.approx(130 / 90, abs=1e-3)
    assert found["quickstart_modes"]["asynchronous"]["processors_busy"] == 180 / 2 / 120
    assert found["minutes"] == 5.0


def test_every_run_has_a_valid_configuration_and_the_same_machines_and_batch():
    assert [unit.name for unit in units()] == ["start", *RUNS]
    configs = {
        name: parse_config(
            apply_overrides(
                read_toml(CONFIG), [f"{key}={toml_text(value)}" for key, value in settings.items()]
            ),
            name,
        )
        for name, settings in RUNS.items()
    }
    for kind in ("slow", "quickstart"):
        one, other = (configs[f"{kind}-{mode}"] for mode in MODES)
        for section in (
            "prepare",
            "rollout_worker",
            "sandbox_host",
            "judge",
            "evaluator",
            "policy",
        ):
            assert getattr(one, section) == getattr(other, section), section
        assert one.trainer.groups_per_batch == other.trainer.groups_per_batch
        assert one.pacer.group_size == other.pacer.group_size
        assert other.pacer.staleness_granted == 0 < one.pacer.staleness_granted
    assert configs["slow-asynchronous"].trainer.staleness_policy == "withhold"
