"""The command `penstock agent --repo DIR "..."`."""

import argparse
import asyncio
import contextlib
import os
import sys

from penstock.actors.pacer.config import PacerConfig
from penstock.envs.harness.retrieval.embeddings import HttpEmbedder
from penstock.envs.harness.session import Session
from penstock.infra.agent.checkout import open_checkout
from penstock.infra.agent.loop import AgentReport, work
from penstock.infra.agent.model import Model
from penstock.infra.agent.outcome import exit_code, report_outcome, run_tests, watched
from penstock.infra.commands.output import print_result, printable
from penstock.infra.run.runs import RunDir, find_run
from penstock.infra.stores.open import read_file, read_section
from penstock.messages.errors import ConfigError
from penstock.messages.task import Limits

KEY_VARIABLE = "PENSTOCK_AGENT_KEY"
TESTS_S_MAX = 600.0


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code says how the work ended (`outcome.py`)."""
    report = asyncio.run(_run(arguments))
    print_result(report, as_json=arguments.json)
    return exit_code(report)


async def _run(arguments: argparse.Namespace) -> AgentReport:
    model = _model(arguments)
    sends = arguments.feedback or not arguments.url
    async with watched(arguments.repo, _say) as watch:
        report = await _work(model, arguments)
        await watch.agent_done()
        if sends and report.num_turns:
            await report_outcome(model, report)
        if sends and arguments.kept_minutes and report.num_turns:
            with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C ends the waiting alone.
                await watch.report_kept(model, report, arguments.kept_minutes)
    if report.feedback_refused:
        _say(f"feedback was not taken: {report.feedback_refused}")
    return report


async def _work(model: Model, arguments: argparse.Namespace) -> AgentReport:
    limits = Limits(tool_s_max=arguments.tool_s, output_bytes_max=arguments.output_bytes)
    embedder = None
    if arguments.embeddings:
        embedder = HttpEmbedder(arguments.embeddings, arguments.embeddings_model)
    async with open_checkout(arguments.repo, _say) as sandbox:
        session = Session(model.harness, sandbox, limits, embedder)
        report = await work(model, session, arguments.instruction, arguments.turns, _say)
        if arguments.tests:
            report.tests_passed = await run_tests(sandbox, arguments.tests, TESTS_S_MAX)
    return report


def _model(arguments: argparse.Namespace) -> Model:
    """Return the endpoint, with the tools that its policy knows.

    Raises:
        ConfigError: `--url` without `--harness`, or no harness of that version.

    """
    if arguments.url:
        if not arguments.harness:
            raise ConfigError("--harness: expected 1 or 2 with --url: the tools that it is offered")
        key = arguments.key_file.read_text().strip() if arguments.key_file else ""
        key = key or os.environ.get(KEY_VARIABLE, "")
        return Model(arguments.url, key, arguments.model, arguments.harness)
    found = find_run(arguments.run, arguments.runs_dir)
    key = found.gateway_key.read_text().strip()
    url = f"{found.gateway_url.read_text().strip()}/v1"
    return Model(url, key, arguments.model, arguments.harness or harness_of(found))


def harness_of(run: RunDir) -> str:
    """Return the version of the harness that a run's policy learns with."""
    section = read_section(read_file(run.config), str(run.config), "pacer", PacerConfig)
    return section.harness


def _say(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")
