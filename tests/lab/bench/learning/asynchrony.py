"""What asynchrony gains: the same run with and without it, on slow environments and the quickstart.

```
 start ─ mid-training alone, version 0 ─┬─ slow-asynchronous ────── slow-synchronous
                                        └─ quickstart-asynchronous ─ quickstart-synchronous
```
`slow`: before each call of a tool the machine sleeps 0.5 to 6 s, most tasks' a moment, some tasks'
long, which takes no processor; a step of the trainer takes at least `STEP_S`, as if the model were
larger by as much. Machines in flight, batch, tasks and seeds are the same in both modes, only the
schedule differs: staleness 4 and stragglers withheld after 2 s, or staleness 0. `quickstart`: its
recipe, but for its steps. Times are those until both modes have trained as many tokens, and until
both have reached the same held-out rate.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.lab.bench.learning.parts import Result, Unit
from tests.lab.bench.learning.timeline import read_timeline, time_to, time_to_rate
from tests.lab.bench.learning.whole_runs import CONFIGS, complete_run, export_newest

from penstock.messages.reading.parsing import parse_json

CONFIG = CONFIGS.parents[1] / "examples" / "quickstart" / "config.toml"
STEP_S = 6.0
"""About what the rollouts of a batch take at full rate, as in the quickstart."""
NUM_MACHINES = 64
NUM_SLOW_STEPS, NUM_QUICKSTART_STEPS = 30, 40
MODES = ("asynchronous", "synchronous")

Settings = dict[str, object]

_SYNCHRONOUS: Settings = {"pacer.synchronous": True}
_SLOW: Settings = {
    "prepare.slow_calls.median_s": 1.0,
    "prepare.slow_calls.spread": 1.0,
    "trainer.step_s_min": STEP_S,
    "trainer.steps_max": NUM_SLOW_STEPS,
    "rollout_worker.num_concurrent": NUM_MACHINES,
    "sandbox_host.pool.size": 8,
    "sandbox_host.pool.live_max": NUM_MACHINES + 16,
    "evaluator.num_eval_tasks": 64,
    "evaluator.eval_every_steps": 10,
    "evaluator.sets": [],
    "users.num_requests": 0,
}
_QUICKSTART: Settings = {
    "trainer.steps_max": NUM_QUICKSTART_STEPS,
    "evaluator.eval_every_steps": 0,
    "evaluator.sets": [],
    "users.num_requests": 0,
}
RUNS: dict[str, Settings] = {
    "slow-asynchronous": _SLOW
    | {
        "trainer.staleness_max": 4,
        "trainer.staleness_policy": "withhold",
        "trainer.straggler_wait_s": 2.0,
    },
    "slow-synchronous": _SLOW | _SYNCHRONOUS | {"trainer.staleness_max": 0},
    "quickstart-asynchronous": _QUICKSTART,
    "quickstart-synchronous": _QUICKSTART | _SYNCHRONOUS,
}
"""What each run changes of the quickstart's configuration."""


def units() -> list[Unit]:
    """Return the start, then one run each."""
    runs = [Unit(name, partial(_run, name, settings)) for name, settings in RUNS.items()]
    return [Unit("start", _start), *runs]


def _start(folder: Path) -> Result:
    """Mid-train as the quickstart does, and keep version 0."""
    none: Settings = {"trainer.steps_max": 0, "evaluator.num_eval_tasks": 8, "evaluator.sets": []}
    run = complete_run(folder / "runs", "start", CONFIG, none | {"users.num_requests": 0})
    export_newest(run, folder / "models" / "start")
    return _figures(run.summary, "midtrain")


def _run(name: str, settings: Settings, folder: Path) -> Result:
    start = {"model.checkpoint": str(folder / "models" / "start"), "trainer.midtrain.num_tokens": 0}
    run = complete_run(folder / "runs", name, CONFIG, settings | start)
    timeline = read_timeline(run).figures()
    sections = ("rl", "ledger", "replay", "compute", "utilization")
    return timeline | _figures(run.summary, *sections) | {"num_processors": os.cpu_count() or 1}


def _figures(summary: Path, *sections: str) -> Result:
    figures = parse_json(summary.read_bytes(), Result, str(summary))
    return {section: figures.get(section) for section in sections}


def summarize(results: Mapping[str, Result]) -> Result:
    """Return the ratios of both settings, the bound of processor time, waits and shares."""
    slow, quickstart = (
        [results[f"{name}-{mode}"] for mode in MODES] for name in ("slow", "quickstart")
    )
    figures: dict[str, Any] = {
        "slow_environments": _ratio_by_tokens(*slow),
        "slow_environments_by_rate": _ratio_by_rate(*slow),
        "quickstart": _ratio_by_tokens(*quickstart),
        "quickstart_bound": _bound(*quickstart),
    }
    both = zip(MODES, slow, quickstart, strict=True)
    figures["slow_modes"], figures["quickstart_modes"] = {}, {}
    for mode, of_slow, of_quickstart in both:
        figures["slow_modes"][mode] = _mode(of_slow)
        figures["quickstart_modes"][mode] = _mode(of_quickstart)
    figures["settings"] = {
        "step_s_min": STEP_S,
        "machines": NUM_MACHINES,
        "slow_calls": {"s_min": 0.5, "s_max": 6.0, "median_s": 1.0, "spread": 1.0},
    }
    figures["minutes"] = round(sum(result["seconds"] for result in results.values()) / 60, 1)
    return figures


def _mode(result: Result) -> Result:
    """Return one run's own figures."""
    names = (
        *("wall_s", "tokens_trained", "step_wait_s_p50", "step_wait_s_p95", "step_wait_share"),
        *("heldout", "rollouts_over_versions", "share_lost", "share_lost_max"),
        *("tokens_lost_max", "withheld_tokens", "call_s_p50", "call_s_p99"),
    )
    return {
        **{name: result[name] for name in names},
        "staleness_seen_max": result["rl"]["staleness_seen_max"],
        "processors_busy": round(_busy(result), 3),
        "processor_s_per_rollout": round(
            result["compute"]["rl_processor_s"] / max(result["rl"]["rollouts"], 1), 4
        ),
        "machines_share": round(
            result["compute"]["machines_s"] / result["compute"]["processor_s"], 3
        ),
        "ledger_balanced": result["ledger"]["balanced"],
        "replay_identical": result["replay"]["identical"],
    }


def _ratio_by_tokens(asynchronous: Result, synchronous: Result) -> float:
    """Return how many times as long the synchronous run takes for as many trained tokens."""
    tokens = min(asynchronous["tokens_trained"], synchronous["tokens_trained"])
    return round(time_to(synchronous, tokens) / time_to(asynchronous, tokens), 3)


def _ratio_by_rate(asynchronous: Result, synchronous: Result) -> float | None:
    """Return the same until a version of each has the held-out rate that both reach."""
    rate = min(max(rate for _, rate in one["heldout"]) for one in (asynchronous, synchronous))
    times = [time_to_rate(one, rate) for one in (synchronous, asynchronous)]
    return round(times[0] / times[1], 3) if times[1] > 0 else None


def _busy(result: Result) -> float:
    """Return the share of all processors that the run's own work took in the RL phase."""
    return result["compute"]["rl_processor_s"] / result["rl_wall_s"] / result["num_processors"]


def _bound(asynchronous: Result, synchronous: Result) -> float:
    """Return the ratio of a mode that wastes no processor time and needs no less of it.

    Processor time and wall clock are those of the RL phase, the first evaluation included in both.
    """
    least_s = asynchronous["compute"]["rl_processor_s"] / asynchronous["num_processors"]
    per_token_s = least_s / asynchronous["tokens_trained"]
    return round(synchronous["rl_wall_s"] / synchronous["tokens_trained"] / per_token_s, 3)
