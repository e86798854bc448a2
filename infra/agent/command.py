"""The command `penstock agent --repo DIR "..."`."""

import argparse
import asyncio
import contextlib
import sys

from penstock.envs.harness.retrieval.embeddings import HttpEmbedder
from penstock.envs.harness.session import ToolSession
from penstock.infra.agent.checkout import open_checkout
from penstock.infra.agent.display import Display
from penstock.infra.agent.endpoint import model_of_run, model_of_url
from penstock.infra.agent.loop import AgentReport, Dialogue
from penstock.infra.agent.model import Model
from penstock.infra.agent.outcome import exit_code, report_outcome, run_tests, watched
from penstock.infra.output import print_result, printable, write_to
from penstock.infra.run.runs import find_run
from penstock.messages.task import Limits

TESTS_S_MAX = 600.0
SHOWN_CHARACTERS_MAX = 400
"""Of each message, call and result."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code says how the work ended (`outcome.py`)."""
    report = asyncio.run(_run(arguments))
    print_result(report, as_json=arguments.json)
    return exit_code(report)


async def _run(arguments: argparse.Namespace) -> AgentReport:
    if arguments.url:
        model = model_of_url(arguments)
    else:
        model = model_of_run(find_run(arguments.run, arguments.runs_dir), arguments)
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
        embedder = HttpEmbedder(
            arguments.embeddings,
            arguments.embeddings_model,
            allowed=arguments.allow_plain_text,
        )
    async with open_checkout(arguments.repo, _say) as sandbox:
        session = ToolSession(model.harness, sandbox, limits, embedder)
        conversation = Dialogue(model, session, Display(sys.stderr.write, SHOWN_CHARACTERS_MAX))
        report = await conversation.ask(arguments.instruction, arguments.turns)
        if arguments.tests:
            report.tests_passed = await run_tests(sandbox, arguments.tests, TESTS_S_MAX)
    return report


def _say(text: str) -> None:
    write_to(sys.stderr, printable(text) + "\n")
