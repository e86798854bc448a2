"""The weights of a what-if on the run's held-out tasks, by a run of no steps.

Its configuration is the run's, but that it starts from these weights, takes no step, serves no
users and has a log and a store of its own. Tasks, tokenizer, machines, judge and evaluator are the
run's, so that its figure stands beside those in the run's log.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import tomli_w

from penstock.actors.runtime.files import write_atomic
from penstock.infra.run.config_file import load_config, read_toml
from penstock.infra.run.runs import RunDir, open_log
from penstock.messages.bus import Bus
from penstock.messages.errors import PenstockError
from penstock.messages.reward import EvalCompleted

RUN_ID = "what-if"
STOPPING_S_MAX = 120.0
_DROPPED = ("bus", "store", "weights", "users", "serve")
"""Tables of the run that are about where it ran, or about users."""
_OF_PLACE = ("bucket", "endpoint", "link", "channel")
"""The same of a region."""


class EvaluationFailedError(PenstockError, RuntimeError):
    """The run that evaluates did not end well; its output says why."""


async def evaluate(run: RunDir, model: Path, folder: Path) -> list[EvalCompleted]:
    """Return the evaluations of a model folder as the run would have had them.

    Args:
        run: whose tasks, machines and settings.
        model: a folder in Hugging Face's layout.
        folder: of the run that evaluates; new.

    Raises:
        EvaluationFailedError: It did not end well.

    """
    config = folder / "evaluation.toml"
    data = evaluation_tables(read_toml(run.config), model)
    write_atomic(config, tomli_w.dumps(data).encode())
    command = [sys.executable, "-m", "penstock.infra.cli", "--runs-dir", str(folder), "run",
               "--config", str(config), "--run-id", RUN_ID, "--no-replay"]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
    wall_s_max = load_config(config).run.wall_s_max + STOPPING_S_MAX
    try:
        code = await asyncio.wait_for(process.wait(), wall_s_max)
    except BaseException:
        if process.returncode is None:
            process.terminate()  # It stops its actors in order.
        raise
    if code:
        raise EvaluationFailedError(f"the evaluation in {folder / RUN_ID} ended with code {code}")
    async with open_log(RunDir(folder / RUN_ID), "replay") as bus:
        return await evaluations(bus)


def evaluation_tables(tables: dict[str, Any], model: Path) -> dict[str, Any]:
    """Return the tables of a run of no steps that evaluates a model."""
    data = {name: table for name, table in tables.items() if name not in _DROPPED}
    data["model"] = {
        "checkpoint": str(model),
        "chat": data.get("model", {}).get("chat", "penstock"),
    }
    numerics = data.get("policy", {}).get("numerics")
    data["policy"] = {"numerics": numerics} if numerics else {}
    trainer = dict(data.get("trainer", {}))
    trainer |= {"steps_max": 0, "midtrain": {**trainer.get("midtrain", {}), "num_tokens": 0}}
    trainer["midtrain"].pop("seconds", None)
    data["trainer"] = trainer
    data["pacer"] = {**data.get("pacer", {}), "steps_max": 0}
    data["gateway"] = {**data.get("gateway", {}), "port": 0}
    data["regions"] = [
        {name: value for name, value in region.items() if name not in _OF_PLACE}
        for region in data["regions"]
    ]
    data["processes"] = {
        name: specs
        for name, specs in data["processes"].items()
        if not any(spec.startswith(("publisher:", "gatekeeper")) for spec in specs)
    }
    return data


async def evaluations(bus: Bus) -> list[EvalCompleted]:
    """Return a log's evaluations, in its order."""
    found: list[EvalCompleted] = []
    async for delivery in bus.follow((EvalCompleted,), stop_at_end=True):
        if isinstance(event := delivery.event, EvalCompleted):
            found.append(event)
    return found
