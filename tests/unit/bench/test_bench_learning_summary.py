"""The part `summary`: every run that it starts is configured rightly, and its figures add up."""

import pytest
from tests.lab.bench.learning import long_episode, summary
from tests.lab.bench.learning.parts import UnitFailedError
from tests.lab.bench.learning.whole_runs import complete_run, toml_text

from penstock.infra.config.file import load_config
from penstock.infra.run.runs import RunDir


@pytest.fixture
def replayed():
    """Whether each run is replayed, by its id."""
    return {}


@pytest.fixture
def started(monkeypatch, tmp_path, replayed):
    """Run all units with runs that are only configured; return settings by run id."""
    found = {}

    def start(folder, run_id, config, settings, *, with_replay=True):
        replayed[run_id] = with_replay
        pairs = [f"{key}={toml_text(value)}" for key, value in settings.items()]
        found[run_id] = load_config(config, pairs)
        return RunDir(tmp_path / run_id)

    monkeypatch.setattr(summary, "complete_run", start)
    monkeypatch.setattr(summary, "export_newest", lambda run, target: target)
    monkeypatch.setattr(summary, "evaluated_tasks", lambda run, version: {})
    monkeypatch.setattr(summary, "_figures", lambda path, *sections: {})
    for unit in [*summary.units(), *long_episode.units()]:
        unit.run(tmp_path)
    return found


def test_every_run_is_configured(started):
    assert len(started) == 5 * (1 + 1 + 2 * len(summary.ARMS)) + 3
    for name, config in started.items():
        is_start = name.startswith("start")
        assert bool(config.model.checkpoint) != is_start, name
        assert (config.trainer.midtrain.num_tokens > 0) == is_start, name
        assert (config.trainer.steps_max > 0) == ("train" in name), name


def test_arms_of_a_seed_attempt_the_same_tasks(started):
    for seed in summary.SEEDS:
        evaluated = [started[f"eval-{arm}-{seed}"] for arm in ("start", *summary.ARMS)]
        assert {one.run.seed for one in evaluated} == {seed}
        numbers = [one.evaluator.num_eval_tasks for one in evaluated]
        assert numbers == [256, 256, 1024, 1024, 1024], "start and full, and what is compared"
        assert len({str(one.prepare.sources) for one in evaluated}) == 1


def test_of_each_arm_the_first_seed_is_replayed(started, replayed):
    trained = {name for name in started if name.startswith("train-")}
    assert {name for name in trained if replayed[name]} == {
        f"train-{arm}-0" for arm in summary.ARMS
    }


def test_arms_differ_in_what_they_are_named_after(started):
    quarter, full = started["train-quarter-0"], started["train-full-0"]
    limits = quarter.prepare.limits
    assert full.prepare.limits.num_segments_max == 1
    assert full.prepare.limits.window_tokens_max == 4 * limits.window_tokens_max
    assert started["train-masked-1"].rollout_worker.summary.mode == "masked"
    assert started["eval-none-2"].rollout_worker.summary.mode == "none"
    assert started["eval"].prepare.limits.window_tokens_max == 512


def evaluated(num_solved, **figures):
    one = {"num_turns": 22, "num_calls": 30, "num_segments": 8} | figures
    return {f"t{n}": {"solved": n < num_solved} | one for n in range(100)}


def test_the_figures_add_up():
    solved = {"start": 30, "full": 96, "quarter": 90, "masked": 32, "none": 0}
    results = {
        f"eval-{arm}-{seed}": {"tasks": evaluated(num + seed), "seconds": 60.0}
        for arm, num in solved.items()
        for seed in summary.SEEDS
    }
    results |= {"train-quarter-0": {"replay": {"identical": True}, "seconds": 0.0}}
    results |= {"train-quarter-1": {"replay": {}, "seconds": 0.0}}
    figures = summary.summarize(results)
    assert figures["quarter"] == 0.92
    assert figures["by_seed"]["quarter"] == [0.9, 0.91, 0.92, 0.93, 0.94]
    assert figures["quarter_of_full"] == round(0.92 / 0.98, 4)
    # By tasks: 0.58 - 1.96 sqrt(0.58 x 0.42 / 99 / 5), and the same of 0.9; seeds do not differ.
    assert figures["lower_95"] == {"quarter_minus_masked": 0.5365, "quarter_minus_none": 0.8736}
    assert figures["replay_identical"] and figures["num_replayed"] == 1
    assert figures["minutes"] == 25.0
    results["train-quarter-0"]["replay"] = {}
    assert not summary.summarize(results)["replay_identical"], "none was"


def test_short_episodes_are_counted_apart():
    tasks = evaluated(70, num_turns=60, num_calls=210) | {
        "short": {"solved": True, "num_turns": 3, "num_calls": 9, "num_segments": 1}
    }
    results = {
        "start": {"seconds": 0.0},
        "train": {"replay": {"identical": True}, "seconds": 0.0},
        "eval": {"tasks": tasks, "seconds": 60.0},
    }
    long = long_episode.summarize(results)
    assert (long["num_long"], long["num_long_solved"], long["num_episodes"]) == (100, 70, 101)
    assert long["turns_mean"] == 60.0 and long["replay_identical"]


@pytest.mark.slow
def test_a_run_that_fails_is_named(tmp_path):
    with pytest.raises(UnitFailedError, match=r"exit code 2; see .*r1\.output"):
        complete_run(tmp_path, "r1", tmp_path / "absent.toml", {})
    assert "no such configuration file" in (tmp_path / "r1.output").read_text()
