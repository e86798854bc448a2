"""Which correction holds where data are off-policy on purpose: four arms, one start, three seeds.

```
 start - mid-training alone, version 0 ─┬─ none-S            policy gradient, uncorrected
                                        ├─ token-tis-S       truncated importance sampling
                                        ├─ icepop-S          the engine bounded, staleness cut
                                        └─ decoupled-ppo-S   corrected, and clipped in the passes
```
A run evaluates its last version on held-out tasks, the same for all arms of a seed. Whether data
were off-policy is said by the ratios themselves (`ratio_ess`), whatever an arm makes of them. Of
each arm the first seed's run is replayed.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from tests.lab.bench.learning.intervals import lower_bounds
from tests.lab.bench.learning.parts import Result, Unit
from tests.lab.bench.learning.whole_runs import (
    CONFIGS,
    complete_run,
    evaluated_tasks,
    export_newest,
    replay_figures,
)

from penstock.infra.config.file import load_config
from penstock.infra.run.runs import RunDir, open_log
from penstock.messages.reading.parsing import parse_json
from penstock.messages.training import StepCompleted

Settings = dict[str, object]

CONFIG = CONFIGS / "off-policy.toml"
SEEDS = (0, 1, 2)
_STUDENT_T = 4.303
"""97.5% quantile for three seeds."""
ARMS: dict[str, Settings] = {
    "none": {"trainer.loss.name": "policy_gradient", "trainer.loss.correction": "none"},
    "token-tis": {"trainer.loss.name": "policy_gradient"},
    "icepop": {"trainer.loss.name": "policy_gradient", "trainer.loss.correction": "icepop"},
    "decoupled-ppo": {},
}
"""What an arm changes of the shipped configuration."""
METRICS = (
    *("ratio_ess", "ess", "masked_fraction", "clipped_fraction", "entropy", "kl_reference"),
    *("staleness_mean", "mismatch_engine_k3", "mismatch_staleness_k3", "pass_rate"),
)
"""Means over the steps of a run."""


def units() -> list[Unit]:
    """Return all units: a seed after the other, so that the first one's figures come early."""
    trained = [
        Unit(f"{arm}-{seed}", partial(_train, f"{arm}-{seed}", {"run.seed": seed, **settings}))
        for seed in SEEDS
        for arm, settings in ARMS.items()
    ]
    return [Unit("start", _start), *trained]


def _start(folder: Path) -> Result:
    """Mid-train, and keep version 0."""
    none: Settings = {"pacer.steps_max": 0, "trainer.steps_max": 0, "evaluator.num_eval_tasks": 64}
    run = complete_run(folder / "runs", "start", CONFIG, none)
    export_newest(run, folder / "models" / "start")
    return _sections(run.summary, "midtrain")


def _train(name: str, settings: Settings, folder: Path) -> Result:
    """Train from the start's version 0, and evaluate the last version."""
    model: Settings = {
        "model.checkpoint": str(folder / "models" / "start"),
        "trainer.midtrain.num_tokens": 0,
    }
    with_replay = settings["run.seed"] == SEEDS[0]
    run = complete_run(folder / "runs", name, CONFIG, settings | model, with_replay=with_replay)
    last = load_config(run.config).trainer.steps_max
    return {
        "tasks": {task: one.solved for task, one in evaluated_tasks(run, last).items()},
        "steps": asyncio.run(_step_means(run)),
        **_sections(run.summary, "rl", "ledger", "replay", "wall_s"),
    }


def _sections(summary: Path, *names: str) -> Result:
    figures = parse_json(summary.read_bytes(), Result, str(summary))
    return {name: figures.get(name) for name in names}


async def _step_means(run: RunDir) -> dict[str, float]:
    """Return the mean of each metric over the steps."""
    steps: list[dict[str, float]] = []
    async with open_log(run, "bench") as bus:
        async for delivery in bus.follow((StepCompleted,), stop_at_end=True):
            if isinstance(delivery.event, StepCompleted) and not delivery.event.skipped:
                steps.append(delivery.event.metrics)
    return {
        name: fmean(values)
        for name in METRICS
        if (values := [metrics[name] for metrics in steps if name in metrics])
    }


def summarize(results: Mapping[str, Result]) -> Result:
    """Return each arm's held-out rate, its steps, and its difference to no correction at all."""
    solved = {arm: [results[f"{arm}-{seed}"]["tasks"] for seed in SEEDS] for arm in ARMS}
    figures: dict[str, Any] = {
        arm: _arm(solved[arm], [results[f"{arm}-{seed}"] for seed in SEEDS]) for arm in ARMS
    }
    figures["minus_none"] = {
        arm: lower_bounds(solved[arm], solved["none"]) for arm in ARMS if arm != "none"
    }
    runs = [results[f"{arm}-{seed}"] for arm in ARMS for seed in SEEDS]
    figures["ratio_ess_max"] = round(max(run["steps"]["ratio_ess"] for run in runs), 4)
    figures |= replay_figures(runs)
    figures["ledger_balanced"] = all(run["ledger"]["balanced"] for run in runs)
    figures["minutes"] = round(sum(result["seconds"] for result in results.values()) / 60, 1)
    return figures


def _arm(solved: Sequence[Mapping[str, bool]], runs: Sequence[Result]) -> Result:
    rates = [fmean(map(float, tasks.values())) for tasks in solved]
    return {
        "held_out": round(fmean(rates), 4),
        "by_seed": [round(rate, 4) for rate in rates],
        "interval_tasks": _interval(rates, [len(tasks) for tasks in solved]),
        "interval_seeds": _interval_of_seeds(rates),
        "num_episodes": [len(tasks) for tasks in solved],
        "steps": {
            name: round(fmean(run["steps"][name] for run in runs), 6)
            for name in METRICS
            if all(name in run["steps"] for run in runs)
        },
    }


def _interval(rates: Sequence[float], counts: Sequence[int]) -> list[float]:
    """95% interval of the mean over tasks, the trained weights taken as given."""
    variance = sum(rate * (1 - rate) / num for rate, num in zip(rates, counts, strict=True))
    return _around(rates, NormalDist().inv_cdf(0.975) * math.sqrt(variance) / len(rates))


def _interval_of_seeds(rates: Sequence[float]) -> list[float]:
    """95% interval over trainings (Student's t)."""
    return _around(rates, _STUDENT_T * stdev(rates) / math.sqrt(len(rates)))


def _around(rates: Sequence[float], half: float) -> list[float]:
    return [round(max(0.0, fmean(rates) - half), 4), round(min(1.0, fmean(rates) + half), 4)]
