"""Trains a run's log with changed settings, evaluates the weights, and reports both.

The report is one HTML file with the curves of both. The evaluation is a run without steps: it has
the configuration of the original run, but starts from the new weights, serves no users, and has its
own log and store. Tasks, tokenizer, machines, judge and evaluator are the same, so that the results
can be compared.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.hf.config import config_json
from penstock.actors.runtime.files import private_folder, write_atomic
from penstock.actors.trainer.counterfactual.what_if import WhatIf, ess_of, replay_what_if
from penstock.actors.trainer.replay import REPLAY_TYPES, ReplayLog
from penstock.actors.trainer.step import StepResult
from penstock.gateway.page.live_page import script_json
from penstock.infra.config.file import load_config, read_toml
from penstock.infra.config.former_names import with_present_prepare
from penstock.infra.export.folder import check_target, write_model
from penstock.infra.export.tokenizer_files import tokenizer_files
from penstock.infra.output import print_result, write_to
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import RunDir, open_log, open_vault
from penstock.infra.what_if.settings import read_question, reward_function
from penstock.messages.bus import Bus
from penstock.messages.errors import ConfigError, PenstockError
from penstock.messages.reading.trajectories import last_of
from penstock.messages.reward import EvalCompleted
from penstock.messages.training import BatchManifest, StepCompleted


def render(answer: dict[str, Any]) -> str:
    """Return the report as a page that needs no server and no network."""
    page = files("penstock.gateway.page")
    parts = {
        "/*STYLE*/": page / "page.css",
        "/*CHARTS*/": page / "charts.js",
        "/*VIEW*/": files("penstock.infra.what_if") / "report.js",
    }
    text = (files("penstock.infra.what_if") / "report.html").read_text(encoding="utf-8")
    for mark, file in parts.items():
        text = text.replace(mark, file.read_text(encoding="utf-8"))
    return text.replace("/*ANSWER*/null", script_json(msgspec.json.encode(answer)))


RUN_ID = "what-if"
STOPPING_S_MAX = 120.0
_DROPPED = ("bus", "store", "weights", "users", "serve")
"""Tables of the run's place and users, which the evaluation does not share."""
_OF_PLACE = ("bucket", "endpoint", "link", "channel")
"""Fields of a region that are about its place."""


class EvaluationFailedError(PenstockError, RuntimeError):
    """The evaluation run failed; its output says why."""


async def evaluate(run: RunDir, model: Path, folder: Path) -> list[EvalCompleted]:
    """Evaluate a model folder with a run's tasks and settings.

    Raises:
        EvaluationFailedError: The evaluation run failed.

    """
    config = folder / "evaluation.toml"
    data = evaluation_tables(with_present_prepare(read_toml(run.config)), model)
    write_atomic(config, tomli_w.dumps(data).encode())
    command = [sys.executable, "-m", "penstock.infra.cli", "--runs-dir", str(folder), "run",
               "--config", str(config), "--run-id", RUN_ID, "--no-replay"]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
    wall_s_max = load_config(config).run.wall_s_max + STOPPING_S_MAX
    try:
        code = await asyncio.wait_for(process.wait(), wall_s_max)
    except BaseException:
        if process.returncode is None:
            process.terminate()  # Not `kill`: the launcher has to stop its actors.
        raise
    if code:
        raise EvaluationFailedError(f"the evaluation in {folder / RUN_ID} ended with code {code}")
    async with open_log(RunDir(folder / RUN_ID), "replay") as bus:
        return await evaluations(bus)


def evaluation_tables(tables: dict[str, Any], model: Path) -> dict[str, Any]:
    """Return the configuration of a run without steps that evaluates a model."""
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
    # Port 0: the original run may still be serving.
    data["gateway"] = {**data.get("gateway", {}), "port": 0}
    data["regions"] = [
        {name: value for name, value in region.items() if name not in _OF_PLACE}
        for region in data["regions"]
    ]
    data["processes"] = {
        name: specs
        for name, specs in data["processes"].items()
        # They need several ranks, or users.
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


NUM_AT_ONCE_MAX = 16
"""Maximum folders created within one second."""
_METRICS = ("loss", "grad_norm", "logprob_mean", "entropy", "kl_reference")
"""Metrics of a step that are shown in addition to ESS and KL."""


async def what_if_command(arguments: argparse.Namespace) -> int:
    """Answer a what-if question into a folder.

    Raises:
        ConfigError: A setting cannot be changed, or the folder is not empty.
        NotFoundError: The run does not exist, or has no checkpoint of version 0.
        CorruptDataError: The log lacks a verdict.
        EvaluationFailedError: The evaluation failed.

    """
    run = await reached_run(arguments)
    if arguments.output:
        # Before the training, which takes minutes.
        check_target(folder := arguments.output.resolve())
        return await _write_answer(run, folder, arguments)
    folder = _own_folder(run)
    try:
        return await _write_answer(run, folder, arguments)
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # Only if it is still empty.


def _own_folder(run: RunDir) -> Path:
    """Create a folder in the run for one question.

    Raises:
        ConfigError: Too many folders were created in one second.

    """
    within = run.path / "what-if"
    private_folder(within)
    name = time.strftime("%Y%m%d-%H%M%S")
    for folder in (within / name, *(within / f"{name}-{n}" for n in range(2, NUM_AT_ONCE_MAX + 1))):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder.resolve()
    raise ConfigError(f"--output: expected a new folder, {within} has many of this second")


async def _write_answer(run: RunDir, folder: Path, arguments: argparse.Namespace) -> int:
    answer = await ask(run, list(arguments.what_if), folder, with_progress=not arguments.json)
    if not arguments.no_evaluation:
        found = await evaluate(run, folder / "model", folder)
        answer["heldout"]["what_if"] = [_evaluation(event, answer["version"]) for event in found]
    write_atomic(folder / "what-if.json", msgspec.json.format(msgspec.json.encode(answer)) + b"\n")
    write_atomic(folder / "what-if.html", render(answer).encode())
    if arguments.json:
        print_result(answer, as_json=True)
    else:
        write_to(sys.stdout, "\n".join(_lines(answer, folder)) + "\n")
    return 0


async def ask(
    run: RunDir, given: list[str], folder: Path, *, with_progress: bool
) -> dict[str, Any]:
    """Train the log with the changes, write the weights to `folder/model`, and return the answer.

    The run's log and store do not change. Raises what `what_if_command` raises.
    """
    config = load_config(run.config)
    question = read_question(given, config)
    what_if = WhatIf(change=question.change, reward=reward_function(question, config))
    steps: list[dict[str, float]] = []

    def on_step(manifest: BatchManifest, result: StepResult) -> None:
        steps.append(_step(manifest.step, result.metrics))
        if with_progress:
            shown = steps[-1]
            write_to(
                sys.stderr,
                f"step {manifest.step}: loss {shown['loss']:+.4f}, ESS {shown['ess']:.3f}, "
                f"KL {shown['kl_behavior']:.5f}\n",
            )

    async with open_log(run, "replay") as bus:
        log = ReplayLog(
            deliveries=bus.follow(REPLAY_TYPES, stop_at_end=True),
            last=last_of(bus),
            store=run.store(),
            opener=open_vault(run),
        )
        learner, report = await replay_what_if(
            log, config.policy, config.trainer, what_if, on_step=on_step
        )
        recorded = await _recorded(bus)
        own = await evaluations(bus)
        tokenizer = await tokenizer_files(run.store(), config.policy.max_position_embeddings)
    tensors = {name: as_numpy(tensor) for name, tensor in publishable_state(learner.policy).items()}
    text = config_json(config.policy, **tokenizer.special_ids)
    await asyncio.to_thread(
        write_model, folder / "model", text, tensors, tokenizer, config.policy.adapter
    )
    version = int(steps[-1]["step"]) if steps else 0
    return {
        "run_id": run.run_id,
        "what_if": question.given,
        "version": version,
        "ended": report.ended,
        "first_difference": report.first_difference,
        "ess_min": what_if.ess_min,
        "weights_digest": report.weights_digest,
        "steps": {"original": recorded, "what_if": steps},
        "heldout": {
            "original": [_evaluation(event, event.policy_version) for event in own],
            "what_if": [],
        },
        "model": str(folder / "model"),
    }


async def _recorded(bus: Bus) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    async for delivery in bus.follow((StepCompleted,), stop_at_end=True):
        if isinstance(event := delivery.event, StepCompleted):
            found.append(_step(event.step, event.metrics))
    return found


def _step(step: int, metrics: dict[str, float]) -> dict[str, float]:
    named = {name: metrics[name] for name in _METRICS if name in metrics}
    own = {"ess": ess_of(metrics), "kl_behavior": metrics.get("mismatch_k3", 0.0)}
    return {"step": step, **own, **named}


def _evaluation(event: EvalCompleted, version: int) -> dict[str, Any]:
    return {
        "version": version,
        "set": event.eval_set,
        "is_main": event.is_main,
        "num_solved": event.num_solved,
        "num_tasks": event.num_tasks,
        "pass_rate": event.num_solved / max(event.num_tasks, 1),
        "pass_at_k": event.pass_at_k,
    }


def _lines(answer: dict[str, Any], folder: Path) -> list[str]:
    steps = answer["steps"]
    taken, recorded = len(steps["what_if"]), len(steps["original"])
    lines = [f"{taken} of {recorded} steps with {', '.join(answer['what_if'])}"]
    if answer["first_difference"]:
        lines.append(f"the log does not follow from itself: {answer['first_difference']}")
    if answer["ended"]:
        lines.append(f"ended {answer['ended']}")
    if steps["what_if"]:
        lowest = min(step["ess"] for step in steps["what_if"])
        highest = max(step["kl_behavior"] for step in steps["what_if"])
        lines.append(f"lowest ESS {lowest:.3f}, largest KL to the behavior policy {highest:.4f}")
    for name, found in answer["heldout"].items():
        lines += [
            f"{name.replace('_', '-')}: version {one['version']} solves {one['pass_rate']:.1%} of "
            f"{one['num_tasks']} held-out attempts" + (f" ({one['set']})" if one["set"] else "")
            for one in found
        ]
    return [*lines, f"report: {folder / 'what-if.html'}"]
