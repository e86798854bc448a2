"""Whether summaries that are trained in the loop pay: four arms from the same start, five seeds.

```
 start-S ─ mid-training alone, version 0 ─┬─ train-full-S ──── eval-full-S      one context
                                          ├─ train-quarter-S ─ eval-quarter-S   a quarter of it
                                          ├─ train-masked-S ── eval-masked-S    no summary trained
                                          ├─ train-none-S ──── eval-none-S      restart, task alone
                                          └─ eval-start-S      the quarter before RL
```
An evaluation is a run of its own from the exported weights: the arms of a seed that are compared
attempt the same held-out tasks, task by task. Of each arm the first seed's training is replayed.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tests.lab.bench.learning.intervals import lower_bounds
from tests.lab.bench.learning.parts import Result, Unit
from tests.lab.bench.learning.whole_runs import (
    CONFIGS,
    complete_run,
    evaluated_tasks,
    export_newest,
    replay_figures,
)

from penstock.messages.reading.parsing import parse_json

CONFIG = CONFIGS / "self-summary.toml"
SEEDS = (0, 1, 2, 3, 4)
NUM_EVALUATED = 1024
NUM_EVALUATED_BESIDE = 256
"""Of what no bound is about: one context, and before RL."""

Settings = dict[str, object]

ARMS: dict[str, Settings] = {
    "full": {
        "prepare.limits.window_tokens_max": 512,
        "prepare.limits.num_segments_max": 1,
        "trainer.filter_zero_variance": False,
    },
    "quarter": {},
    "masked": {"rollout_worker.summary.mode": "masked"},
    "none": {"rollout_worker.summary.mode": "none", "trainer.filter_zero_variance": False},
}
"""What an arm changes of the shipped configuration. Groups of equal rewards stay in the batch where
nearly all are: in one context all are solved, with the task alone none is."""


def units() -> list[Unit]:
    """Return all units: a seed after the other, so that the first one's figures come early."""
    found: list[Unit] = []
    for seed in SEEDS:
        found.append(Unit(f"start-{seed}", partial(start, f"start-{seed}", {"run.seed": seed})))
        found.append(_evaluation(f"start-{seed}", "eval-start", seed, ARMS["quarter"]))
        for arm, settings in ARMS.items():
            of_seed = {"run.seed": seed, **settings}
            name = f"train-{arm}-{seed}"
            with_replay = seed == SEEDS[0]
            run = partial(train, name, f"start-{seed}", of_seed, with_replay=with_replay)
            found.append(Unit(name, run))
            found.append(_evaluation(name, f"eval-{arm}", seed, settings))
    return found


def _evaluation(trained: str, name: str, seed: int, settings: Settings) -> Unit:
    is_compared = name in {"eval-quarter", "eval-masked", "eval-none"}
    num_tasks = NUM_EVALUATED if is_compared else NUM_EVALUATED_BESIDE
    of_seed = {"run.seed": seed, **settings, **evaluating(num_tasks)}
    return Unit(f"{name}-{seed}", partial(evaluate, f"{name}-{seed}", trained, of_seed))


def evaluating(num_tasks: int) -> Settings:
    """Return the settings of a run that only evaluates the version that it starts from."""
    return {
        "prepare.num_heldout_tasks": num_tasks,
        "prepare.num_train_tasks": 1,
        "evaluator.num_eval_tasks": num_tasks,
        "evaluator.eval_deadline_s": 1800.0,
        "pacer.steps_max": 0,
        "trainer.steps_max": 0,
    }


def start(name: str, settings: Settings, folder: Path) -> Result:
    """Mid-train, and keep version 0."""
    none = {"pacer.steps_max": 0, "trainer.steps_max": 0, "evaluator.num_eval_tasks": 8}
    run = complete_run(folder / "runs", name, CONFIG, settings | none)
    export_newest(run, folder / "models" / name)
    return _figures(run.summary, "midtrain")


def train(
    name: str, begin: str, settings: Settings, folder: Path, *, with_replay: bool = True
) -> Result:
    """Train from a start's version 0, and keep the newest version."""
    given = settings | _from_model(folder / "models" / begin) | {"evaluator.num_eval_tasks": 32}
    run = complete_run(folder / "runs", name, CONFIG, given, with_replay=with_replay)
    export_newest(run, folder / "models" / name)
    return _figures(run.summary, "rl", "ledger", "replay", "wall_s")


def evaluate(name: str, trained: str, settings: Settings, folder: Path) -> Result:
    """Attempt the held-out tasks once each with a trained version."""
    given = settings | _from_model(folder / "models" / trained)
    run = complete_run(folder / "runs", name, CONFIG, given)
    tasks = evaluated_tasks(run, 0)
    return {"tasks": msgspec.to_builtins(tasks)}


def _from_model(model: Path) -> Settings:
    return {"model.checkpoint": str(model), "trainer.midtrain.num_tokens": 0}


def _figures(summary: Path, *sections: str) -> Result:
    figures = parse_json(summary.read_bytes(), Result, str(summary))
    return {section: figures.get(section) for section in sections}


def summarize(results: Mapping[str, Result]) -> Result:
    """Return pass rates, the bounds of both differences with the rates by seed."""
    solved = {
        arm: [_solved(results[f"eval-{arm}-{seed}"]) for seed in SEEDS] for arm in ("start", *ARMS)
    }
    figures: dict[str, Any] = {arm: round(_mean_rate(of), 4) for arm, of in solved.items()}
    figures["quarter_of_full"] = round(figures["quarter"] / max(figures["full"], 1e-9), 4)
    bounds = {
        f"quarter_minus_{other}": lower_bounds(solved["quarter"], solved[other])
        for other in ("masked", "none")
    }
    figures["lower_95"] = {name: bound["lower"] for name, bound in bounds.items()}
    figures["differences"] = bounds
    figures["by_seed"] = {
        arm: [round(_rate(one), 4) for one in of_seeds] for arm, of_seeds in solved.items()
    }
    figures["num_episodes"] = {arm: [len(one) for one in of] for arm, of in solved.items()}
    runs = [result for name, result in results.items() if name.startswith("train")]
    figures |= replay_figures(runs)
    figures["minutes"] = round(sum(result["seconds"] for result in results.values()) / 60, 1)
    return figures


def _solved(result: Result) -> dict[str, bool]:
    return {task_id: one["solved"] for task_id, one in result["tasks"].items()}


def _rate(solved: Mapping[str, bool]) -> float:
    return sum(solved.values()) / max(len(solved), 1)


def _mean_rate(of_seeds: list[dict[str, bool]]) -> float:
    return sum(map(_rate, of_seeds)) / len(of_seeds)
