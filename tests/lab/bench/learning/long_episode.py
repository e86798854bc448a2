"""Episodes of 52 stops and 208 files through a window of 512 tokens, by a trained policy.

```
 start ─ mid-training on trails of 8 stops ─▶ train ─ RL on 52 stops ─▶ eval ─ held-out trails
```
"""

from collections.abc import Mapping
from functools import partial

from tests.lab.bench.learning.parts import Result, Unit
from tests.lab.bench.learning.summary import Settings, evaluate, evaluating, start, train

NUM_EVALUATED = 256
WINDOW_TOKENS = 512
NUM_TURNS, NUM_CALLS = 50, 200
"""That an episode must have at least to count as long."""

SHORT: Settings = {
    "prepare.corpora.settings.num_demonstrations": 6000,
    "trainer.midtrain.num_tokens": 5_000_000,
    "prepare.sources.0.settings.num_stops": 8,
    "prepare.sources.0.settings.num_files": 4,
    "prepare.sources.0.settings.habits.whole_share": 0.6,
    "prepare.sources.0.settings.habits.drops": 0.05,
    "prepare.limits.window_tokens_max": 224,
    "prepare.limits.turn_tokens_max": 64,
    "rollout_worker.summary.trigger": 0.6,
}
"""Demonstrated: whole in one context, or in some of 224 tokens."""

LONG: Settings = {
    "prepare.sources.0.settings.num_stops": 52,
    "prepare.sources.0.settings.num_files": 4,
    "rollout_worker.summary.trigger": 0.75,
    "prepare.limits.window_tokens_max": WINDOW_TOKENS,
    "prepare.limits.num_tokens_max": 8192,
    "prepare.limits.num_turns_max": 96,
    "prepare.limits.turn_tokens_max": 64,
}

TRAINING: Settings = {
    "pacer.groups_per_batch": 4,
    "trainer.groups_per_batch": 4,
    "pacer.steps_max": 24,
    "trainer.steps_max": 24,
    "trainer.filter_zero_variance": False,
}
"""Groups are kept however few of them are solved at first: an attempt costs a second."""


def units() -> list[Unit]:
    """Return the three units."""
    return [
        Unit("start", partial(start, "start", SHORT)),
        Unit("train", partial(train, "train", "start", LONG | TRAINING)),
        Unit("eval", partial(evaluate, "eval", "train", LONG | evaluating(NUM_EVALUATED))),
    ]


def summarize(results: Mapping[str, Result]) -> Result:
    """Return the pass rate of all, and of those alone that are as long as asked for."""
    tasks = list(results["eval"]["tasks"].values())
    long = [one for one in tasks if one["num_turns"] >= NUM_TURNS and one["num_calls"] >= NUM_CALLS]

    def mean(field: str) -> float:
        return round(sum(one[field] for one in long) / max(len(long), 1), 1)

    return {
        "pass_rate": round(sum(one["solved"] for one in tasks) / max(len(tasks), 1), 4),
        "num_episodes": len(tasks),
        "num_long": len(long),
        "num_long_solved": sum(one["solved"] for one in long),
        "turns_mean": mean("num_turns"),
        "calls_mean": mean("num_calls"),
        "segments_mean": mean("num_segments"),
        "window_tokens": WINDOW_TOKENS,
        "replay_identical": results["train"]["replay"]["identical"],
        "minutes": round(sum(result["seconds"] for result in results.values()) / 60, 1),
    }
