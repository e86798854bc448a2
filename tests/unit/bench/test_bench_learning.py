"""The learning bench: resumable by units, and what one failure leaves."""

import json

import pytest
from tests.lab.bench.learning import command, parts
from tests.lab.bench.learning.command import bench_learning
from tests.lab.bench.learning.intervals import lower_bounds
from tests.lab.bench.learning.parts import Unit, UnitFailedError, alone
from tests.lab.bench.learning.whole_runs import complete_run

from penstock.messages.errors import CodecError, ConfigError, CorruptDataError


class CountingPart:
    """Two units; the second one fails as often as told."""

    def __init__(self, num_failures=0):
        self.ran = []
        self._num_failures = num_failures

    def units(self):
        return [Unit("one", self._run("one")), Unit("two", self._run("two"))]

    def _run(self, name):
        def run(folder):
            self.ran.append(name)
            if name == "one" and self._num_failures:
                self._num_failures -= 1
                raise UnitFailedError("no luck")
            return {"name": name}

        return run

    def summarize(self, results):
        return {"names": sorted(one["name"] for one in results.values())}


@pytest.fixture
def part(monkeypatch):
    counting = CountingPart()
    use(monkeypatch, counting)
    return counting


def use(monkeypatch, counting):
    monkeypatch.setattr(command, "PARTS", {"count": "none"})
    monkeypatch.setattr(command, "open_part", lambda name: counting)


def test_finished_units_do_not_run_again(part, tmp_path):
    assert bench_learning(tmp_path, []) == {"count": {"names": ["one", "two"]}}
    assert bench_learning(tmp_path, ["count"]) == {"count": {"names": ["one", "two"]}}
    assert part.ran == ["one", "two"]
    stored = json.loads((tmp_path / "count" / "two.json").read_bytes())
    assert stored["name"] == "two" and stored["seconds"] >= 0


def test_a_unit_that_fails_keeps_no_other_from_running(monkeypatch, tmp_path):
    counting = CountingPart(num_failures=1)
    use(monkeypatch, counting)
    with pytest.raises(UnitFailedError, match="count: one: no luck"):
        bench_learning(tmp_path, [])
    assert not (tmp_path / "count" / "one.json").exists()
    assert bench_learning(tmp_path, []) == {"count": {"names": ["one", "two"]}}
    assert counting.ran == ["one", "two", "one"]


def test_a_damaged_result_is_named(part, tmp_path):
    bench_learning(tmp_path, [])
    (tmp_path / "count" / "one.json").write_bytes(b"{")
    with pytest.raises(CodecError, match=r"one\.json"):
        bench_learning(tmp_path, [])


@pytest.mark.parametrize("data", [b"{}", b'{"name": []}', b'{"seconds": null}'])
def test_a_result_that_lacks_what_its_part_needs_is_refused(part, tmp_path, data):
    bench_learning(tmp_path, [])
    (tmp_path / "count" / "one.json").write_bytes(data)
    with pytest.raises(CorruptDataError, match="count: results that count cannot be summed up"):
        bench_learning(tmp_path, [])


def test_two_at_once_do_not_run_the_same_units(part, tmp_path):
    with alone(tmp_path), pytest.raises(ConfigError, match="another process is at work"):
        bench_learning(tmp_path, [])
    assert part.ran == []
    bench_learning(tmp_path, [])
    assert part.ran == ["one", "two"]


def test_bad_arguments_are_refused(part, tmp_path):
    with pytest.raises(ConfigError, match="-o DIR"):
        bench_learning(None, [])
    with pytest.raises(ConfigError, match="expected some of count"):
        bench_learning(tmp_path, ["other"])
    with pytest.raises(ConfigError, match="expected a name"):
        Unit("../x", lambda folder: {})


def test_every_part_has_units_of_distinct_names():
    for name in parts.PARTS:
        names = [unit.name for unit in parts.open_part(name).units()]
        assert names and len(names) == len(set(names)), name


def test_bounds_of_a_clear_difference_are_above_zero():
    better = [{f"t{n}": n % 10 != seed for n in range(1000)} for seed in range(3)]
    worse = [{f"t{n}": n % 2 == 0 for n in range(1000)} for _ in range(3)]
    bounds = lower_bounds(better, worse)
    assert bounds["difference"] == pytest.approx(0.4)
    assert 0.3 < bounds["lower"] <= bounds["lower_tasks"] < 0.4
    assert bounds["num_pairs"] == 3000


def test_the_bound_counts_what_another_training_would_change():
    same = {f"t{n}": n % 2 == 0 for n in range(1000)}
    all_solved = dict.fromkeys(same, True)
    bounds = lower_bounds([all_solved, same, same], [same, same, same])
    assert bounds["lower_tasks"] > 0 > bounds["lower_seeds"] == bounds["lower"]


def test_equal_arms_have_a_bound_of_zero():
    same = [{f"t{n}": n % 3 == 0 for n in range(90)}] * 3
    assert lower_bounds(same, same)["lower"] == 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rl": {"given_up": True}}, "it was given up"),
        ({"ledger": {"balanced": False}}, "its ledger does not balance"),
        ({"replay": {"identical": False}}, "its replay differs"),
        ({"replay": {}}, ""),
    ],
)
def test_a_run_that_ended_unsound_is_no_result_the_next_time(tmp_path, changes, said):
    sound = {
        "rl": {"given_up": False},
        "ledger": {"balanced": True},
        "replay": {"identical": True},
    }
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_text(json.dumps(sound | changes))
    if not said:
        assert complete_run(tmp_path, "a", tmp_path / "none.toml", {}).run_id == "a"
        return
    with pytest.raises(UnitFailedError, match=f"run a: {said}; without its folder, .*/a, it runs"):
        complete_run(tmp_path, "a", tmp_path / "none.toml", {})
